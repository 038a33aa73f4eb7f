"""Helpers of the example scripts: a small Llama with random weights, and random tokens to train it on."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, SEQUENCE = 256, 64


def tiny_llama() -> torch.nn.Module:
    """Build the small Llama that the examples train.

    If the trainer has set up ZeRO-3, the parameters are partitioned while the model is built.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
    )
    return AutoModelForCausalLM.from_config(config)


def samples(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Return a list of training samples of random tokens, each a dict with the tensors ``input_ids`` and ``labels``."""
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]
