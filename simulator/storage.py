"""The read and write bandwidth of folders that may hold optimizer state on drives: of a single folder, or of several
folders that are used together.
"""

from collections.abc import Mapping
from typing import Self

from ebbtide.simulator.page import Page
from ebbtide.simulator.quantity import Quantity

ANY_BYTES = 10**18  # if the size of a drive is unknown


class StorageRates(Page):
    """The rates of reading and writing in one folder, measured on its drive and not in the system's page cache.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: Rate of only writing, and of only reading, with as many blocks in
            flight as the store of optimizer state uses.
        duplex_factor: Rate of reads and writes at once, divided by the sum of these two rates.
    """

    write_bytes_per_s: Quantity
    read_bytes_per_s: Quantity
    duplex_factor: Quantity = Quantity.exact(1.0)

    @property
    def busy_s_per_byte(self) -> float:
        """Return the seconds per byte of a drive that reads and writes the same number of bytes at the same time."""
        # A byte that is both read and written counts once.
        alone = (1 / self.read_bytes_per_s.median, 1 / self.write_bytes_per_s.median)
        return max(*alone, sum(alone) / max(1.0, 2 * self.duplex_factor.median))

    @classmethod
    def together(cls, drives: "Mapping[str, StorageRates]") -> Self:
        """Return the rates of several drives together, as if they were one drive.

        Each drive holds a part of every subgroup's state, and all drives work at the same time. The function `shares`
        gives the sizes of the parts. A read or write ends when the last drive has finished its part.
        """
        part = shares(drives)
        each = [(drives[name], part[name]) for name in drives]
        read = min((d.read_bytes_per_s.scaled(1 / s, _SHARED) for d, s in each), key=_median)
        write = min((d.write_bytes_per_s.scaled(1 / s, _SHARED) for d, s in each), key=_median)
        if len(each) == 1:
            return cls(write_bytes_per_s=write, read_bytes_per_s=read, duplex_factor=each[0][0].duplex_factor)
        busy_s = max(s * d.busy_s_per_byte for d, s in each)
        both = (1 / read.median + 1 / write.median) / busy_s / 2
        return cls(
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            duplex_factor=Quantity.exact(min(1.0, both), read.source, _SHARED),
        )


_SHARED = "a share of each subgroup on each directory"


def shares(drives: Mapping[str, StorageRates]) -> dict[str, float]:
    """Return a dict from each drive to the fraction of every subgroup's state to keep there, so that all drives
    finish together.
    """
    speeds = {name: 1 / drive.busy_s_per_byte for name, drive in drives.items()}
    total = sum(speeds.values())
    return {name: speed / total for name, speed in speeds.items()}


def _median(quantity: Quantity) -> float:
    return quantity.median
