"""``tune doctor``: is this machine ready to train under a plan, and if not, what to change."""
