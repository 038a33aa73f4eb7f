"""The update kernels: one step of Adam on the host and on the device. Imports nothing of ours."""
