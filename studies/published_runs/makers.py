"""The differences between nodes with the same GPUs from several makers, measured on other
benchmarks.

A preset leaves these differences out. The data contain none of the runs that judge the intervals
(`ebbtide.tuner.calibrate.interval.CAMPAIGN_SPREAD`).
"""

import csv
import math
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from statistics import mean

NODES = Path(__file__).parents[1] / "data" / "mlperf_a100_nodes.csv"


def between_makers(path: Path = NODES) -> tuple[float, int]:
    """Return the spread of a benchmark's time between nodes with the same GPUs and the same batch.

    Returns:
        Standard deviation of the logarithm of the time, with all benchmarks pooled, and its degrees
        of freedom.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["gpus"], row["benchmark"], row["global_batch"])
            groups[key].append(math.log(float(row["s_per_epoch"])))
    squares = sum((x - mean(logs)) ** 2 for logs in groups.values() for x in logs)
    freedom = sum(len(logs) - 1 for logs in groups.values())
    return math.sqrt(squares / freedom), freedom
