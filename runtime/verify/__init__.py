"""Digests of a training run, taken inside the training process. `tune verify` compares them."""
