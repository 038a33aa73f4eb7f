"""DeepSpeed's ZeRO optimizers under a plan: attached to it, with their buffers and steps taken over."""
