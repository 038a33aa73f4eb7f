"""A study of published training runs: their machines and models, and predictions of their times."""
