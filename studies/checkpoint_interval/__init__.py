"""Goodput over the checkpoint interval: training that is killed, beside what was predicted."""
