"""Whether the simulator shares the node as it was measured to be shared."""

from __future__ import annotations

from profiler.ranks import HOST_ADAM_BYTES
from simulator.engines.reference import alone_s, capacities, demands
from simulator.engines.sharing import max_min_speeds
from simulator.machine import Machine
from simulator.schedule import Lane, Op, OpKind

TOLERANCE = 0.15  # of full speed
_WORK = 1e9  # bytes or parameters: far above any latency


def simulated_share(work: str, neighbour: str, machine: Machine) -> float | None:
    """Speed of ``work`` beside ``neighbour`` over its speed alone, as the simulator has it.

    None: one of them is nothing that a schedule holds.
    """
    ops = _ops(machine)
    if work not in ops or neighbour not in ops:
        return None
    pair = [ops[work], ops[neighbour]]
    asked = [demands(op, machine, alone_s(op, machine)) for op in pair]
    return max_min_speeds(asked, capacities(machine, 1))[0]


def differences(machine: Machine) -> list[str]:
    """Where the measured contention and the simulator's are further apart than `TOLERANCE`."""
    found = []
    for name, measured in machine.contention.items():
        work, _, neighbour = name.partition("_while_")
        simulated = simulated_share(work, neighbour, machine)
        if simulated is None or measured.q1 - TOLERANCE <= simulated <= measured.q3 + TOLERANCE:
            continue
        found.append(
            f"{work} beside {neighbour} reaches {measured.median:.0%} of its speed alone, but the "
            f"simulator takes {simulated:.0%}: predictions of plans that overlap them are off"
        )
    return found


def _ops(machine: Machine) -> dict[str, Op]:
    """One op of each kind that is measured beside another."""
    return {
        "host_adam": Op(
            0, OpKind.UPDATE_HOST, Lane.HOST, _WORK, "host_adam_params_per_s",
            dram_bytes=_WORK * HOST_ADAM_BYTES, cores=machine.cpu_cores,
        ),
        "h2d": Op(0, OpKind.STATE_H2D, Lane.H2D, _WORK, "h2d_bytes_per_s", dram_bytes=_WORK),
        "d2h": Op(0, OpKind.STATE_D2H, Lane.D2H, _WORK, "d2h_bytes_per_s", dram_bytes=_WORK),
        "compute": Op(0, OpKind.FORWARD, Lane.COMPUTE, 1.0, device_share=1.0),
        "storage_write": Op(
            0, OpKind.PERSIST, Lane.STORAGE, _WORK, "storage_write_bytes_per_s", dram_bytes=_WORK
        ),
    }  # fmt: skip
