"""DeepSpeed's ZeRO optimizers under a plan, which takes over the buffers and steps of the engine's
optimizer.
"""
