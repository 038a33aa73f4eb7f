"""Ways to train that studies compare: one in a process of its own, several plans on one engine."""
