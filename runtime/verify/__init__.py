"""Digests of a training run, taken inside the process that trains; `tune verify` compares them."""
