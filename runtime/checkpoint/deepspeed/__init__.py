"""The DeepSpeed interface of ebbtide's checkpoint engine: saving, loading and resuming."""
