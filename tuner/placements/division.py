"""A check, without a simulation, of whether a training job's state fits within the memory limits.

The check allows every division of the parameters among placements and parameter locations, even one that cuts
subgroups, and counts staging buffers as zero bytes. A small linear program finds the division that exceeds the memory
limits by the fewest bytes. Every real plan exceeds the limits by at least as many bytes. If this number is above zero,
the job is therefore refused immediately. The division also shows where to look for plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ebbtide.simulator.limits import GIB, MIB, Limits, Peaks, size
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.steps import Queue
from ebbtide.simulator.update.way import Way, plain_ways
from ebbtide.simulator.workload import Workload


class ImpossibleError(RuleError):
    """An error for a training job that no plan fits into memory. The message names each memory that is too small.

    Attributes:
        fact: Sentence about the missing memory. The memory that lacks most comes first.
        advice: General advice. `ebbtide.tuner.advice.ways_out` tries changes and gives better advice.
        missing: Missing bytes by memory, for the plan that comes nearest to fitting.
        nearest: Memory peaks of that plan.
        ways: Smallest changes of the job with which a plan fits, if `ebbtide.plan` has looked for them.
    """

    ways: tuple[Any, ...] = ()
    nearest: Peaks | None = None

    def __init__(self, fact: str, advice: str, missing: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{fact}. {advice}")
        self.fact, self.advice, self.missing = fact, advice, dict(missing or {})

    @classmethod
    def explain(cls, workload: Workload, limits: Limits, scores: Sequence[Peaks]) -> "ImpossibleError":
        """Build the error for a training job that no plan fits into memory, from the memory peaks of all
        plans that were tried.
        """
        nearest = min(scores, key=limits.missing_bytes)
        taken = {
            "GPU memory": nearest.device_peak_bytes,
            "host memory": nearest.host_peak_bytes + (nearest.device_peak_bytes if limits.unified else 0),
            "storage": nearest.storage_bytes,
        }
        lacking = limits.missing(nearest.device_peak_bytes, nearest.host_peak_bytes, nearest.storage_bytes)
        binding = sorted(lacking, key=lambda name: -lacking[name])
        short = [_short(name, lacking[name], taken[name], workload.ranks_per_node) for name in binding]
        if limits.unified:
            short.append("GPU and host share one memory")
        short += _logits(workload, lacking.get("GPU memory", 0))
        state = size(workload.params * workload.optimizer_state.state_bytes)
        why = f"The optimizer state of this rank's {workload.params / 1e9:.3g} billion parameters alone takes {state}"
        made = cls("; ".join(short), f"{why}. {_ADVICE[binding[0]]}", lacking)
        made.nearest = nearest
        return made


def _logits(workload: Workload, lacking: int) -> list[str]:
    job = workload.job
    if job is None or job.fused_loss or not lacking:
        return []
    if job.logits_bytes < lacking:
        return []
    return [f"the logits and their fp32 copies take {size(job.logits_bytes)}, which a fused or chunked loss saves"]


def _short(name: str, lacking: int, taken: int, ranks: int) -> str:
    whose = ""
    if name != "GPU memory" and ranks > 1:
        lacking, taken, whose = lacking * ranks, taken * ranks, f" by the {ranks} ranks of a machine together"
    short = f"{lacking / GIB:.2f} GiB" if lacking > 0.01 * GIB else size(lacking)  # 0.00 would hide it
    usable = f"{(taken - lacking) / GIB:.2f} GiB are usable"
    return f"{name} is {short} short ({taken / GIB:.2f} GiB are needed{whose}, {usable})"


_ADVICE = {
    "GPU memory": "Use less with a smaller micro-batch, a shorter sequence, activation checkpointing or ZeRO-3 "
    "(--micro-batch, --sequence, --zero-stage 3), use more ranks (--data-parallel), or allow more GPU memory "
    "(--gpu-memory)",
    "host memory": "Keep state on a drive (--storage, ZeRO-3 only), use more ranks (--data-parallel), "
    "or allow more memory (--host-memory, --gpu-memory)",
    "storage": "Allow more space on the drive or more host memory (--storage, --host-memory)",
}


@dataclass(frozen=True)
class Division:
    """The division of a model's parameters among placements that leaves the most room in the fullest memory.

    Attributes:
        device_peak_bytes: Peak of GPU memory in bytes.
        host_peak_bytes: Peak of host memory in bytes.
        shares: Dict from a pair of placement and location of the 16-bit parameters to the fraction of the parameters.
    """

    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int
    shares: Mapping[tuple[Placement, ParameterLocation], float]

    def of(self, placement: Placement) -> float:
        """Return the fraction of the model's parameters that have the given placement of their optimizer state."""
        return sum(share for (p, _), share in self.shares.items() if p == placement)

    @property
    def away(self) -> float:
        """Return the fraction of the model's 16-bit parameters that live in host memory."""
        return sum(share for (_, location), share in self.shares.items() if location == "host")


