"""A search by simulation for the training configuration that is fastest on a machine.

A configuration consists of settings such as the micro-batch size, the ZeRO stage and the number of GPUs. A plan never
changes training results. A change of the configuration may change their bits, since gradients are then summed in
another order.
"""
