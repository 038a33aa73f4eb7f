"""The tiers of memory: how much of each there is, and the lanes on which bytes get there and back.

Everybody who moves or counts bytes reads this table; a further tier is a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ebbtide.simulator.machine import Machine, RateName
from ebbtide.simulator.schedule import Lane

Memory = Literal["device", "host", "storage"]


@dataclass(frozen=True, slots=True)
class Way:
    """A direction between host memory and another tier, and the rate that is its full speed."""

    lane: Lane
    rate: RateName


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of memory. Host memory is in the middle: what goes anywhere goes through it.

    Attributes:
        capacity: the field of `Machine` that says how many bytes there are; "": none does.
        shared: the ranks of a node have it together.
        into, out_of: from host memory and back; None: it is host memory.
    """

    capacity: str = ""
    shared: bool = False
    into: Way | None = None
    out_of: Way | None = None

    def capacity_bytes(self, machine: Machine, ranks: int = 1) -> int | None:
        """Return the capacity of one of so many ranks on the node. None: the machine does not say."""
        if not self.capacity:
            return None
        return int(getattr(machine, self.capacity)) // (ranks if self.shared else 1)


TIERS: Mapping[Memory, Tier] = {
    "device": Tier(
        "device_memory_bytes", into=Way(Lane.H2D, "h2d_bytes_per_s"), out_of=Way(Lane.D2H, "d2h_bytes_per_s")
    ),
    "host": Tier("host_memory_bytes", shared=True),
    "storage": Tier(
        shared=True,
        into=Way(Lane.STORAGE, "storage_write_bytes_per_s"),
        out_of=Way(Lane.STORAGE_READ, "storage_read_bytes_per_s"),
    ),
}
