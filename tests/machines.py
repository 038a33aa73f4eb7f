"""Simulated machines and workloads for tests, in round numbers, so that expected results can be worked out by hand."""

import random

from ebbtide.simulator import Layer, Machine, Quantity, Workload

GIB = 2**30


def _made(rates, facts, changes):
    values = {k: changes.pop(k, v) for k, v in rates.items()}
    exact = {k: v if isinstance(v, Quantity) else Quantity.exact(v) for k, v in values.items()}
    return Machine(**{**facts, **exact, **changes})


def machine(**changes):
    """Return a simulated machine with all rates at 1 per second, so that an op with work w alone takes w seconds."""
    rates = {
        "h2d_bytes_per_s": 1.0,
        "d2h_bytes_per_s": 1.0,
        "dram_bytes_per_s": 1e6,
        "host_adam_params_per_s": 1.0,
        "stock_host_adam_params_per_s": 1.0,
        "device_adam_params_per_s": 1.0,
        "storage_write_bytes_per_s": 1.0,
        "host_copy_bytes_per_s": 1.0,
        "pageable_h2d_bytes_per_s": 1.0,
        "pageable_d2h_bytes_per_s": 1.0,
        "duplex_factor": 1.0,
        "network_bytes_per_s": 1.0,
    }
    facts = {
        "name": "unit",
        "device_kind": "cuda",
        "cpu_cores": 8,
        "host_memory_bytes": GIB,
        "device_memory_bytes": GIB,
        "copy_latency_s": 0.0,
        "launch_latency_s": 0.0,
    }
    return _made(rates, facts, changes)


def node(**changes):
    """Return a typical simulated machine in round numbers: copies between host and GPU at 50 GB/s, DRAM at 200
    GB/s, 16 cores.

    Args:
        changes: Values that replace those of the typical machine, by field name of `Machine`. `Machine` computes some
            missing bandwidths from others: a copy within host memory, for example, has a third of the DRAM bandwidth.
    """
    rates = {
        "h2d_bytes_per_s": 50e9,
        "d2h_bytes_per_s": 50e9,
        "dram_bytes_per_s": 200e9,
        "host_adam_params_per_s": 3e9,
        "stock_host_adam_params_per_s": 1.5e9,
        "device_adam_params_per_s": 50e9,
        "storage_write_bytes_per_s": 2e9,
    }
    optional = ("host_copy_bytes_per_s", "pageable_h2d_bytes_per_s", "network_bytes_per_s")
    rates |= {name: changes[name] for name in optional if name in changes}
    facts = {
        "name": "node",
        "device_kind": "cuda",
        "cpu_cores": 16,
        "host_memory_bytes": 128 * GIB,
        "device_memory_bytes": 24 * GIB,
    }
    return _made(rates, facts, changes)


def workload(sizes=(10, 10, 10, 10), forward_s=1.0, backward_s=2.0, **fields):
    """Return a workload for the simulator in which each subgroup is one layer."""
    layers = tuple(Layer(params=n, forward_s=forward_s, backward_s=backward_s, activation_bytes=7) for n in sizes)
    return Workload(name="w", layers=layers, subgroups=tuple(sizes), **fields)


def random_machine(rng: random.Random):
    """Return a random simulated machine. Its rates are drawn from a range of three orders of magnitude, so that any
    of the resources may be the slowest one.
    """

    def rate():
        return 10 ** rng.uniform(0, 3)

    return machine(
        h2d_bytes_per_s=rate(),
        d2h_bytes_per_s=rate(),
        dram_bytes_per_s=10 * rate(),
        host_adam_params_per_s=rate(),
        stock_host_adam_params_per_s=rate(),
        device_adam_params_per_s=rate(),
        host_copy_bytes_per_s=rate(),
        pageable_h2d_bytes_per_s=rate(),
        pageable_d2h_bytes_per_s=rate(),
        network_bytes_per_s=rate(),
        duplex_factor=rng.uniform(0.5, 1.0),
        copy_latency_s=rng.choice([0.0, 0.01]),
        launch_latency_s=rng.choice([0.0, 0.005]),
        cpu_cores=rng.randint(1, 16),
        unified_memory=rng.random() < 0.15,
        device_shares_host_cores=rng.random() < 0.15,
    )


def random_workload(rng: random.Random, zero_stage: int = 3):
    """Return a random workload for the simulator, in which layers and subgroups end at different parameters."""
    whole = zero_stage < 3  # under ZeRO-1 and 2, parameters are gathered only at the end of a step
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 9))]
    total, layers, left = sum(sizes), [], sum(sizes)
    while left:
        params = min(left, rng.randint(1, max(1, total // 3)))
        left -= params
        layers.append(
            Layer(
                params=params,
                forward_s=rng.uniform(0, 3),
                backward_s=rng.uniform(0, 3),
                activation_bytes=rng.randint(0, 50),
                network_gather_bytes=0 if whole else rng.choice([0, 0, rng.randint(1, 40)]),
                network_reduce_bytes=rng.choice([0, 0, rng.randint(1, 40)]),
            )
        )
    made = Workload(
        name="random",
        layers=tuple(layers),
        subgroups=tuple(sizes),
        gradient_accumulation_steps=rng.randint(1, 3),
        ranks_per_node=rng.choice([1, 1, 2, 4]),
        pipeline_idle_s=rng.choice([0.0, rng.uniform(0, 2)]),
        clip=rng.random() < 0.7,
        stock_backward_extra_s=rng.choice([None, rng.uniform(0, 2)]),
        device_base_bytes=rng.randint(0, 100),
        wire_dtype=rng.choice(["bf16", "fp32"]),
        grad_bytes_per_param=rng.choice([2, 4]),
        zero_stage=zero_stage,
        step_gather_s=rng.choice([0.0, rng.uniform(0, 2)]) if whole else 0.0,
        network_step_gather_bytes=rng.choice([0, rng.randint(1, 40)]) if whole else 0,
        reduced_beside=rng.choice([1.0, 0.0, rng.random()]),
    )
    buckets = [rng.choice([0, rng.randint(1, total)]) for _ in range(2)]
    return made.model_copy(update={"reduce_bucket_params": buckets[0], "planned_bucket_params": buckets[1]})
