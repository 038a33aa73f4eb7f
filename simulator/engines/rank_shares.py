"""The fraction of a single rank's speed that each of several concurrent ranks of a node gets."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ebbtide.simulator.machine import Machine, ShareName

_OF_THE_NODE = ("dram", "storage")  # capacities that all ranks of a node share. The other shares are of links


def rank_share(machine: Machine, capacity: ShareName, ranks: int) -> float:
    """Return the fraction of a single rank's speed that each of several concurrent ranks gets. For one rank: 1.

    The speed is the bandwidth of DRAM, of storage, or of copies between host and GPU. The fraction comes from
    measurements with several ranks:

    - Between two measured numbers of ranks, the total speed of all ranks is interpolated linearly.
    - Beyond the largest measured number, the total speed of DRAM or storage stays constant. For copies, each
      further rank adds as much to the total speed as a rank added between the two largest measured numbers.
    - If nothing was measured, DRAM and storage are divided equally, and every rank has a link to its GPU of its
      own.

    The fraction never grows with the number of ranks.
    """
    known = _known_shares(machine, capacity)
    if ranks <= 1 or ranks in known:
        return known[max(1, ranks)]
    counts = sorted(known)
    for fewer, more in pairwise(counts):
        if ranks < more:
            pace = (more * known[more] - fewer * known[fewer]) / (more - fewer)
            return (fewer * known[fewer] + pace * (ranks - fewer)) / ranks
    most = counts[-1]
    pace = 0.0 if capacity in _OF_THE_NODE else _last_pace(known, counts)
    return (most * known[most] + pace * (ranks - most)) / ranks


def _known_shares(machine: Machine, capacity: ShareName) -> dict[int, float]:
    # Measurement noise is removed. A fraction is lowered if it is larger than that of fewer ranks, or if all ranks
    # together would exceed the capacity of the node.
    known, least = {1: 1.0}, 1.0
    for ranks in sorted(machine.rank_shares):
        measured = machine.rank_shares[ranks].get(capacity)
        if measured is not None and ranks > 1:
            whole = 1 / ranks if capacity in _OF_THE_NODE else 1.0
            least = min(least, measured.median, whole)
            known[ranks] = least
    return known


def _last_pace(known: Mapping[int, float], counts: Sequence[int]) -> float:
    if len(counts) < 2:
        return 1.0
    fewer, more = counts[-2:]
    return max(0.0, (more * known[more] - fewer * known[fewer]) / (more - fewer))
