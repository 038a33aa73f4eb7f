"""Code for the training runs of several studies.

A run trains one variant, such as stock DeepSpeed, in its own process, or trains under several plans in turn on one
engine.
"""
