"""Plans that are made or changed while training runs, and comparisons of predicted with measured times."""
