"""The optimizer update kernels: one optimizer step on the CPU or the GPU. They import no other part of ebbtide."""
