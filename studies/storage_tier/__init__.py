"""State on storage beside DeepSpeed's NVMe offload, on a real disk."""
