"""``tune verify``: does a script train the same under a plan, stock and without offload?"""
