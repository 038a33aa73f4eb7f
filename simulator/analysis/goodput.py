"""Goodput: the fraction of time that is useful training, given failures and the cost of checkpoints.

The job trains and takes a checkpoint in every interval. The checkpoint reaches storage a while later. A
failure throws the job back to the last checkpoint on storage. Failures are exponential (rate = nodes /
MTBF of one node) and may also happen during restarts.
"""

import math
from dataclasses import dataclass, replace

from ebbtide.simulator.rules import RuleError

CHECKFREQ_OVERHEAD = 0.035  # CheckFreq (Mohan et al., FAST 2021): at most 3.5% overhead


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of a whole training job, and the time to restart after each.

    Attributes:
        mtbf_s: Mean time between failures of the whole job. `math.inf`: it never fails.
        restart_s: Seconds from a failure until training runs again from its checkpoint.

    Raises:
        ValueError: a time is out of its range.
    """

    mtbf_s: float
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("mtbf_s", self.mtbf_s)
        check_not_negative("restart_s", self.restart_s)


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """The cost of one checkpoint.

    Attributes:
        stall_s: Seconds that the training loop waits: in the save, for copies, and for bytes that must be
            written before an update.
        interference_s: Seconds that writing adds to iterations by its memory traffic and cores.
        persist_s: Seconds from the start of the save until the last byte is durable.
        slowdown: Relative slowdown of iterations during writing, without waits. 0.02 is 2%.
        copied_bytes: Bytes copied because their update came first.
        waited_bytes: Bytes written while an update waits.
        reserved_bytes: Host memory of the copy budget and the writers' buffers.

    Raises:
        ValueError: a time is negative or not a number.
    """

    stall_s: float
    interference_s: float = 0.0
    persist_s: float = 0.0
    slowdown: float = 0.0
    copied_bytes: float = 0.0
    waited_bytes: float = 0.0
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("stall_s", "interference_s", "persist_s"):
            check_not_negative(name, getattr(self, name))

    @property
    def cost_s(self) -> float:
        return self.stall_s + self.interference_s

    def at_interval(self, steps: int, iteration_s: float, busy: str) -> "tuple[int, CheckpointCost]":
        """Return the steps between two committed checkpoints and the cost of each, for a save every ``steps``.

        If a checkpoint is still being written when the next one is due, ``busy`` decides: the next one waits or
        is skipped, or it replaces the first. With "replace" none is ever committed, and the first value is 0.
        """
        spare_s = steps * iteration_s + self.cost_s - self.persist_s
        if spare_s >= -1e-9 * self.persist_s:
            return steps, self
        if busy == "wait":
            return steps, replace(self, stall_s=self.stall_s - spare_s)
        if busy == "replace":
            return 0, self
        needed_s = max(0.0, self.persist_s - self.cost_s)
        return steps * math.ceil(needed_s / (steps * iteration_s) * (1 - 1e-9)), self

    def fewest_steps(self, iteration_s: float) -> int:
        """Return the number of iterations until a checkpoint is durable, so that the next one may begin."""
        return max(1, math.ceil((self.persist_s - self.cost_s) / iteration_s * (1 - 1e-12)))


def expected_goodput(iteration_s: float, cost: CheckpointCost, failures: Failures, interval_steps: int) -> float:
    """Return the expected fraction of time, from 0 to 1, that is useful training.

    An exact renewal argument gives the formula. An interval lasts ``L = work + stall + interference``. From
    one commit to the next takes L, or ``L + persist`` after a failure (the work between taking and committing
    a checkpoint is lost too). A restart takes ``(exp(R/M) - 1) M``, as it may fail as well. So

        ``E = M exp(R/M) exp(persist/M) (exp(L/M) - 1)``  and  goodput = work / E.

    Args:
        iteration_s: Seconds of a training iteration without any checkpoint.
        interval_steps: Iterations between two checkpoints. 0: no checkpoint is taken.

    Raises:
        ValueError: an iteration takes no time, a failing job takes no checkpoint, or a checkpoint takes
            longer to commit than the interval lasts.
    """
    check_positive("iteration_s", iteration_s)
    mtbf_s = failures.mtbf_s
    if interval_steps < 0:
        raise RuleError(f"interval_steps must be >= 0, but got {interval_steps}", key="interval_steps")
    if interval_steps == 0:
        if math.isinf(mtbf_s):
            return 1.0
        raise RuleError(
            f"interval_steps must be >= 1 if the job can fail (mtbf_s={mtbf_s:g}), but got 0", key="interval_steps"
        )
    work_s = interval_steps * iteration_s
    interval_s = work_s + cost.cost_s
    check_commit(cost.persist_s, interval_s)
    if math.isinf(mtbf_s):
        return work_s / interval_s
    # E and work multiplied by exp(-(R + persist + L) / M): nothing overflows when M is tiny.
    kept = math.exp(-(failures.restart_s + cost.persist_s + interval_s) / mtbf_s)
    return work_s / mtbf_s * kept / -math.expm1(-interval_s / mtbf_s)


def best_interval_steps(iteration_s: float, cost: CheckpointCost, failures: Failures) -> int:
    """Return the number of iterations between two checkpoints with the highest expected goodput.

    Goodput has one maximum over the interval. So the result is one of the two whole numbers around
    `optimal_interval`, but not less than a commit needs. For a job that never fails it is 0 (only when the
    user saves).

    Raises:
        ValueError: as in `expected_goodput`.
    """
    check_positive("iteration_s", iteration_s)
    if math.isinf(failures.mtbf_s):
        return 0
    fewest = cost.fewest_steps(iteration_s)
    below = int(optimal_interval(cost.cost_s, failures.mtbf_s) / iteration_s)
    candidates = {max(fewest, below), max(fewest, below + 1)}
    return max(sorted(candidates), key=lambda k: expected_goodput(iteration_s, cost, failures, k))


def optimal_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the exact seconds of work between two checkpoints that maximize goodput.

    They are the root of ``x = 1 - exp(-x - cost/M)`` with ``x = work/M`` (Lambert's W in disguise; Daly, FGCS
    2006). Neither restarts nor the time to commit change them.

    Raises:
        ValueError: the cost is negative, or the mean time between failures is not > 0.
    """
    check_positive("mtbf_s", mtbf_s)
    check_not_negative("cost_s", cost_s)
    relative = cost_s / mtbf_s
    if relative == 0.0:
        return 0.0
    x = 1.0
    for _ in range(100):  # Newton from above on a convex, rising function: never overshoots
        step = (x + math.expm1(-(x + relative))) / -math.expm1(-(x + relative))
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return x * mtbf_s


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Young's checkpoint interval in seconds (CACM 1974): ``sqrt(2 d M)``."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's checkpoint interval in seconds (FGCS 2006), first order: ``sqrt(2 d M) - d``, at least 0."""
    return max(0.0, young_interval(cost_s, mtbf_s) - cost_s)


def checkfreq_interval_steps(iteration_s: float, cost: CheckpointCost) -> int:
    """Return CheckFreq's checkpoint interval in iterations.

    It is the shortest whose overhead stays within CheckFreq's limit and whose writes keep up.
    """
    steps = math.ceil(cost.cost_s / (CHECKFREQ_OVERHEAD * iteration_s) * (1 - 1e-12))
    return max(cost.fewest_steps(iteration_s), steps)


def check_positive(name: str, value: float) -> None:
    if not value > 0 or (math.isinf(value) and name in ("iteration_s", "nodes")):
        raise RuleError(f"{name} must be > 0, but got {value}", key=name)


def check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise RuleError(f"{name} must be finite and >= 0, but got {value}", key=name)


def check_commit(persist_s: float, interval_s: float) -> None:
    if persist_s > interval_s * (1 + 1e-9):
        raise RuleError(
            f"persist_s must be at most the interval of {interval_s:g} s (a checkpoint must be "
            f"committed before the next one is taken), but got {persist_s:g}: raise "
            "interval_steps",
            key="persist_s",
        )
