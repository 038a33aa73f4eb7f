"""Memory use, PCIe traffic and utilization of the GPU in each phase of training with stock ZeRO-3 and offloading."""
