"""Plans that are made or changed while training runs."""
