"""The memory tiers (GPU, host, storage): their capacities, and the lanes that copy bytes between them.

A lane is a queue of ops, such as a copy direction. All code that moves or counts bytes uses this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.schedule import Lane, Memory


@dataclass(frozen=True, slots=True)
class Link:
    """A direction of copies between host memory and another memory tier: the lane of these copies, and their rate."""

    lane: Lane
    rate: RateName


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory tier: GPU memory, host memory or storage. All copies between tiers go through host memory.

    Attributes:
        capacity: Name of the field of `Machine` with the tier's size in bytes. Empty if there is none.
        shared: True if all ranks of a node share the tier.
        into, out_of: Directions of copies from host memory to this tier, and back. None for host memory.
    """

    capacity: str = ""
    shared: bool = False
    into: Link | None = None
    out_of: Link | None = None

    def capacity_bytes(self, machine: Machine, ranks: int = 1) -> int | None:
        """Return the bytes of a memory tier (GPU, host or storage) that each of ``ranks`` ranks of a node has."""
        if not self.capacity:
            return None
        return int(getattr(machine, self.capacity)) // (ranks if self.shared else 1)


TIERS: Mapping[Memory, Tier] = {
    "device": Tier(
        "device_memory_bytes", into=Link(Lane.H2D, "h2d_bytes_per_s"), out_of=Link(Lane.D2H, "d2h_bytes_per_s")
    ),
    "host": Tier("host_memory_bytes", shared=True),
    "storage": Tier(
        shared=True,
        into=Link(Lane.STORAGE, "storage_write_bytes_per_s"),
        out_of=Link(Lane.STORAGE_READ, "storage_read_bytes_per_s"),
    ),
}
