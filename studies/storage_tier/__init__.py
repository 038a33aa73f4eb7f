"""Study of optimizer state on a real disk: ebbtide compared with DeepSpeed's NVMe offload."""
