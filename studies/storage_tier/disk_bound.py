"""Measured times of training with optimizer state on a disk, compared with lower bounds that follow from the disk's
rates.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.simulator.machine import StorageRates
from ebbtide.simulator.quantity import Quantity

STATE_BYTES = 12  # bytes per parameter that each step reads and writes


def disk_figures(beside: Sequence[StorageRates], ours: Mapping[str, Any], passes_s: float) -> dict[str, Any]:
    """Return measurements of training with all optimizer state on a disk, compared with the lower bound that the disk
    sets.

    ``update_over_floor`` is the measured time of a run's updates, divided by the lower bound of that time.
    ``iteration_over_floor`` is the measured time of an iteration, divided by the lower bound of an iteration. Both are
    medians over all runs. The lower bound for a run depends on the rates that the disk had right before and after the
    run.

    Args:
        beside: Rates of the disk for each run, measured right before and after the run.
        passes_s: Seconds of forward and backward.
    """
    disk, moved = pooled(beside), STATE_BYTES * ours["params"]
    parts = floor_parts_s(disk, moved) | {"updates_s": ours["updates_s"]}
    floor_s = max(parts.values())
    floors_s = [max(*floor_parts_s(one, moved).values(), ours["updates_s"]) for one in beside]
    runs = list(zip(floors_s, ours["updates_of_runs_s"], ours["iterations_s"], strict=True))
    return {
        "read_bytes_per_s": disk.read_bytes_per_s.median,
        "write_bytes_per_s": disk.write_bytes_per_s.median,
        "duplex_factor": disk.duplex_factor.median,
        "disk_floors_s": floors_s,
        "direct": "O_DIRECT" in (disk.read_bytes_per_s.detail or ""),
        "floor_s": floor_s,
        "floor_of": max(parts, key=lambda name: parts[name]),
        "update_over_floor": statistics.median(update / floor for floor, update, _ in runs),
        "update_over_median_floor": ours["update_s"] / floor_s,
        "update_over_mixed_floor": ours["update_s"] / mixed_floor_s(disk, moved),
        "passes_s": passes_s,
        "iteration_over_floor": statistics.median(iteration / max(passes_s, floor) for floor, _, iteration in runs),
        "written_predicted_over_measured": moved / ours["write_bytes"],
    }


def floor_parts_s(disk: StorageRates, moved: float) -> dict[str, float]:
    """Return how many seconds a disk takes to read ``moved`` bytes, to write as many bytes, and to do both at once."""
    alone = {"read_s": moved / disk.read_bytes_per_s.median, "write_s": moved / disk.write_bytes_per_s.median}
    shorter, longer = sorted(alone.values())
    return {**alone, "both_s": longer - shorter + shorter / disk.duplex_factor.median}


def mixed_floor_s(disk: StorageRates, moved: float) -> float:
    """Return the least seconds that a disk needs for the reads and writes of one step."""
    # The disk reaches this lower bound only if reads and writes run concurrently all the time.
    sum_of_rates = disk.read_bytes_per_s.median + disk.write_bytes_per_s.median
    return 2 * moved / (disk.duplex_factor.median * sum_of_rates)


def pooled(disks: Sequence[StorageRates]) -> StorageRates:

    def median(key: str) -> Quantity:
        some = [getattr(disk, key) for disk in disks]
        return Quantity.from_samples([q.median for q in some], "measured", some[0].detail)

    return StorageRates(**{key: median(key) for key in StorageRates.model_fields})
