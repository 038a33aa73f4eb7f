"""Models that people train, over links from fast to slow: pairs for `studies.optimality`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from simulator import Machine, Workload, preset, workload_from_model

_LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama 8B": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Llama 13B": _LLAMA,
    "Qwen 3B": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
LINKS_BYTES_PER_S = (55e9, 20e9, 10e9)
SUBGROUP_SIZES = (10**9, 10**8)
RANKS = (1, 2)
ACCUMULATION = (1, 4)


def real_pairs(machine: str = "h100-node") -> Iterator[tuple[dict[str, Any], Workload, Machine]]:
    """(what it is, workload, machine) of each model, link, size of subgroups, ranks, accumulation.

    The preset machine with another link, the same both ways; bf16, micro-batches of two.
    """
    for model, ranks, accumulation, size, link in product(
        MODELS, RANKS, ACCUMULATION, SUBGROUP_SIZES, LINKS_BYTES_PER_S
    ):
        node = preset(machine).with_rates(h2d_bytes_per_s=link, d2h_bytes_per_s=link)
        config = {"bf16": {"enabled": True}, "zero_optimization": {"sub_group_size": size}}
        workload = workload_from_model(
            MODELS[model], node, config, micro_batch=2, data_parallel=ranks,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        what = {
            "model": model, "link_bytes_per_s": link, "sub_group_size": size, "ranks": ranks,
            "gradient_accumulation_steps": accumulation, "machine": machine,
        }  # fmt: skip
        yield what, workload, node
