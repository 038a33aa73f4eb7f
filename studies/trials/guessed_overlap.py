"""Measurement on an emulated device of what early updates gain, and what they cost in steps that clip.

An early update starts before the gradient norm is known.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import ebbtide.tuner
from ebbtide.profiler.rates.adam import host_adam_out_of_place
from ebbtide.simulator import Plan
from ebbtide.simulator.analysis.bounds import lower_bound

from studies.bench.bits import differences
from studies.trials.emulated_training import Bench, stock_state
from studies.trials.paced_model import PacedTraining

UPDATE_RATIOS = (0.5, 1.0, 2.0)  # time of all updates on the host, divided by that of forward and backward
CLIP_RATES = (0.05, 0.5, 1.0)
LINK = 10  # bytes per forward and backward, divided by the parameters: fast enough for gradients to arrive in time
LAYERS = 32
ELEMENTS, BUDGET_S = 40_000_000, 10.0  # elements and time of a measured update, which is far larger than the caches
LONG = 1.0  # from this ratio on, updates take as long as forward and backward


@dataclass(frozen=True)
class Guessed:
    """Measured times with and without early updates.

    All updates run on the host.

    Attributes:
        ratio: Time of all updates over the time of forward and backward.
        floor_s: Lower bound of an iteration with early updates, in seconds.
        barrier_s: Seconds of an iteration under the best plan without early updates.
        guessed_s: Seconds of an iteration under the best plan with early updates.
        predicted_s: Predicted value of ``guessed_s``.
        slowdown_pct: A dict from the fraction of steps that clip gradients, such as ``5%``, to the percentage by which
            the mean iteration with early updates is longer than the mean iteration without them.
    """

    ratio: float
    floor_s: float
    barrier_s: float
    guessed_s: float
    predicted_s: float
    speculate: int
    slowdown_pct: dict[str, float]
    bit_identical: bool

    @property
    def over_floor(self) -> float:
        return self.guessed_s / self.floor_s

    @property
    def gain(self) -> float:
        return self.barrier_s / self.guessed_s


def many_layers() -> PacedTraining:
    """Return settings of training on an emulated device, with as many layers as a model of 8 B parameters has."""
    # On the emulated device, the passes of the layers, copies and updates take durations that the settings determine.
    # The layers are small, so that their real arithmetic takes only a small part of these durations. One setting is
    # measured on this machine: the speed of an early update, divided by the speed of another update. It is slower than
    # other updates, because it does not write in place.
    layers = PacedTraining(layers=LAYERS, hidden=512, forward_s=0.8 / LAYERS, backward_s=1.6 / LAYERS)
    apart = host_adam_out_of_place(ELEMENTS, os.cpu_count() or 1, BUDGET_S).median
    return replace(layers.scaled(0.7), host_adam_out_of_place=min(1.0, apart))


def setting_of(base: PacedTraining, ratio: float) -> PacedTraining:
    """Return settings of emulated training in which all updates together take ``ratio`` times as long as forward and
    backward.

    The device has no memory for optimizer state, so that all updates run on the host. The link is fast enough that
    gradients arrive in time. All other settings are those of ``base``.
    """
    passes_s = sum(base.given_s)
    link = LINK * base.params / passes_s
    return replace(
        base,
        memory_share=0.0,
        host_adam_params_per_s=base.params / (ratio * passes_s),
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
    )


def measure_early_updates(
    base: PacedTraining,
    steps: int,
    clipped_steps: int,
    ratios: Sequence[float] = UPDATE_RATIOS,
    *,
    profiled: bool = True,
) -> dict[str, Any]:
    """Measure what early updates gain and cost on an emulated device.

    Args:
        steps: Number of timed steps under each plan, if no step clips.
        clipped_steps: Number of timed steps for each tested fraction of clipping steps.
        ratios: Times of all updates, divided by the time of forward and backward. Each ratio is measured on an engine
            of its own.
        profiled: True to make plans for measured times of forward and backward. False to make them for the given times.
    """
    rows = [_measured(setting_of(base, ratio), ratio, steps, clipped_steps, profiled) for ratio in ratios]
    slowdowns = [pct for row in rows for pct in row.slowdown_pct.values()]
    return {
        "guessed_iteration_over_floor": max(row.over_floor for row in rows),
        "gain_over_barrier": min(row.gain for row in rows if row.ratio >= LONG),
        "worst_slowdown_pct": max(slowdowns),
        "guessed_host_adam_out_of_place": base.host_adam_out_of_place,
        "guessed_bit_identical": all(row.bit_identical for row in rows),
        "guessed_rows": [
            {**asdict(row), "iteration_over_floor": row.over_floor, "gain_over_barrier": row.gain} for row in rows
        ],
    }


def clipping(rate: float) -> Callable[[int], bool]:
    """Return a function that takes the number of a training step and returns True if the step clips."""
    return lambda number: Random(f"0 {number}").random() < rate


def _measured(setting: PacedTraining, ratio: float, steps: int, clipped_steps: int, profiled: bool) -> Guessed:
    bench, clipped = Bench(setting, clips=lambda _: False), list[bool]()

    def mean_s(plan: Plan, rate: float, count: int) -> float:
        first, clips = bench.steps, clipping(rate)
        bench.clips = lambda number: clips(number - first)
        found = bench.measure(plan, count)
        clipped.extend(map(clips, range(bench.steps - first)))
        return found.mean_s if rate else found.iteration_s

    given, machine = setting.given_workload(), setting.machine()
    work = bench.workload(steps) if profiled else given
    clipped += [False] * bench.steps
    plain, guessed = (  # where each step clips, no plan has early updates
        ebbtide.tuner.plan(work.model_copy(update={"clip_rate": rate}), machine, memory_margin=0) for rate in (1.0, 0.0)
    )
    barrier_s, guessed_s = (mean_s(plan, 0.0, steps) for plan in (plain, guessed))
    slower = {}
    for rate in CLIP_RATES:
        without_s, with_s = (mean_s(plan, rate, clipped_steps) for plan in (plain, guessed))
        slower[f"{rate:.0%}"] = 100 * (with_s / without_s - 1)
    same = differences(bench.close(), stock_state(setting, len(clipped), clipped.__getitem__)) == ()
    assert guessed.prediction is not None
    floor_s = lower_bound(given.model_copy(update={"clip_rate": 0.0}), machine).iteration_s
    return Guessed(
        ratio, floor_s, barrier_s, guessed_s, guessed.prediction.iteration_s, sum(guessed.updated_early), slower, same
    )
