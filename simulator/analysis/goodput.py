"""Goodput: the share of time that is useful training, when nodes fail and checkpoints cost.

The job computes, every interval a checkpoint is taken, its payload reaches storage a while later,
and a failure throws the job back to the last checkpoint that had reached it. Failures are
exponential (rate = nodes / MTBF of one node) and hit restarts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CHECKFREQ_OVERHEAD = 0.035  # CheckFreq (Mohan et al., FAST 2021): at most 3.5% overhead


def expected_goodput(
    iteration_s: float,
    stall_s: float,
    interference_s: float,
    interval_steps: int,
    mtbf_s: float,
    restart_s: float,
    persist_s: float = 0.0,
) -> float:
    """Useful time over expected time, from 0 to 1.

    Exact renewal argument. An interval lasts ``L = work + stall + interference``. From one commit
    to the next takes L, or ``L + persist`` after a failure (the work between taking and committing
    a checkpoint is lost too), a restart takes ``(exp(R/M) - 1) M`` as it may fail as well, so

        ``E = M exp(R/M) exp(persist/M) (exp(L/M) - 1)``  and  goodput = work / E.

    Args:
        iteration_s: one training iteration while no checkpoint is in the way.
        stall_s: what the training loop waits for one checkpoint.
        interference_s: what one checkpoint adds to the iterations it is written beside.
        interval_steps: iterations between two checkpoints; 0: none is taken.
        mtbf_s: between failures of the whole job; `math.inf`: it never fails.
        restart_s: from a failure until the loop runs again from its checkpoint.
        persist_s: from taking a checkpoint until it is committed.

    Raises:
        ValueError: a time is negative or not a number, a failing job takes no checkpoint, or a
            checkpoint takes longer to commit than the interval lasts.
    """
    _check_times(iteration_s, stall_s, interference_s, mtbf_s, restart_s, persist_s)
    if interval_steps < 0:
        raise ValueError(f"interval_steps must be >= 0, but got {interval_steps}")
    if interval_steps == 0:
        if math.isinf(mtbf_s):
            return 1.0
        raise ValueError(
            f"interval_steps must be >= 1 where the job fails, but got 0 with mtbf_s={mtbf_s:g}"
        )
    work_s = interval_steps * iteration_s
    interval_s = work_s + stall_s + interference_s
    _check_commit(persist_s, interval_s)
    if math.isinf(mtbf_s):
        return work_s / interval_s
    # E and work multiplied by exp(-(R + persist + L) / M): nothing overflows when M is tiny.
    kept = math.exp(-(restart_s + persist_s + interval_s) / mtbf_s)
    return work_s / mtbf_s * kept / -math.expm1(-interval_s / mtbf_s)


def best_interval_steps(
    iteration_s: float,
    stall_s: float,
    interference_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    persist_s: float = 0.0,
) -> int:
    """Iterations between two checkpoints with the highest `expected_goodput`; 0: never.

    Goodput has one maximum over the interval, so it is one of the two whole numbers around
    `optimal_interval`, but not below what a commit needs. It is 0 (only when the user saves) for a
    job that never fails.

    Raises:
        ValueError: as `expected_goodput`.
    """
    _check_times(iteration_s, stall_s, interference_s, mtbf_s, restart_s, persist_s)
    if math.isinf(mtbf_s):
        return 0
    cost_s = stall_s + interference_s
    fewest = max(1, math.ceil((persist_s - cost_s) / iteration_s * (1 - 1e-12)))
    below = int(optimal_interval(cost_s, mtbf_s) / iteration_s)
    candidates = {max(fewest, below), max(fewest, below + 1)}

    def goodput(steps: int) -> float:
        return expected_goodput(
            iteration_s, stall_s, interference_s, steps, mtbf_s, restart_s, persist_s
        )

    return max(sorted(candidates), key=goodput)


def optimal_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that maximise goodput; exact.

    The root of ``x = 1 - exp(-x - cost/M)`` with ``x = work/M`` (Lambert's W in disguise; Daly,
    FGCS 2006). Neither restarts nor the time to commit move it.

    Raises:
        ValueError: a negative cost, or a mean time between failures that is not > 0.
    """
    _check_positive("mtbf_s", mtbf_s)
    _check_not_negative("cost_s", cost_s)
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
    """Young (CACM 1974): ``sqrt(2 d M)``."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Daly (FGCS 2006), first order: ``sqrt(2 d M) - d``; 0 where the cost exceeds it."""
    return max(0.0, young_interval(cost_s, mtbf_s) - cost_s)


