"""The demo: measure, profile, plan, train, crash and resume on this machine."""
