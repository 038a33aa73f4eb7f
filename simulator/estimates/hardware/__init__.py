"""Published figures of the machines that are available as presets."""
