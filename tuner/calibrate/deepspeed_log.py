"""What DeepSpeed's log tells of an iteration: its phases, its whole, and samples per second.

With ``wall_clock_breakdown`` each iteration prints its phases. With ``steps_per_print`` as well,
and at log level info, the throughput timer's line gives the time of day and a step's number: what
lies between two of them is the whole of the iterations between, whatever the training loop did.

The samples per second of the same line are no whole. The timer (``utils/timer.py``,
ThroughputTimer) runs from the beginning of each forward (``runtime/engine.py``), or from each fetch
of a batch where DeepSpeed was given ``training_data`` (``runtime/dataloader.py``), to the end of
``step()``; micro-batches are added up. Which of the two ran, a log does not tell, and what the loop
does after a step is in neither. They show how many samples an iteration had, and no more. So it is
from DeepSpeed 0.18.6 to 0.19.8.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

WARM_UP = 2  # iterations that compile, allocate and trace
# Two levels: nothing lies between them, by this factor, and neither is a stray iteration or two.
LEVEL_FACTOR = 1.25
LEAST_OF_A_LEVEL, LEAST_SHARE_OF_A_LEVEL = 2, 0.2
# DeepSpeed's timers at every accumulation boundary: all micro-batches together.
# A number that another process wrote into, or that was cut, is none.
_TIMER = re.compile(r" \| (\w+): (\d+(?:\.\d+)?)(?![\w.])")
_GLOBAL = re.compile(rf"time \(ms\)((?:{_TIMER.pattern})+)")
# Versions before 0.9 wrote the names of the phases whole.
_NAMES = ({"fwd": "forward", "bwd": "backward", "step": "step"}, {n: n for n in ("forward", "backward", "step")})
# What torchrun prints where it sets the variable, and how environments are written elsewhere.
_THREADS = re.compile(r"OMP_NUM_THREADS(?: environment variable for each process to be |\W{1,5})(\d+)\b")
_STEP = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\][^\n]*)?"
    r"global_step=(\d+), RunningAvgSamplesPerSec=\S+ CurrSamplesPerSec=([\d.]+(?:e[+-]?\d+)?)"
)


@dataclass(frozen=True)
class DeepSpeedLog:
    """One log's measurements; iterations that warm up are left out.

    Attributes:
        phases_s: seconds of each iteration, by phase.
        wholes_s: from one line with the time of day to the next, per iteration.
        samples_per_s: as DeepSpeed prints them.
        iterations: that were logged, with those that warm up.
        omp_threads: of each rank; None: nothing in the log tells.
    """

    phases_s: Mapping[str, Sequence[float]]
    wholes_s: Sequence[float]
    samples_per_s: Sequence[float]
    iterations: int
    omp_threads: int | None = None

    @property
    def sums_s(self) -> list[float]:
        """Of each iteration, its phases together."""
        return [sum(seconds) for seconds in zip(*self.phases_s.values(), strict=True)]


def read_log(text: str) -> DeepSpeedLog:
    """Read what there is; a log without such lines gives empty lists."""
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
    """Per iteration, between neighbours; a smaller number is the beginning of another run.

    DeepSpeed's timer starts after the second step, so none of them is warming up.
    """
    return [
        (later - at).total_seconds() / (number - before)
        for (at, before), (later, number) in pairwise(steps)
        if number > before and later > at
    ]


def levels_s(seconds: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Return the shorter and the longer iterations, where a wide gap lies between; None: one level."""
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
    """Tell of a log whose iterations are of two kinds."""
    levels = levels_s(log.sums_s)
    if levels is None:
        return []
    short, long = levels
    return [
        f"{name}: {len(short)} of its iterations take about {statistics.median(short):.3g} s "
        f"(forward, backward and step), {len(long)} about {statistics.median(long):.3g} s, and the "
        "medians of all were taken. Does it hold two runs? Give --runs a log of one."
    ]
