"""A comparison between measured and simulated slowdown of two activities (such as a copy and CPU updates) at once."""

from ebbtide.profiler.rates.ranks import HOST_ADAM_BYTES
from ebbtide.simulator.analysis.goodput import WRITE_TRAFFIC, writer_cores
from ebbtide.simulator.engines.reference import alone_s, capacities, demands, max_min_speeds
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import CheckpointPlan
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedule import Lane, Op, OpKind

_BESIDE_ADAM = ("host_adam_while_storage_write", "storage_write_while_host_adam")
_BESIDE_PASSES = ("passes_while_storage_write", "storage_write_while_passes")
TOLERANCE = 0.15  # share of full speed
_WORK = 1e9  # bytes or parameters. The latency is negligible at this size


def simulated_share(work: str, neighbour: str, machine: Machine) -> float | None:
    """Return the simulated speed of an activity (such as ``h2d``) while another runs, divided by its speed alone.

    Return None if the simulator cannot simulate one of them.
    """
    ops = _ops(machine)
    if work not in ops or neighbour not in ops:
        return None
    pair = [ops[work], ops[neighbour]]
    requested = [demands(op, machine, alone_s(op, machine)) for op in pair]
    return max_min_speeds(requested, capacities(machine, 1))[0]


def differences(machine: Machine) -> list[str]:
    """Return a warning for each pair of activities that the simulator predicts wrongly when both run at the same time.

    Such a pair is, for example, a copy to the GPU and CPU updates. The simulator is wrong if the two slow each other
    down clearly more, or clearly less, in the measurement than in the simulation.
    """
    result = []
    for name, measured in machine.contention.items():
        work, _, neighbour = name.partition("_while_")
        simulated = simulated_share(work, neighbour, machine)
        if simulated is None or measured.q1 - TOLERANCE <= simulated <= measured.q3 + TOLERANCE:
            continue
        result.append(
            f"{work} reaches {measured.median:.0%} of its speed alone while {neighbour} runs, but the "
            f"simulator assumes {simulated:.0%}: predictions of plans that overlap the two are off"
        )
    return result


def with_writer_cost(machine: Machine) -> Machine:
    """Return a copy of a machine such that the simulator predicts the measured slowdown by checkpoint writes.

    The copy has another value for the CPU time that writing a checkpoint takes per byte. A writer's own thread takes
    some CPU time, but training loses more, since the operating system and the disk's driver also use cores. So the CPU
    time follows from the measured slowdown of CPU updates, or of forward and backward if these run on the CPU. The CPU
    time is never below that of the writer's thread, and is unchanged if no slowdown was measured.
    """
    thread, find = machine.writer_s_per_byte, machine.contention.get
    passes, adam = map(find, _BESIDE_PASSES), map(find, _BESIDE_ADAM)
    for name, cost_for, (work, writing) in (
        ("forward and backward have {passes:.0%}", _cost_of_cores, passes),
        ("it and host Adam have {both:.0%}", _cost_for, adam),
    ):
        if thread is None or work is None or writing is None:
            continue
        # No copy is faster beside another than alone. A speed above 1 is noise, and must not hide the slowdown of the
        # other copy.
        shares = [(min(1.0, getattr(work, q)), min(1.0, getattr(writing, q))) for q in ("q1", "median", "q3")]
        low, middle, high = sorted(cost_for(machine, thread.median, *share) for share in shares)
        source = name.format(passes=shares[1][0], both=sum(shares[1]) / 2)
        cost = Quantity(
            median=middle,
            q1=low,
            q3=high,
            n=work.n,
            source="measured",
            detail=thread.detail
            if middle == thread.median
            else f"{thread.detail}; raised until {source} of their speed",
        )
        return machine.model_copy(update={"writer_s_per_byte": cost})
    return machine


def _most(machine: Machine) -> float:
    return CheckpointPlan().writers / machine.storage_write_bytes_per_s.median


def _cost_of_cores(machine: Machine, least: float, work: float, writing: float) -> float:
    written = machine.storage_write_bytes_per_s.median * writing
    lost = machine.cpu_cores * (1 - work) / written if written else 0.0
    return min(max(least, lost), max(least, _most(machine)))


def _cost_for(machine: Machine, least: float, work: float, writing: float) -> float:
    share = (work + writing) / 2
    low, high = least, max(least, _most(machine))
    for _ in range(40):
        middle = (low + high) / 2
        tried = machine.model_copy(update={"writer_s_per_byte": Quantity.exact(middle)})
        simulated = simulated_share("host_adam", "storage_write", tried)
        assert simulated is not None
        low, high = (low, middle) if simulated <= share else (middle, high)
    return low if low == least else high


def _ops(machine: Machine) -> dict[str, Op]:
    return {
        "host_adam": Op(
            0,
            OpKind.UPDATE_HOST,
            Lane.HOST,
            _WORK,
            "host_adam_params_per_s",
            dram_bytes=_WORK * HOST_ADAM_BYTES,
            cores=machine.cpu_cores,
        ),
        "h2d": Op(0, OpKind.STATE_H2D, Lane.H2D, _WORK, "h2d_bytes_per_s", dram_bytes=_WORK),
        "d2h": Op(0, OpKind.STATE_D2H, Lane.D2H, _WORK, "d2h_bytes_per_s", dram_bytes=_WORK),
        "compute": Op(0, OpKind.FORWARD, Lane.COMPUTE, 1.0, device_share=1.0),
        "storage_write": Op(
            0,
            OpKind.PERSIST,
            Lane.STORAGE,
            _WORK,
            "storage_write_bytes_per_s",
            dram_bytes=WRITE_TRAFFIC * _WORK,
            cores=writer_cores(machine, CheckpointPlan()),
        ),
    }
