"""What an iteration takes on the average, where some steps clip and make their guesses wrong."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from simulator.engines.compiled import SimResult
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.update.footprint import Holding
from simulator.update.guessing import shares
from simulator.update.recipes import RECIPES, Bytes, Queue, recipe_of
from simulator.workload import Workload


def expected(
    workload: Workload, machine: Machine, plan: Plan, simulate: Callable[[Plan], SimResult]
) -> SimResult:
    """A plan's simulation, all guesses right, with ``iteration_s`` the mean over steps of which
    `Workload.clip_rate` clip; None: none does.
    """
    right = simulate(plan)
    if not any(plan.guessed) or not workload.clip_rate:
        return right
    plain = simulate(plan.model_copy(update={"speculate": 0, "speculate_visits": 0}))
    largest = dict.fromkeys(Queue, 0)
    for size, placement, early in zip(
        workload.subgroups, plan.placements, plan.guessed, strict=True
    ):
        queue = RECIPES[placement].queue
        largest[queue] = max(largest[queue], size * early)
    seconds = mean_s(
        (right.iteration_s, right.backward_s), (plain.iteration_s, plain.backward_s),
        late_s(workload, machine, largest, plan.threads, plan.prefetch), workload.clip_rate,
    )  # fmt: skip
    return replace(right, iteration_s=seconds)


def mean_s(
    right: tuple[float, float], plain: tuple[float, float], late_s: float, clip_rate: float
) -> float:
    """The mean iteration.

    Args:
        right, plain: iteration and backward of a step whose guesses are right, and without any. A
            wrong one has backward's guesses beside it, and then all updates.
        late_s: as the function of that name gives it.
    """
    share = shares(clip_rate)
    wrong_s = plain[0] + max(0.0, right[1] - plain[1]) + late_s
    return share.right * right[0] + share.wrong * wrong_s + share.paused * plain[0]


def guesses_worth(
    workload: Workload, machine: Machine, sizes: Iterable[int], left_bytes: float,
    queue: Queue = Queue.HOST,
) -> int:  # fmt: skip
    """How many of these subgroups, which can be guessed, so much host memory holds twice and the
    last backward has time for: behind the norm a guess takes longer than what it saves.

    Args:
        sizes: elements, of the last subgroup first.
    """
    each = Holding.of_workload(workload).guess_bytes
    left_s = workload.backward_s / workload.gradient_accumulation_steps
    taken = list(accumulate(sizes))
    longest = (guess_s if queue is Queue.HOST else visit_s)(workload, machine, 1)
    return sum(n * each <= left_bytes and n * longest <= left_s for n in taken)


def late_s(
    workload: Workload, machine: Machine, largest: Mapping[Queue, int], threads: int = 0,
    prefetch: int = 0,
) -> float:  # fmt: skip
    """How much later updates begin behind wrong guesses than where nobody guessed, at the most:
    behind what is under way at the barrier, since what has not begun is dropped, and without the
    visits that would have come in meanwhile.

    Args:
        largest: of each queue, the elements of the largest subgroup that is guessed.
    """
    visits_s = (1 + prefetch) * visit_s(workload, machine, largest[Queue.DEVICE])
    return max(guess_s(workload, machine, largest[Queue.HOST], threads), visits_s)


def visit_s(workload: Workload, machine: Machine, elements: int) -> float:
    """The longest step of a guessed visit of so many elements, alone."""
    recipe, amounts = recipe_of("device", "device", guessed=True), Bytes.of(workload)
    steps = recipe.steps[: recipe.before_norm]
    return elements * max(step.work(amounts) / machine.rate(step.rate) for step in steps)


def guess_s(workload: Workload, machine: Machine, elements: int, threads: int = 0) -> float:
    """A guessed update of so many elements, alone, with all cores or so many threads."""
    step = recipe_of("host", "device", guessed=True).steps[0]
    return elements * step.work(Bytes.of(workload)) / machine.op_rate(step.rate, threads)
