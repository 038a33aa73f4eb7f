"""The mean iteration time of plans with early updates, which start before the gradient norm is known.

Early updates assume that the step does not clip gradients. In a step that clips, early updates are dropped and redone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ebbtide.simulator.engines.compiled import SimResult
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.recipes import recipe_of
from ebbtide.simulator.update.steps import Bytes, Placement, unfused
from ebbtide.simulator.update.way import EARLY_PLACEMENTS
from ebbtide.simulator.workload import Workload


def expected(
    workload: Workload, machine: Machine, plan: Plan, simulate: Callable[[Plan], SimResult], *, fused: bool = True
) -> SimResult:
    """Return a plan's simulation, with an iteration time that is a mean over steps that clip gradients and other steps.

    The workload's `expected_clip_rate` is the fraction of steps that clip. In these steps, updates that started before
    the gradient norm was known (early updates) have to be redone. Training pauses early updates that lose time, so the
    mean is at most slightly longer than the iteration time without early updates (`StepTimes.mean_s`). If the plan has
    no early updates, the result is the unchanged simulation.

    Args:
        simulate: Function that simulates a plan in steps that do not clip.
        fused: False if it simulates DeepSpeed's separate CPU passes instead of ebbtide's fused kernel.
    """
    right = simulate(plan)
    times = step_times(workload, machine, plan, simulate, right, fused=fused)
    if times is None:
        return right
    return replace(right, iteration_s=times.mean_s(workload.expected_clip_rate))


def step_times(
    workload: Workload,
    machine: Machine,
    plan: Plan,
    simulate: Callable[[Plan], SimResult],
    right: SimResult | None = None,
    *,
    fused: bool = True,
) -> StepTimes | None:
    """Return the iteration time of a plan in three cases: early updates are kept, there are none, or they are redone.

    An early update starts before the gradient norm is known. It is kept if the step does not clip, and redone if the
    step clips. The result is None if the plan has no early updates.

    Args:
        right: Simulation of the first case. None: it is simulated here.
        fused: False if DeepSpeed's separate CPU passes are simulated instead of ebbtide's fused kernel.
    """
    if not any(plan.updated_early):
        return None
    right = right or simulate(plan)
    plain = simulate(plan.with_bits(early=False))
    sizes: dict[Placement, list[int]] = {placement: [] for placement in EARLY_PLACEMENTS}
    for size, way in zip(workload.subgroups, plan.ways, strict=True):
        if way.early:
            sizes[way.placement].append(size)
    late = late_s(workload, machine, sizes, plan.threads, plan.prefetch, fused=fused)
    return times_of((right.iteration_s, right.backward_s), (plain.iteration_s, plain.backward_s), late)


def times_of(right: tuple[float, float], plain: tuple[float, float], late_s: float) -> StepTimes:
    """Return the iteration time in three cases: early updates are kept, there are none, or they are dropped and
    redone.
    """
    return StepTimes(right[0], plain[0], plain[0] + max(0.0, right[1] - plain[1]) + late_s)


def early_updates_worth(
    workload: Workload, machine: Machine, held: Holding, sizes: Iterable[int], left_bytes: float, placement: Placement
) -> int:
    """Return how many subgroups to update early: as many as save time and fit into memory.

    It saves time only if it ends before the norm is known. So all early updates together must fit into the time of the
    last micro-batch's backward.

    Args:
        held: Bytes per parameter that the workload needs in each memory.
        sizes: Elements of the subgroups that can be updated early, the last subgroup first.
    """
    each = held.early_bytes
    left_s = workload.planned.backward_s / workload.gradient_accumulation_steps
    taken = list(accumulate(sizes))
    longest = early_update_s(workload, machine, 1, placement=placement)
    return sum(n * each <= left_bytes and n * longest <= left_s for n in taken)


def late_s(
    workload: Workload,
    machine: Machine,
    sizes: Mapping[Placement, Sequence[float]],
    threads: int = 0,
    prefetch: int = 0,
    *,
    fused: bool = True,
) -> float:
    """Return an upper limit of the delay, in seconds, that dropped early updates cause to the other updates of a step.

    The other updates start after the norm. They are delayed for two reasons:

    - An early update that is running when the norm becomes known is completed first. Early updates that have not
      started are skipped.
    - Early updates on the GPU need copies of their state first. So the state of up to ``prefetch`` other subgroups,
      which is copied to the GPU before the norm too, may arrive later.

    Args:
        sizes: For each placement, the numbers of elements of the subgroups with early updates.
        threads: Number of threads of an update on the CPU. 0: all cores.
        prefetch: The plan's limit on copies of state to the GPU before the norm, as a number of subgroups. Subgroups
            with early updates do not count.
        fused: False if updates on the CPU are DeepSpeed's separate passes instead of ebbtide's fused kernel.
    """
    late = {
        placement: early_update_s(workload, machine, max(some, default=0), threads, placement, fused=fused)
        for placement, some in sizes.items()
    }
    late["device"] *= 1 + prefetch
    return max(late.values())


def early_update_s(
    workload: Workload,
    machine: Machine,
    elements: float,
    threads: int = 0,
    placement: Placement = "host",
    *,
    fused: bool = True,
) -> float:
    """Return the seconds of the longest op of one subgroup's early update, if the op has the machine for itself."""
    recipe, amounts = recipe_of(placement, "device", updated_early=True), Bytes.of(workload)
    early = [step if fused else unfused(step) for step in recipe.steps[: recipe.before_norm]]
    return elements * max(s.work(amounts) / machine.op_rate(s.rate, threads) for s in early)
