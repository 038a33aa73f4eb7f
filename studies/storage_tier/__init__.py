"""Stored state compared with DeepSpeed's NVMe offload, on a real disk."""