def roomiest(workload: Workload, machine: Machine, limits: Limits, away: float | None = None) -> Division:
    """Return the division of a model's parameters among placements that leaves the most free bytes in the fullest
    memory.

    The memories are the GPU's, the host's and, if optimizer state may be stored on drives, the drives. If no division
    fits, return the one that exceeds the limits by the fewest bytes, where bytes of GPU memory count twice. Only
    placements that a plan search may choose are used.

    Args:
        away: Fraction of the 16-bit parameters that must live in host memory. If None, any fraction.
    """
    program = _linear_program(workload, machine, limits, away)
    found = program.solved([1.0], [[1.0]] * len(program.rows), None)
    # No division fits. Find the one that lacks the fewest bytes, where those of GPU memory count twice.
    if found.x[-1] > 0:
        each_its_own = np.eye(len(program.rows)).tolist()
        found = program.solved([2.0] + [1.0] * (len(program.rows) - 1), each_its_own, 0.0)
    x, params = np.array(found.x)[: len(program.used) + 1], float(workload.params)
    taken = [int(params * float(np.dot(row, x))) for row in program.taken]
    shares = {
        (way.placement, way.parameters): float(share)
        for way, share in zip(program.used, x, strict=False)
        if share > 1e-9
    }
    device_bytes = _within(taken[0] + int(_base(workload) * params), limits.device_bytes)
    return Division(device_bytes, _within(taken[1], limits.host_bytes), taken[2], shares)


@dataclass(frozen=True)
class _LinearProgram:
    """A linear program. It finds which fraction of the parameters has which placement and location.

    The unknowns, each per element of the model, are the fraction of each way, then the fraction whose gradients are
    summed on the GPU, then the room that is missing.

    Attributes:
        used: The ways (placements and locations) that a plan may choose.
        taken: The bytes of GPU memory, of host memory and of storage that each unknown takes.
        rows, ends: The bytes that each unknown takes of each limited memory, and the memory's limit.
        sends: For each way, 1 if the update reads the gradient from host memory, else 0.
        most_sums: The largest fraction of gradients that the GPU may sum.
        equal, totals: The equations that the fractions fulfil, such as a sum of 1.
    """

    used: Sequence[Way]
    taken: Sequence[Sequence[float]]
    rows: Sequence[Sequence[float]]
    ends: Sequence[float]
    sends: Any
    most_sums: float
    equal: Any
    totals: Any

    def solved(self, costs: list[float], room: list[list[float]], least: float | None) -> Any:
        from scipy.optimize import linprog

        none = [0.0] * len(room[0])
        return linprog(
            [0.0] * (len(self.used) + 1) + costs,
            [[*row, *(-x for x in more)] for row, more in zip(self.rows, room, strict=True)]
            + [[*-self.sends, 1.0, *none]],
            [*self.ends, 0.0],
            [[*row, *none] for row in self.equal],
            self.totals,
            [(0, 1)] * len(self.used) + [(0, self.most_sums)] + [(least, None)] * len(none),
            method="highs",
        )


def _linear_program(workload: Workload, machine: Machine, limits: Limits, away: float | None) -> _LinearProgram:
    held, params = Holding.of_workload(workload), float(workload.params)
    stores = limits.storage_bytes is not None and workload.zero_stage == 3
    used = [way for way in plain_ways() if _allowed(workload, machine, way, stores)]
    columns = [plain_ways().index(way) for way in used]
    each = {memory: np.array(row, float)[columns] for memory, row in held.per_param.items()}
    live = 0.0 if workload.live_params is None else workload.live_params / params
    gone = np.array([workload.wire_bytes * (1 - live) * (way.parameters == "host") for way in used])
    sends = np.array([way.recipe.gradient != "device" for way in used], float)
    most_sums = float(held.sums and not machine.unified_memory)
    under_way = held.sending_bytes(params, 0) / params
    device = [*(each["device"] - gone + sends * under_way), most_sums * (held.gradient_bytes - under_way)]
    host, storage = [*each["host"], -most_sums * held.gradient_bytes], [*each["storage"], 0.0]
    rows = [device, host]
    ends = [limits.device_bytes / params - _base(workload), limits.host_bytes / params]
    if limits.unified:
        rows = [[d + h for d, h in zip(device, host, strict=True)]]
        ends = [limits.host_bytes / params - _base(workload)]
    if stores and limits.storage_bytes is not None:
        rows, ends = [*rows, storage], [*ends, limits.storage_bytes / params]
    return _LinearProgram(used, (device, host, storage), rows, ends, sends, most_sums, *_divided(used, away))


def _base(workload: Workload) -> float:
    return (workload.device_base_bytes + workload.activation_bytes) / workload.params


def check_bytes(workload: Workload, machine: Machine, limits: Limits) -> None:
    """Raise an error if a training job cannot fit into the allowed memory under any plan."""
    least = roomiest(workload, machine, limits)
    if limits.missing_bytes(least):
        raise ImpossibleError.explain(workload, limits, [least])


def _within(taken_bytes: int, limit_bytes: int) -> int:
    return limit_bytes if limit_bytes < taken_bytes <= limit_bytes + MIB else taken_bytes


def _divided(used: Sequence[Way], away: float | None) -> tuple[Any, Any]:
    rows, ends = [[1.0] * len(used) + [0.0]], [1.0]
    if away is not None:
        rows.append([float(way.parameters == "host") for way in used] + [0.0])
        ends.append(away)
    return rows, ends


def _allowed(workload: Workload, machine: Machine, way: Way, stores: bool) -> bool:
    recipe = way.recipe
    if recipe.state == "storage" and not stores:
        return False
    if machine.unified_memory and recipe.queue != Queue.HOST:
        return False
    return way.parameters == "device" or (workload.zero_stage == 3 and not machine.unified_memory)
