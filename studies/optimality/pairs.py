"""Pairs of a workload and a machine, as cases for `studies.optimality`: random ones, and models that people train on
machines with fast and slow links.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from ebbtide.simulator import Layer, Machine, Quantity, Workload, preset, workload_from_model
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
SUBGROUP_SIZES = (10**8,)  # the subgroup size that is given. The planner tries other sizes too
RANKS = (1, 2)
ACCUMULATION = (1, 4)
NODES = ("h100-node", "a100-node")
DEVICE_GIB = (24, 40, 80)
MANY_LINKS_BYTES_PER_S = (*(n * 5e9 for n in range(2, 10)), 55e9)
PARTS = 10  # parameters in a layer of a random workload


def real_pairs(machine: str = "h100-node") -> Iterator[tuple[dict[str, Any], Workload, Machine]]:
    """Yield a description, a workload and a machine for each combination of training settings of real models.

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


def random_pair(rng: np.random.Generator, counts: tuple[int, int] = (10, 100)) -> tuple[Workload, Machine]:
    """Return a random workload and a random machine. The machine's bandwidths and update speeds are random too, such as
    10 to 100 GB/s for copies to the GPU.

    Args:
        counts: Smallest and largest number of subgroups of the workload.
    """
    count = int(rng.integers(counts[0], counts[1] + 1))
    size = int(rng.integers(10, 101)) * 10**6
    forward_s = float(rng.uniform(0.2, 3.0)) * count * size / 7e9
    layer = Layer(
        params=size,
        forward_s=forward_s / count,
        backward_s=2 * forward_s / count,
        activation_bytes=int(rng.integers(0, 200)) * 2**20,
    )
    workload = Workload(
        name="random",
        layers=(layer,) * count,
        subgroups=(size,) * count,
        subgroup_size=size,
        parameters=((size // PARTS,) * PARTS * count,),
        device_base_bytes=2 * count * size,
    )
    rates = {
        "h2d_bytes_per_s": rng.uniform(10e9, 100e9),
        "d2h_bytes_per_s": rng.uniform(10e9, 100e9),
        "dram_bytes_per_s": rng.uniform(100e9, 500e9),
        "host_adam_params_per_s": rng.uniform(0.5e9, 8e9),
        "stock_host_adam_params_per_s": 0.5e9,
        "storage_write_bytes_per_s": 2e9,
        "device_adam_params_per_s": rng.uniform(20e9, 150e9),
    }
    needed = workload.device_base_bytes + sum(w.activation_bytes for w in workload.layers)
    machine = Machine(
        name="random",
        device_kind="cuda",
        cpu_cores=32,
        host_memory_bytes=2**41,
        device_memory_bytes=int(needed * rng.uniform(1.3, 2.5)) + 4 * GIB,
        duplex_factor=Quantity.exact(float(rng.uniform(0.6, 1.0))),
        **{name: Quantity.exact(float(value)) for name, value in rates.items()},
    )
    return workload, machine
