"""Study of stored optimizer state: ebbtide compared with DeepSpeed's NVMe offload, on a real disk."""
