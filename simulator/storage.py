"""The directories that state may be stored in: how fast each is, and several as one."""

from collections.abc import Mapping
from typing import Self

from ebbtide.simulator.page import Page
from ebbtide.simulator.quantity import Quantity

ANY_BYTES = 10**18  # where nobody says how much there is


class StorageRates(Page):
    """The rates of one directory, with the data on the medium, past the page cache.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: alone, with as many blocks in flight as the store has.
        duplex_factor: see `Machine.storage_duplex_factor`.
    """

    write_bytes_per_s: Quantity
    read_bytes_per_s: Quantity
    duplex_factor: Quantity = Quantity.exact(1.0)

    @property
    def busy_s_per_byte(self) -> float:
        """Return the seconds per byte that is read and written once, both concurrently: the basis of `shares`."""
        alone = (1 / self.read_bytes_per_s.median, 1 / self.write_bytes_per_s.median)
        return max(*alone, sum(alone) / max(1.0, 2 * self.duplex_factor.median))

    @classmethod
    def together(cls, drives: "Mapping[str, StorageRates]") -> Self:
        """Return the rates of subgroups divided by `shares`: each op ends with the last of its parts."""
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
    """Return the share of each subgroup in each directory, so that all end at the same time."""
    speeds = {name: 1 / drive.busy_s_per_byte for name, drive in drives.items()}
    total = sum(speeds.values())
    return {name: speed / total for name, speed in speeds.items()}


def _median(quantity: Quantity) -> float:
    return quantity.median
