"""Tools for measurements: repeats within a time budget, and checks of their stability."""

import time
from collections.abc import Callable
from typing import Any

import torch
from ebbtide.simulator.quantity import UNSTABLE_IQR, Quantity, Source

Part = tuple[dict[str, Any], list[str]]  # fields of a Machine, and sentences that name unstable measurements
LEAST_REPEATS = 5
MOST_REPEATS = 40
# Multiple of the time budget (or seconds, if that is more) after which a slow measurement ends with fewer repeats.
PATIENCE = 3.0
UNSTABLE_DRIFT = 0.20  # relative difference between the first and the last third

_BLOCK = 2**20  # elements. Larger tensors repeat a block of this size


def noise(elements: int, device: str = "cpu") -> torch.Tensor:
    """Return a tensor of ``elements`` random fp32 numbers in [0, 1), with all its memory pages allocated."""
    # One block of random numbers is repeated, since drawing all of them would take longer than the measurement. The
    # numbers come from a separate generator, so that a measurement in a training process does not change the random
    # numbers of the training.
    own = torch.Generator(device).manual_seed(0)
    block = torch.rand(min(elements, _BLOCK), device=device, generator=own)
    return block.repeat(-(-elements // _BLOCK))[:elements]


def timed_s(work: Callable[[], object]) -> float:
    """Return the wall time of one call of a function in seconds."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def repeat_s(
    work: Callable[[], object], budget_s: float, clock: Callable[[Callable[[], object]], float] = timed_s
) -> list[float]:
    """Call a function repeatedly, and return the durations in seconds.

    The first call warms up and is not included. Then the function is called until the time budget is used. It is called
    at least 5 times, unless that would take several times the budget. `doubts` reports if there are fewer than 5 calls.

    Args:
        clock: Function that calls ``work`` and returns its duration.
    """
    work()
    begun = time.perf_counter()
    durations: list[float] = []
    while True:
        durations.append(clock(work))
        spent_s = time.perf_counter() - begun
        if len(durations) >= LEAST_REPEATS:
            if len(durations) >= MOST_REPEATS or spent_s >= budget_s:
                return durations
        elif spent_s > max(PATIENCE, PATIENCE * budget_s):
            return durations


def rate(amount: float, durations_s: list[float], source: Source, detail: str) -> Quantity:
    """Return the speed of an activity (such as a copy) as the median and the quartiles over repeated measurements."""
    return Quantity.from_samples([amount / d for d in durations_s], source, detail)


def doubts(name: str, durations_s: list[float], least: int = LEAST_REPEATS) -> list[str]:
    """Check the repeats of a measurement, and return a sentence for each problem.

    There are three problems: too few repeats, too large a spread between repeats, and a drift from the first repeats to
    the last. The list is empty if there is none.

    Args:
        least: Number of repeats below which there are too few.
    """
    result = unstable(name, Quantity.from_samples(durations_s), least)
    third = max(1, len(durations_s) // 3)
    first = sorted(durations_s[:third])[third // 2]
    last = sorted(durations_s[-third:])[third // 2]
    drift = last / first - 1
    if abs(drift) > UNSTABLE_DRIFT:
        result.append(
            f"{name} drifted by {drift:+.0%} while it was measured: clocks were throttled, or other processes ran"
        )
    return result


def unstable(name: str, quantity: Quantity, least: int = LEAST_REPEATS) -> list[str]:
    """Return a list with one warning if a measured speed has too few repeats, or if its repeats differ too much.
    Otherwise return an empty list.
    """
    if quantity.n < least:
        return [
            f"{name} was measured only {quantity.n} times (at least {least} are needed to call it "
            "stable): one measurement takes too long for the given time (--seconds)"
        ]
    if quantity.stable:
        return []
    return [
        f"{name} is not stable: its interquartile range is {quantity.relative_iqr:.0%} of the "
        f"median (at most {UNSTABLE_IQR:.0%} would be stable). Something else uses the machine"
    ]
