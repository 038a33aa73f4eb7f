"""A search by simulation for the configuration that trains fastest on a machine.

Unlike a plan, a configuration may change results bitwise, since micro-batches are summed in another order.
"""
