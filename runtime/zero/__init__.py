"""DeepSpeed's ZeRO optimizers, changed to run under a plan.

A changed optimizer takes over the buffers of the engine's original optimizer, and runs the optimizer steps instead of
it.
"""
