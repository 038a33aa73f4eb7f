"""Goodput: the expected fraction of time that is useful training, given failures and the cost of checkpoints.

The job saves a checkpoint after every interval. The checkpoint is complete on storage some time later. After
a failure training restarts from the last complete checkpoint. Failures happen at a constant rate (number of
nodes / mean time between failures of a node), and also during restarts.
"""

import math
from dataclasses import dataclass

from ebbtide.simulator.rules import RuleError

CHECKFREQ_OVERHEAD = 0.035  # CheckFreq (Mohan et al., FAST 2021): at most 3.5% overhead


@dataclass(frozen=True, slots=True)
class Failures:
    """The rate of failures of a training job on all its nodes, and the time that a restart takes.

    Attributes:
        mtbf_s: Mean time between two failures of the job, in seconds. `math.inf`: it never fails.
        restart_s: Seconds from a failure until training runs again from its checkpoint.

    Raises:
        ValueError: A time is negative, or the mean time between failures is zero.
    """

    mtbf_s: float
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("mtbf_s", self.mtbf_s)
        check_not_negative("restart_s", self.restart_s)


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """The cost of one checkpoint: the time that training loses, and the memory that the checkpoint needs.

    Attributes:
        stall_s: Seconds that training waits: in the save, for copies, and for bytes that must be written before
            an update may overwrite them.
        interference_s: Seconds that iterations take longer because writing uses memory bandwidth and CPU cores.
        persist_s: Seconds from the start of the save until all bytes are on storage.
        slowdown: Relative slowdown of iterations while the checkpoint is written, without waits. 0.02 means 2%.
        copied_bytes: Bytes that were copied in host memory because an update was about to overwrite them.
        waited_bytes: Bytes that were written while an update waited for them.
        reserved_bytes: Host memory reserved for these copies and for the writers' buffers.

    Raises:
        ValueError: A time is negative or not a number.
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

    def fewest_steps(self, iteration_s: float) -> int:
        """Return the least number of iterations between checkpoints such that one is written before the next is due."""
        return max(1, math.ceil((self.persist_s - self.cost_s) / iteration_s * (1 - 1e-12)))


def expected_goodput(iteration_s: float, cost: CheckpointCost, failures: Failures, interval_steps: int) -> float:
    """Return the expected fraction of time, from 0 to 1, that is useful training.

    The formula is exact for failures at a constant rate. Its symbols are times:

    - ``M``: mean time between failures.
    - ``R``: time of a restart. A restart may fail as well, so it takes ``(exp(R/M) - 1) M`` on average.
    - ``work``: time of the iterations between two checkpoints.
    - ``stall`` and ``interference``: for how long a checkpoint stops training, and by how much it slows training down.
    - ``persist``: time from the start of a save until the checkpoint is on storage.
    - ``L = work + stall + interference``: time from one save to the next.

    Without a failure, a checkpoint is completed every ``L``. A failure also loses the work that was done while the last
    completed checkpoint was being written. So the first checkpoint after a restart takes ``L + persist``: training up
    to the next save, and writing it. The expected time per interval and the goodput are

        ``E = M exp(R/M) exp(persist/M) (exp(L/M) - 1)``  and  goodput = work / E.

    Args:
        iteration_s: Seconds of a training iteration without any checkpoint.
        interval_steps: Iterations between two checkpoints. 0: no checkpoint is saved.

    Raises:
        ValueError: An iteration takes no time, a job that can fail saves no checkpoint, or writing a checkpoint takes
            longer than the interval.
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
    # Both E and the work are multiplied by exp(-(R + persist + L) / M), so that nothing overflows if M is tiny.
    kept = math.exp(-(failures.restart_s + cost.persist_s + interval_s) / mtbf_s)
    return work_s / mtbf_s * kept / -math.expm1(-interval_s / mtbf_s)


def best_interval_steps(iteration_s: float, cost: CheckpointCost, failures: Failures) -> int:
    """Return the number of iterations between two checkpoints that gives the highest expected goodput.

    Goodput has a single maximum over the interval. The result is therefore one of the two whole numbers next to
    `optimal_interval`, but never less than the iterations that writing a checkpoint takes. For a job that never
    fails the result is 0: no checkpoint is needed except those that the user saves.

    Raises:
        ValueError: An argument is refused by `expected_goodput`.
    """
    check_positive("iteration_s", iteration_s)
    if math.isinf(failures.mtbf_s):
        return 0
    fewest = cost.fewest_steps(iteration_s)
    below = int(optimal_interval(cost.cost_s, failures.mtbf_s) / iteration_s)
    candidates = {max(fewest, below), max(fewest, below + 1)}
    return max(sorted(candidates), key=lambda k: expected_goodput(iteration_s, cost, failures, k))


def optimal_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two checkpoints that give the highest expected goodput.

    Goodput is useful training per time. The result is ``x M``, where M is the mean time between failures, and x solves
    ``x = 1 - exp(-x - cost/M)`` (Daly, FGCS 2006). ``cost`` is the training time that a checkpoint costs. The time of
    a restart, and the time for which a checkpoint is written in the background, do not change the result.

    Raises:
        ValueError: The cost is negative, or the mean time between failures is not > 0.
    """
    check_positive("mtbf_s", mtbf_s)
    check_not_negative("cost_s", cost_s)
    relative = cost_s / mtbf_s
    if relative == 0.0:
        return 0.0
    x = 1.0
    for _ in range(100):  # Newton's method on a convex, rising function, started above the root: it never overshoots
        step = (x + math.expm1(-(x + relative))) / -math.expm1(-(x + relative))
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return x * mtbf_s


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Young's checkpoint interval in seconds, ``sqrt(2 d M)`` (CACM 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's first-order checkpoint interval in seconds, ``sqrt(2 d M) - d``, at least 0 (FGCS 2006)."""
    return max(0.0, young_interval(cost_s, mtbf_s) - cost_s)


def checkfreq_interval_steps(iteration_s: float, cost: CheckpointCost) -> int:
    """Return the number of iterations between two checkpoints according to CheckFreq (FAST 2021)."""
    steps = math.ceil(cost.cost_s / (CHECKFREQ_OVERHEAD * iteration_s) * (1 - 1e-12))
    return max(cost.fewest_steps(iteration_s), steps)


def check_positive(name: str, value: float) -> None:
    if not value > 0 or (math.isinf(value) and name == "iteration_s"):
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
