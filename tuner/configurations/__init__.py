"""A search by simulation for the training configuration that is fastest on a machine.

A configuration has, for example, the micro-batch size, the ZeRO stage and the number of GPUs. Unlike a plan,
it may change training results bitwise, since gradients are summed in another order.
"""
