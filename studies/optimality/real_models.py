"""Models that people train, on machines with fast and slow links, as cases for `studies.optimality`."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ebbtide.simulator import Machine, Workload, preset, workload_from_model
from ebbtide.simulator.limits import GIB, Limits

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama 8B": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama 13B": _LLAMA,
    "Qwen 3B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
LINKS_BYTES_PER_S = (55e9, 20e9, 10e9)
SUBGROUP_SIZES = (10**8,)  # the given one. The planner tries others too
RANKS = (1, 2)
ACCUMULATION = (1, 4)
NODES = ("h100-node", "a100-node")
DEVICE_GIB = (24, 40, 80)
MANY_LINKS_BYTES_PER_S = (*(n * 5e9 for n in range(2, 10)), 55e9)


def real_pairs(machine: str = "h100-node") -> Iterator[tuple[dict[str, Any], Workload, Machine]]:
    """Yield a description, a workload and a machine for each combination of training settings of real
    models.

    The settings are the model, the bandwidth of the link, the subgroup size, the number of ranks and the
    number of accumulation steps. The machine is a preset, with the link's bandwidth replaced in both
    directions. Training uses bf16 and micro-batches of two samples.
    """
    for model, ranks, accumulation, size, link in product(
        MODELS, RANKS, ACCUMULATION, SUBGROUP_SIZES, LINKS_BYTES_PER_S
    ):
        node = preset(machine).with_rates(h2d_bytes_per_s=link, d2h_bytes_per_s=link)
        config = {"bf16": {"enabled": True}, "zero_optimization": {"sub_group_size": size}}
        workload = workload_from_model(
            MODELS[model], node, config, micro_batch=2, data_parallel=ranks, gradient_accumulation_steps=accumulation
        )
        what = {
            "model": model,
            "link_bytes_per_s": link,
            "sub_group_size": size,
            "ranks": ranks,
            "gradient_accumulation_steps": accumulation,
            "machine": machine,
        }
        yield what, workload, node


def further_pairs() -> Iterator[tuple[dict[str, Any], Workload, Machine]]:
    """Yield further cases for `studies.optimality`, each a description, a workload and a machine.

    There is a case for each combination of model, node, GPU memory size, number of ranks and subgroup size with a
    workload that fits into GPU memory. Qwen 3B has more cases, because its embedding is large relative to its layers.
    They have GPUs with 24 GiB, many bandwidths of the link, and an output head that is tied to the embedding or not.
    Micro-batches have one sample.
    """
    for model, name, gib, ranks, size in product(MODELS, NODES, DEVICE_GIB, (1, 4), SUBGROUP_SIZES):
        what = {"model": model, "device_gib": gib, "sub_group_size": size, "ranks": ranks}
        node = preset(name).with_rates(device_memory_bytes=gib * GIB)
        yield from _fitting(MODELS[model], node, {**what, "machine": name})
    for name, tied, accumulation, link in product(NODES, (True, False), ACCUMULATION, MANY_LINKS_BYTES_PER_S):
        what = {
            "model": "Qwen 3B",
            "tied": tied,
            "link_bytes_per_s": link,
            "machine": name,
            "gradient_accumulation_steps": accumulation,
            "sub_group_size": 10**8,
        }
        rates = {"h2d_bytes_per_s": link, "d2h_bytes_per_s": link, "device_memory_bytes": 24 * GIB}
        described = {**MODELS["Qwen 3B"], "tie_word_embeddings": tied}
        yield from _fitting(described, preset(name).with_rates(**rates), what)


def _fitting(
    model: Mapping[str, Any], node: Machine, what: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], Workload, Machine]]:
    size = what["sub_group_size"]
    config = {"bf16": {"enabled": True}, "zero_optimization": {"sub_group_size": size}}
    workload = workload_from_model(
        model,
        node,
        config,
        micro_batch=1,
        data_parallel=what.get("ranks", 1),
        gradient_accumulation_steps=what.get("gradient_accumulation_steps", 1),
    )
    taken = workload.device_base_bytes + sum(n.activation_bytes for n in workload.layers)
    if taken <= Limits.of(workload, node).device_bytes:
        yield what, workload, node
