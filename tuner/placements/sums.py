"""The number of gradient sums that stay on the device: the fewest that serve, within the room."""

from dataclasses import replace

from ebbtide.tuner.placements.search import Candidate, Search
from ebbtide.tuner.quantities import told_seconds


def about_sums(search: Search, chosen: Candidate) -> list[str]:
    """A sentence with figures; nothing where none stays."""
    if not chosen.device_sums:
        return []
    crossing_s = search.seconds_anyhow(replace(chosen, device_sums=0))
    saved_s = crossing_s - search.score(chosen).iteration_s
    return [
        f"{chosen.device_sums} of {len(chosen.placements)} subgroups' sums of micro-batches stay "
        f"on the device until the last one, which saves {told_seconds(saved_s)}"
    ]