def availability_interval(cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """The availability-optimal period, cost included: ``d + sqrt(2 (M + R) d + d^2)``."""
    return cost_s + math.sqrt(2 * (mtbf_s + restart_s) * cost_s + cost_s**2)


def checkfreq_interval_steps(
    iteration_s: float,
    stall_s: float,
    interference_s: float,
    persist_s: float = 0.0,
    overhead: float = CHECKFREQ_OVERHEAD,
) -> int:
    """As often as the overhead stays at or below ``overhead`` and writing keeps up."""
    cost_s = stall_s + interference_s
    return max(
        1,
        math.ceil(cost_s / (overhead * iteration_s) * (1 - 1e-12)),
        math.ceil((persist_s - cost_s) / iteration_s * (1 - 1e-12)),
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a job of many nodes fails and writes with.

    Attributes:
        node_mtbf_s: mean time between failures of one node.
        node_write_bytes_per_s: what one node can write to storage.
        storage_write_bytes_per_s: what the storage takes from all nodes together.

    Raises:
        ValueError: a count or rate that is not > 0.
    """

    nodes: int
    node_mtbf_s: float
    restart_s: float
    node_write_bytes_per_s: float
    storage_write_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("nodes", "node_mtbf_s", "node_write_bytes_per_s", "storage_write_bytes_per_s"):
            _check_positive(name, getattr(self, name))
        _check_not_negative("restart_s", self.restart_s)

    @property
    def mtbf_s(self) -> float:
        """Of the whole job: any node's failure stops it."""
        return self.node_mtbf_s / self.nodes

    def persist_s(self, checkpoint_bytes: float) -> float:
        """How long all nodes together take to write a checkpoint of the whole job."""
        nodes = self.nodes * self.node_write_bytes_per_s
        return checkpoint_bytes / min(nodes, self.storage_write_bytes_per_s)


def simulated_goodput(
    iteration_s: float,
    stall_s: float,
    interference_s: float,
    interval_steps: int,
    mtbf_s: float,
    restart_s: float,
    persist_s: float = 0.0,
    *,
    intervals: int = 100_000,
    seed: int = 0,
    gap_s: Callable[[], float] | None = None,
) -> float:
    """Monte Carlo on a time axis of failures: the check on `expected_goodput`.

    Follows one long job, failure by failure, without any of the formula's algebra.

    Args:
        intervals: checkpoints to commit before the job is done.
        gap_s: draws the time to the next failure; exponential with mean ``mtbf_s`` by default.

    Raises:
        ValueError: as `expected_goodput`, or no interval to simulate.
    """
    _check_times(iteration_s, stall_s, interference_s, mtbf_s, restart_s, persist_s)
    if intervals < 1 or interval_steps < 1:
        raise ValueError(
            f"intervals and interval_steps must be >= 1, but got {intervals} and {interval_steps}"
        )
    work_s = interval_steps * iteration_s
    interval_s = work_s + stall_s + interference_s
    _check_commit(persist_s, interval_s)
    if gap_s is None:
        random = np.random.default_rng(seed)
        gap_s = lambda: float(random.exponential(mtbf_s))  # noqa: E731
    now_s, committed, failure_s = 0.0, 0, gap_s()
    while True:
        finished_s = now_s + (intervals - committed) * interval_s + persist_s
        if failure_s >= finished_s:
            return intervals * work_s / finished_s
        survived = math.floor((failure_s - now_s - persist_s) / interval_s)
        committed += max(0, survived)
        now_s, failure_s = failure_s, failure_s + gap_s()
        while failure_s - now_s < restart_s:  # the restart fails too and begins anew
            now_s, failure_s = failure_s, failure_s + gap_s()
        now_s += restart_s


def _check_times(
    iteration_s: float,
    stall_s: float,
    interference_s: float,
    mtbf_s: float,
    restart_s: float,
    persist_s: float,
) -> None:
    _check_positive("iteration_s", iteration_s)
    _check_positive("mtbf_s", mtbf_s)
    named = {
        "stall_s": stall_s, "interference_s": interference_s, "restart_s": restart_s,
        "persist_s": persist_s,
    }  # fmt: skip
    for name, value in named.items():
        _check_not_negative(name, value)


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or (math.isinf(value) and name in ("iteration_s", "nodes")):
        raise ValueError(f"{name} must be > 0, but got {value}")


def _check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and >= 0, but got {value}")


def _check_commit(persist_s: float, interval_s: float) -> None:
    if persist_s > interval_s * (1 + 1e-9):
        raise ValueError(
            f"persist_s must be at most the interval of {interval_s:g} s (a checkpoint must be "
            f"committed before the next one is taken), but got {persist_s:g}: raise "
            "interval_steps"
        )
