"""The difference in speed between nodes with the same GPUs from several makers.

A preset does not tell such nodes apart. The difference is computed from other benchmarks than the
runs on which ebbtide's intervals are judged
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
    """Return how much the time of a benchmark differs between nodes of several makers with the same GPUs
    and batch size.

    Returns:
        The standard deviation of the logarithm of the time, over all benchmarks together, and its
        degrees of freedom.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["gpus"], row["benchmark"], row["global_batch"])
            groups[key].append(math.log(float(row["s_per_epoch"])))
    squares = sum((x - mean(logs)) ** 2 for logs in groups.values() for x in logs)
    freedom = sum(len(logs) - 1 for logs in groups.values())
    return math.sqrt(squares / freedom), freedom
