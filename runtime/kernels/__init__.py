"""The update kernels: one step of an optimizer on host and device. Imports nothing of ours."""
