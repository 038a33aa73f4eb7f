"""The shadow prices of a training job: the time that training would save with a little more GPU memory, or
with a faster link to the GPU.
"""

from typing import Any

from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.quantities import told_seconds

LINK_STEP = 10e9


def shadow_prices(workload: Workload, machine: Machine, plan: Plan, options: dict[str, Any]) -> list[str]:
    """Return a list of sentences on the time that training would save with 1 GiB more GPU memory, or with a
    link between host and GPU that is faster by 10 GB/s.

    For each of the two changes, a new plan is searched. The link becomes faster in both directions.
    """
    from ebbtide.tuner.placements.planning import plan as search

    assert plan.prediction is not None
    base_s = plan.prediction.iteration_s
    memory = options.get("device_memory_bytes") or machine.device_memory_bytes
    most = max(machine.device_memory_bytes, memory + GIB)
    larger = machine.model_copy(update={"device_memory_bytes": most})
    roomier = search(workload, larger, **{**options, "device_memory_bytes": memory + GIB})
    faster = machine.with_rates(
        h2d_bytes_per_s=machine.h2d_bytes_per_s.median + LINK_STEP,
        d2h_bytes_per_s=machine.d2h_bytes_per_s.median + LINK_STEP,
    )
    quicker = search(workload, faster, **options)
    return [
        _line("one more GiB of GPU memory", base_s, roomier),
        _line("10 GB/s more bandwidth between host and GPU in each direction", base_s, quicker),
    ]


def _line(what: str, base_s: float, other: Plan) -> str:
    assert other.prediction is not None
    saved_s = max(0.0, base_s - other.prediction.iteration_s)
    return f"{what} would save {told_seconds(saved_s)} ({saved_s / base_s:.1%})"
