"""A parser for DeepSpeed's log: seconds of each phase, of whole iterations, and samples per second.

With ``wall_clock_breakdown``, DeepSpeed prints the phases of each iteration. With ``steps_per_print`` and log
level info, its throughput timer also prints lines with the time of day and the step number. The time between
two such lines is the time of whole iterations, including the training loop.

The samples per second in these lines do not give the time of an iteration. DeepSpeed's timer
(``utils/timer.py``, ThroughputTimer) starts at each forward (``runtime/engine.py``), or at each fetch of a
batch if DeepSpeed was given ``training_data`` (``runtime/dataloader.py``). It ends with ``step()``. A log
does not show which of the two was timed, and the loop's time after a step is never included. So samples per
second are used only to find the number of samples per iteration. This holds for DeepSpeed 0.18.6 to 0.19.8.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

WARM_UP = 2  # iterations that compile, allocate and trace
# Iteration times lie on two levels if a gap of at least this factor separates them, and each level has at least the
# given number and share of the iterations.
LEVEL_FACTOR = 1.25
LEAST_OF_A_LEVEL, LEAST_SHARE_OF_A_LEVEL = 2, 0.2
# DeepSpeed's timers at an accumulation boundary, which cover all micro-batches of the step. A number that is cut off,
# or mixed with another process's output, does not match.
_TIMER = re.compile(r" \| (\w+): (\d+(?:\.\d+)?)(?![\w.])")
_GLOBAL = re.compile(rf"time \(ms\)((?:{_TIMER.pattern})+)")
# DeepSpeed before 0.9 did not abbreviate the names of phases.
_NAMES = ({"fwd": "forward", "bwd": "backward", "step": "step"}, {n: n for n in ("forward", "backward", "step")})
# The message of torchrun when it sets the variable, and other ways to print an environment variable.
_THREADS = re.compile(r"OMP_NUM_THREADS(?: environment variable for each process to be |\W{1,5})(\d+)\b")
_STEP = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\][^\n]*)?"
    r"global_step=(\d+), RunningAvgSamplesPerSec=\S+ CurrSamplesPerSec=([\d.]+(?:e[+-]?\d+)?)"
)


@dataclass(frozen=True)
class DeepSpeedLog:
    """Measured times from a DeepSpeed log, without the first iterations (warm-up).

    Attributes:
        phases_s: Seconds of each iteration by phase.
        wholes_s: Seconds per whole iteration, from the times of day in the log.
        samples_per_s: Samples per second as DeepSpeed prints them.
        iterations: Number of logged iterations, including warm-up.
        omp_threads: OMP_NUM_THREADS of each rank. None if the log does not show it.
    """

    phases_s: Mapping[str, Sequence[float]]
    wholes_s: Sequence[float]
    samples_per_s: Sequence[float]
    iterations: int
    omp_threads: int | None = None

    @property
    def sums_s(self) -> list[float]:
        """Return a list with the seconds of each iteration in a DeepSpeed log: the sum over the iteration's phases."""
        return [sum(seconds) for seconds in zip(*self.phases_s.values(), strict=True)]


def read_log(text: str) -> DeepSpeedLog:
    """Parse the text of a DeepSpeed log into measured times. For a log without timing lines, the result has
    empty lists.
    """
    phases: dict[str, list[float]] = {phase: [] for phase in _NAMES[0].values()}
    for line in _GLOBAL.finditer(text):
        timers = {key: float(ms) for key, ms in _TIMER.findall(line[1])}
        # Timers of single micro-batches have other names.
        for key, phase in next((names for names in _NAMES if names.keys() <= timers.keys()), {}).items():
            phases[phase].append(timers[key] / 1e3)
    count = len(phases["step"])
    threads = _THREADS.search(text)
    steps = [match.groups() for match in _STEP.finditer(text)]
    return DeepSpeedLog(
        {phase: seconds[WARM_UP:] for phase, seconds in phases.items()},
        _wholes_s([(datetime.fromisoformat(at), int(n)) for at, n, _ in steps if at]),
        [float(rate) for _, _, rate in steps if float(rate) > 0],
        count,
        int(threads[1]) if threads else None,
    )


def _wholes_s(steps: Sequence[tuple[datetime, int]]) -> list[float]:
    # A smaller step number than before means that another run begins. DeepSpeed prints no such line before its third
    # step, so warm-up is not included.
    return [
        (later - at).total_seconds() / (number - before)
        for (at, before), (later, number) in pairwise(steps)
        if number > before and later > at
    ]


def levels_s(seconds: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Split measured iteration times in seconds into a list of short and a list of long ones, at the widest
    gap. Return None if no gap is wide enough.
    """
    ordered = sorted(seconds)
    least = max(LEAST_OF_A_LEVEL, LEAST_SHARE_OF_A_LEVEL * len(ordered))
    gaps = [
        (ordered[i] / max(ordered[i - 1], 1e-9), i)
        for i in range(1, len(ordered))
        if least <= i <= len(ordered) - least
    ]
    if not gaps or max(gaps)[0] < LEVEL_FACTOR:
        return None
    at = max(gaps)[1]
    return ordered[:at], ordered[at:]


def level_notes(name: str, log: DeepSpeedLog) -> list[str]:
    """Return a list with one warning if the iterations in a DeepSpeed log have two clearly different lengths,
    otherwise an empty list.
    """
    levels = levels_s(log.sums_s)
    if levels is None:
        return []
    short, long = levels
    return [
        f"{name}: {len(short)} of its iterations take about {statistics.median(short):.3g} s "
        f"(forward, backward and step), {len(long)} about {statistics.median(long):.3g} s, and the "
        "medians of all were taken. Does it hold two runs? Give --runs a log of one."
    ]
