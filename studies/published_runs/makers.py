"""The difference in speed between nodes that have the same GPUs but come from several makers.

A machine preset does not tell such nodes apart, so this difference widens the intervals around ebbtide's predictions
(`ebbtide.tuner.calibrate.interval.CAMPAIGN_SPREAD`). The difference is computed from benchmarks that are not among the
runs on which these intervals are tested.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from statistics import mean

NODES = Path(__file__).parents[1] / "data" / "mlperf_a100_nodes.csv"


def between_makers(path: Path = NODES) -> tuple[float, int]:
    """Return how much the time of a benchmark differs between nodes of several makers with the same GPUs and batch
    size.

    Returns:
        The standard deviation of the logarithm of the time among the nodes of one benchmark, pooled over all
        benchmarks, and its degrees of freedom.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["gpus"], row["benchmark"], row["global_batch"])
            groups[key].append(math.log(float(row["s_per_epoch"])))
    squares = sum((x - mean(logs)) ** 2 for logs in groups.values() for x in logs)
    freedom = sum(len(logs) - 1 for logs in groups.values())
    return math.sqrt(squares / freedom), freedom
