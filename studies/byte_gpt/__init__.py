"""`studies.bench.byte_gpt` under the name that scripts have imported it by."""

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ByteGPTConfig, ds_config, train_step

__all__ = ["SIZES", "Batches", "ByteGPT", "ByteGPTConfig", "ds_config", "train_step"]
