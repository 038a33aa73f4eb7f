"""Records of a training run's state that `tune verify` compares between runs. The training process writes them."""
