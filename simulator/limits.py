"""The limits of one rank's memory in bytes, and the check whether the memory peaks of training stay within them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, worded
from ebbtide.simulator.schedule import Memory
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.workload import Workload

UNKNOWN_MARGIN = 0.05  # share of memory that is left free if no profile says how much the peaks vary
LEAST_MARGIN = 0.02  # share of memory that an allocator cannot use
SOLD_AS = 0.05  # a limit that exceeds the memory by at most this share means all of the memory: "24 GB" are 23.6 GiB
PADDING = 0.01  # share of storage for padding extents to whole sectors, and for manifests
SIGMAS = 3.0  # standard deviations of the peaks of the profiled steps
GIB, MIB = 2**30, 2**20
MEMORIES: Mapping[Memory, str] = {"device": "GPU memory", "host": "host memory", "storage": "storage"}
_NAMES: Mapping[Memory, str] = {
    "device": "device_memory_bytes (--gpu-memory)",
    "host": "host_memory_bytes (--host-memory)",
}


def size(size_bytes: float) -> str:
    """Return a number of bytes as text for people, in GiB, MiB or bytes."""
    if size_bytes >= 0.1 * GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= 0.1 * MIB else f"{size_bytes:.0f} bytes"


class Peaks(Protocol):
    """The interface of results that report peaks of GPU and host memory, such as simulations or scored plans."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def host_peak_bytes(self) -> int: ...
    @property
    def storage_bytes(self) -> int: ...


def missing(limits: Mapping[Memory, int], device_bytes: int, host_bytes: int, storage_bytes: int = 0) -> dict[str, int]:
    """Return by how many bytes given peaks exceed the limit of each memory. Only this function decides what fits.

    If ``limits`` lacks "device", GPU memory is host memory, which must hold both peaks together.
    """
    if not limits:
        return {}
    beside = 0 if "device" in limits else device_bytes
    taken: dict[Memory, int] = {"device": device_bytes, "host": host_bytes + beside, "storage": storage_bytes}
    return {MEMORIES[memory]: taken[memory] - most for memory, most in limits.items() if taken[memory] > most}


@dataclass(frozen=True)
class Limits:
    """The memory limits of one rank in bytes. The safety margin is already subtracted.

    Attributes:
        explained: Sentences about the size of each margin and its reason.
        unified: True if GPU memory is host memory, so that both peaks together must fit into the host's limit.
        storage_bytes: Limit for optimizer state on drives. None if the user gave none: plans with state on
            drives are then not searched, and what DeepSpeed stores on drives is not limited.
    """

    device_bytes: int
    host_bytes: int
    explained: tuple[str, ...] = ()
    unified: bool = False
    storage_bytes: int | None = None

    @classmethod
    def of(
        cls,
        workload: Workload,
        machine: Machine,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        margin: float | None = None,
        storage_bytes: int | None = None,
    ) -> "Limits":
        """Return the memory limits of one rank, with a safety margin already subtracted.

        The limit of GPU or host memory is the given size minus the margin. If no size is given, it is the size of the
        machine's memory minus the margin.

        Args:
            margin: Fraction of each memory that stays free. None: derived from how much the memory peaks of the
                profiled steps vary (`Workload.memory_peaks`).
            storage_bytes: Limit for optimizer state on storage, for all ranks of a node together.

        Raises:
            ValueError: A limit is not positive or exceeds the machine's memory, or the margin is not in [0, 1).
        """
        if storage_bytes is not None and storage_bytes <= 0:
            raise RuleError(f"storage_bytes (--storage) must be > 0, but got {storage_bytes}", key="storage_bytes")
        ranks = workload.ranks_per_node
        asked = _asked(machine, {"device": device_memory_bytes, "host": host_memory_bytes}, ranks)
        if margin is not None and not 0 <= margin < 1:
            raise RuleError(
                f"memory_margin (--memory-margin) must lie in [0%, 100%), but got {margin:.0%}", key="memory_margin"
            )
        available = {name: size or TIERS[name].capacity_bytes(machine, ranks) or 0 for name, size in asked.items()}
        left = {name: _margin_bytes(workload, name, size, margin) for name, size in available.items()}
        explained = [
            f"{left_free / GIB:.2f} GiB of {available[name] / GIB:.1f} GiB of {MEMORIES[name]} are kept free: {why}"
            for name, (left_free, why) in left.items()
            if name == "host" or not machine.unified_memory
        ]
        reserved = machine.device_reserved_bytes
        if reserved:
            explained.append(f"{reserved / GIB:.2f} GiB of GPU memory are reserved for the CUDA context and NCCL")
        return cls(
            max(0, int(available["device"] - left["device"][0]) - reserved),
            max(0, int(available["host"] - left["host"][0])),
            tuple(map(worded, explained)),
            machine.unified_memory,
            None if storage_bytes is None else int(storage_bytes * (1 - PADDING)) // ranks,
        )

    @classmethod
    def from_memories(cls, limits: Mapping[Memory, int]) -> "Limits":
        """Return the memory limits of one rank from a dict by memory, as `by_memory` returns it."""
        unified = "device" not in limits
        return cls(limits.get("device", 0), limits["host"], unified=unified, storage_bytes=limits.get("storage"))

    @property
    def total_bytes(self) -> int:
        """Return the bytes that a rank may use in GPU memory, host memory and storage together."""
        # If GPU memory is host memory, that memory counts once.
        memory = self.host_bytes + (0 if self.unified else self.device_bytes)
        return memory + (self.storage_bytes or 0)

    @property
    def in_memory(self) -> "Limits":
        """Return a copy of the memory limits without storage, for plans that keep no optimizer state on drives."""
        return replace(self, storage_bytes=None)

    @property
    def by_memory(self) -> dict[Memory, int]:
        """Return a rank's limits in bytes, as a dict by memory: device, host and storage. A memory without a limit is
        left out.

        If GPU memory is host memory, only the host has a limit.
        """
        asked: dict[Memory, int | None] = {
            "device": None if self.unified else self.device_bytes,
            "host": self.host_bytes,
            "storage": self.storage_bytes,
        }
        return {memory: size for memory, size in asked.items() if size is not None}

    def missing(self, device_bytes: int, host_bytes: int, storage_bytes: int = 0) -> dict[str, int]:
        """Return the bytes that memory peaks need beyond a rank's limits, by memory. Empty if the peaks fit."""
        return missing(self.by_memory, device_bytes, host_bytes, storage_bytes)

    def hold(self, device_bytes: int, host_bytes: int, storage_bytes: int = 0) -> bool:
        """Return True if given memory peaks, in bytes, stay within a rank's limit of every memory."""
        return not self.missing(device_bytes, host_bytes, storage_bytes)

    def missing_bytes(self, peaks: Peaks) -> int:
        """Return the bytes that given memory peaks need beyond a rank's limits, as one sum over all memories."""
        return sum(self._lacking(peaks).values())

    def _lacking(self, peaks: Peaks) -> dict[str, int]:
        return self.missing(peaks.device_peak_bytes, peaks.host_peak_bytes, peaks.storage_bytes)

    def spare_host_bytes(self, peaks: Peaks) -> int:
        """Return the bytes of host memory that stay free at the peak, which checkpoints may use for copies of state."""
        beside = peaks.device_peak_bytes if self.unified else 0
        return max(0, self.host_bytes - peaks.host_peak_bytes - beside)

    def shortfall(self, peaks: Peaks) -> str:
        """Return a text such as "needs 2.0 GiB more host memory", or an empty one if the peaks fit."""
        return lacks(self._lacking(peaks))


