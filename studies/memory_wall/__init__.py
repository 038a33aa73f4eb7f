"""Memory, link traffic and utilization in each phase of training with stock ZeRO-3 and offloading."""
