"""DeepSpeed ZeRO under a plan: attaches, adopts its buffers, takes over its step."""
