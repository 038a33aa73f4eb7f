"""Changes with which the same samples train faster: another ZeRO stage, micro-batch, recomputation, loss ..."""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import Changes, needs, price, same_samples
from ebbtide.simulator.limits import size
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.advice.flags import config_of, label_of, options_of
from ebbtide.tuner.advice.tried import Changing, JobOutcome, Tried
from ebbtide.tuner.quantities import seconds_text

LINES = (0, 1, 2)  # the best change of the DeepSpeed config alone, then with the trainer's arguments, then with kernels
WORTH = 0.03  # share of the time that a line must save to be told beside the line before
NEEDLESS = 0.01  # share of the time up to which a part of a change counts as saving nothing
MOST_SEARCHES = 2  # plan searches for one line
FAR = 0.04  # share of a bound. A plan that is further above its bound leaves room for another change with a low bound


@dataclass(frozen=True)
class Faster:
    """A change that leaves the samples of a step as they are, with which they train faster.

    Attributes:
        changes: New values of fields of the job.
        outcome: Predicted time and memory, and the plan of a short search. Without a plan, nothing is offloaded.
        factor: How many times as fast as the job as given.
    """

    changes: Changes
    job: Job
    workload: Workload
    outcome: JobOutcome
    factor: float

    @property
    def label(self) -> str:
        """Return the changes in words, such as "ZeRO-2, micro-batch 4, accumulation 4"."""
        return label_of(self.changes)

    def options(self, job: Job) -> str:
        """Return the ``tune`` options, or keys of the DeepSpeed config, that make the changes to a job."""
        return options_of(self.changes, job)

    def line(self, job: Job) -> str:
        """Return the line for the user: the options, the time, the factor and the memory."""
        memory = (
            f"{size(self.outcome.device_peak_bytes)} of GPU and {size(self.outcome.host_peak_bytes)} of host memory"
        )
        return f"{self.options(job)}: {seconds_text(self.outcome.iteration_s)} ({self.factor:.2f}x, {memory})"

    def deepspeed(self, config: Mapping[str, Any] | None, plan: str = "automatic") -> dict[str, Any]:
        """Return the DeepSpeed config that trains with these changes."""
        return config_of(self.job, config, plan if self.outcome.plan is not None else None)


def faster(
    job: Job,
    machine: Machine,
    seconds: float,
    *,
    freedom: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
    most: int = LINES[-1],
) -> list[Faster]:
    """Return up to three changes with which the same samples train faster, the dearest one last.

    Each is clearly faster than the one before. The first needs another DeepSpeed config only, the second may need other
    arguments of the trainer, and the third other kernels in the training script.

    Args:
        seconds: Time of a step of the job as given.
        freedom: Arguments of `Question` on what plans may do. None: their defaults.
        asked: Memory limits and storage, as arguments of `with_storage`.
        most: What a change may ask of the user at most (`Knob.needs`).
    """
    space = Changing(job, machine, asked or {}, freedom or {})
    found: list[Faster] = []
    least_s, every = seconds, [changes for changes in same_samples(job) if changes]
    for asks in LINES[: most + 1]:
        one = _best(space, [changes for changes in every if needs(changes) == asks], (1 - WORTH) * least_s)
        if one is not None:
            changed, outcome = one
            least_s = outcome.iteration_s
            found.append(Faster(changed.changes, changed.job, changed.workload, outcome, seconds / least_s))
    return found


def _best(space: Changing, every: list[Changes], below_s: float) -> tuple[Tried, JobOutcome] | None:
    best: tuple[Tried, JobOutcome] | None = None
    searches = 0
    for tried in by_bound(space, every, below_s):
        if tried.bound_s >= below_s or searches == MOST_SEARCHES:
            break
        leaner = _leaner(space, tried)
        outcome = leaner.brief
        searches += leaner.alone is None
        if outcome.fits and outcome.iteration_s < below_s:
            best, below_s = (leaner, outcome), outcome.iteration_s * (1 - NEEDLESS)
        if outcome.fits and outcome.iteration_s < (1 + FAR) * leaner.bound_s:
            break
    return best


def by_bound(space: Changing, every: list[Changes], below_s: float = float("inf")) -> Iterator[Tried]:
    """Yield the sets of changes whose bytes fit, the one with the lowest bound of the time first.

    A bound costs a linear program, so that a lower one, the time of computing alone, decides which are computed.

    Args:
        below_s: Sets whose computing takes longer are left out.
    """
    turns: list[tuple[float, int, int, Tried, bool]] = []
    for number, changes in enumerate(every):
        tried = space.tried(changes)
        if isinstance(tried, Tried) and tried.least_s < below_s:
            turns.append((tried.least_s, price(changes), number, tried, False))
    heapq.heapify(turns)
    while turns:
        _, dear, number, tried, bounded = heapq.heappop(turns)
        if bounded:
            yield tried
        elif tried.unfit is None:
            heapq.heappush(turns, (tried.bound_s, dear, number, tried, True))


def _leaner(space: Changing, tried: Tried) -> Tried:
    most_s = tried.bound_s * (1 + NEEDLESS)
    for name in sorted(tried.changes, key=lambda name: -price({name: tried.changes[name]})):
        together = {"micro_batch", "accumulation"} if name in ("micro_batch", "accumulation") else {name}
        fewer = {key: value for key, value in tried.changes.items() if key not in together}
        without = space.tried(fewer) if fewer else ""
        if isinstance(without, Tried) and without.least_s <= most_s and without.unfit is None:
            tried = without if without.bound_s <= most_s else tried
    return tried
