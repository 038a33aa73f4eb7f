"""The demo of ebbtide: measure, profile, plan, train, crash and resume on this machine."""
