"""Plans that are made or changed while training runs, and comparisons of their predicted with measured times."""
