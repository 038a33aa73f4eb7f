"""Records of a training run's state, taken inside the training process. `tune verify` compares them between runs."""
