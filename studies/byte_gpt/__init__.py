"""Former name of the module `studies.bench.byte_gpt`, kept for scripts that import the old name."""

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ByteGPTConfig, ds_config, train_step

__all__ = ["SIZES", "Batches", "ByteGPT", "ByteGPTConfig", "ds_config", "train_step"]
