"""A small Llama with random weights, and random tokens to train it on."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, SEQUENCE = 256, 64


def tiny_llama() -> torch.nn.Module:
    """Under ZeRO-3, if the trainer has set it up, its parameters are partitioned as it is made."""
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
    """Each with ``input_ids`` and ``labels``."""
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]
