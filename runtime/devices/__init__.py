"""Devices that ops run on: CUDA streams, or emulated ones."""
