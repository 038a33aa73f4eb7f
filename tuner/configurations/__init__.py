"""Which configuration trains fastest on a machine: a search by simulation over what a user may set.

Unlike a plan, a configuration may change bits: micro-batches are summed in another order.
"""
