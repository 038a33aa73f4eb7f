"""The optimizer update kernels, which run one optimizer step on the CPU or the GPU.

They import no other part of the runtime.
"""
