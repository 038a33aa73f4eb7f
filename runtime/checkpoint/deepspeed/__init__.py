"""DeepSpeed's checkpoint engine: saving, loading and resuming."""
