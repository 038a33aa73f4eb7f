"""The mean iteration time of plans with early updates, which steps that clip have to redo."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ebbtide.simulator.engines.compiled import SimResult
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.footprint import Holding
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.recipes import Bytes, Placement, recipe_of
from ebbtide.simulator.update.way import EARLY_PLACEMENTS
from ebbtide.simulator.workload import Workload


def expected(workload: Workload, machine: Machine, plan: Plan, simulate: Callable[[Plan], SimResult]) -> SimResult:
    """Return a plan's simulation with the mean iteration time at the workload's clip rate."""
    right = simulate(plan)
    times = step_times(workload, machine, plan, simulate, right)
    if times is None:
        return right
    return replace(right, iteration_s=times.mean_s(workload.expected_clip_rate))


def step_times(
    workload: Workload,
    machine: Machine,
    plan: Plan,
    simulate: Callable[[Plan], SimResult],
    right: SimResult | None = None,
) -> StepTimes | None:
    """Return a plan's iteration times with right, without, and with wrong early updates. None if it has none.

    Args:
        right: The plan's simulation, if it is known.
    """
    if not any(plan.updated_early):
        return None
    right = right or simulate(plan)
    plain = simulate(plan.with_bits(early=False))
    sizes: dict[Placement, list[int]] = {placement: [] for placement in EARLY_PLACEMENTS}
    for size, way in zip(workload.subgroups, plan.ways, strict=True):
        if way.early:
            sizes[way.placement].append(size)
    late = late_s(workload, machine, sizes, plan.threads, plan.prefetch)
    return times_of((right.iteration_s, right.backward_s), (plain.iteration_s, plain.backward_s), late)


def times_of(right: tuple[float, float], plain: tuple[float, float], late_s: float) -> StepTimes:
    """Return an iteration's times with right, without, and with wrong early updates.

    Wrong early updates run during backward, and then all updates follow.

    Args:
        right, plain: Seconds of iteration and backward with right early updates, and without any.
        late_s: Delay of the updates after wrong early updates. See `late_s`.
    """
    return StepTimes(right[0], plain[0], plain[0] + max(0.0, right[1] - plain[1]) + late_s)


def early_updates_worth(
    workload: Workload,
    machine: Machine,
    held: Holding,
    sizes: Iterable[int],
    left_bytes: float,
    placement: Placement = "host",
) -> int:
    """Return how many subgroups have enough memory and time for a useful early update.

    Host memory must hold their state twice. The last backward must have time for the updates, because an
    early update that ends after the gradient norm takes longer than it saves.

    Args:
        held: Memory usage of the workload.
        sizes: Elements of the subgroups that can be updated early, the last subgroup first.
    """
    each = held.early_bytes
    left_s = workload.backward_s / workload.gradient_accumulation_steps
    taken = list(accumulate(sizes))
    longest = early_update_s(workload, machine, 1, placement=placement)
    return sum(n * each <= left_bytes and n * longest <= left_s for n in taken)


def late_s(
    workload: Workload, machine: Machine, sizes: Mapping[Placement, Sequence[int]], threads: int = 0, prefetch: int = 0
) -> float:
    """Return an upper limit of the delay, in seconds, that wrong early updates cause for later updates.

    Later updates wait for early updates that run when the gradient norm is known. Other early updates are
    dropped. Staged subgroups that would have been copied meanwhile come later.

    Args:
        sizes: By placement, the elements of the subgroups that are updated early.
    """
    late = {
        placement: early_update_s(workload, machine, max(some, default=0), threads, placement=placement)
        for placement, some in sizes.items()
    }
    late["device"] *= 1 + prefetch
    return max(late.values())


def early_update_s(
    workload: Workload, machine: Machine, elements: int, threads: int = 0, placement: Placement = "host"
) -> float:
    """Return the seconds of the longest op of an early update that runs alone.

    Args:
        threads: Number of threads of the host update. 0: all cores.
    """
    recipe, amounts = recipe_of(placement, "device", updated_early=True), Bytes.of(workload)
    early = recipe.steps[: recipe.before_norm]
    return elements * max(s.work(amounts) / machine.op_rate(s.rate, threads) for s in early)
