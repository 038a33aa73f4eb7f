"""DeepSpeed's ZeRO optimizers under a plan. The plan takes over the buffers and steps of the engine's optimizer."""