def lacks(missing_bytes: Mapping[str, int]) -> str:
    """Return a text on missing memory, such as "needs 2.0 GiB more host memory". Empty if no memory is missing."""
    needs = " and ".join(f"{size(n)} more {name}" for name, n in missing_bytes.items())
    return f"needs {needs}" if needs else ""


def _asked(machine: Machine, values: Mapping[Memory, int | None], ranks: int) -> dict[Memory, int | None]:
    asked = dict(values)
    for memory, name in _NAMES.items():
        value, there = asked[memory], TIERS[memory].capacity_bytes(machine) or 0
        if value is None:
            continue
        if value <= 0:
            raise RuleError(f"{name} must be > 0, but got {value}", key=name.partition(" ")[0])
        if value > there * (1 + SOLD_AS):
            raise RuleError(
                f"{name} must be at most what the machine has, {there / GIB:.1f} GiB, but got "
                f"{value / GIB:.1f} GiB: leave it out, or take another machine (--machine)",
                key=name.partition(" ")[0],
            )
        asked[memory] = None if value > there else value // (ranks if TIERS[memory].shared else 1)
    return asked


def within(machine: Machine, gpu_memory_bytes: float | None, host_memory_bytes: float | None) -> "Within":
    """Return the machine and the limits with which to answer a question that has its own memory sizes.

    A preset stands for machines with any memory, so more memory than its own makes it another machine. A measured
    machine has the memory that it has. Sentences tell the user about sizes that are not taken as given.
    """
    limits: dict[str, Any] = {}
    more: dict[str, float] = {}
    notes: list[str] = []
    asked: dict[Memory, float | None] = {"device": gpu_memory_bytes, "host": host_memory_bytes}
    for memory, given in asked.items():
        field, name = TIERS[memory].capacity, MEMORIES[memory]
        own = getattr(machine, field)
        if given is None:
            continue
        if not (isinstance(given, int | float) and math.isfinite(given)):
            limits[field] = given  # which its reader refuses
            continue
        if own < given <= own * (1 + SOLD_AS):
            notes.append(f"{size(given)} of {name} are taken as the {size(own)} that programs can use on this machine")
        elif given > own and machine.is_preset:
            more[field] = int(given)
            notes.append(f"the preset {machine.name} has {size(own)} of {name}. The answer is for {size(given)}")
        else:
            limits[field] = int(given)
    return Within(machine.with_rates(**more) if more else machine, limits, tuple(notes))


class Within(NamedTuple):
    """The result of `within`: a machine, arguments of `Limits.of`, and sentences for the user."""

    machine: Machine
    limits: dict[str, Any]
    notes: tuple[str, ...]


def _margin_bytes(workload: Workload, name: str, size_bytes: int, margin: float | None) -> tuple[float, str]:
    if margin is not None:
        return margin * size_bytes, f"{margin:.1%} as requested"
    peak = workload.memory_peaks.get(name)
    if peak is None or peak.n < 2:
        return UNKNOWN_MARGIN * size_bytes, f"{UNKNOWN_MARGIN:.0%}, because no profile shows how much peaks vary"
    sigma = peak.sigma
    return (
        LEAST_MARGIN * size_bytes + SIGMAS * sigma,
        f"{LEAST_MARGIN:.0%} and three standard deviations ({sigma / GIB:.3f} GiB each) of {peak.n} profiled peaks",
    )
