"""The mean iteration of plans with early updates that are wrong in steps that clip."""

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
    """Return a plan's simulation with the mean iteration at the workload's clip rate."""
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
    """Return the times of a plan's right, plain and wrong steps. None if it updates nothing early.

    Args:
        right: the plan's simulation, if it is known.
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
    """Return the times of right, plain and wrong steps. A wrong step's early updates run beside its
    backward, and then all updates follow.

    Args:
        right, plain: iteration and backward of a step whose early updates are right, and without any.
        late_s: as the function of that name gives it.
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
    """How many of these subgroups, which can be guessed, so much host memory holds twice and the
    last backward has time for: behind the norm a guess takes longer than what it saves.

    Args:
        held: the workload's.
        sizes: elements, of the last subgroup first.
    """
    each = held.early_bytes
    left_s = workload.backward_s / workload.gradient_accumulation_steps
    taken = list(accumulate(sizes))
    longest = early_update_s(workload, machine, 1, placement=placement)
    return sum(n * each <= left_bytes and n * longest <= left_s for n in taken)


def late_s(
    workload: Workload, machine: Machine, sizes: Mapping[Placement, Sequence[int]], threads: int = 0, prefetch: int = 0
) -> float:
    """How much later updates begin behind wrong guesses than where nobody guessed, at the most:
    behind what is under way at the barrier, since what has not begun is dropped; without the visits
    that would have come in meanwhile.

    Args:
        sizes: of each placement, the elements of the subgroups that are guessed.
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
    """Return the longest step of a guess of so many elements that its gradient comes before, alone, with
    all cores or so many threads.
    """
    recipe, amounts = recipe_of(placement, "device", updated_early=True), Bytes.of(workload)
    early = recipe.steps[: recipe.before_norm]
    return elements * max(s.work(amounts) / machine.op_rate(s.rate, threads) for s in early)
