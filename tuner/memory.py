"""What a plan may take of device and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.machine import Machine
from simulator.workload import STATE_BYTES_PER_PARAM, Workload

MARGIN = 0.05  # left free for what grows between the profile and the run
GIB = 2**30


class Peaks(Protocol):
    """What is asked of a score."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def host_peak_bytes(self) -> int: ...


class ImpossibleError(ValueError):
    """Nothing fits; the message says how much is missing and which knob helps most."""

    @classmethod
    def explain(
        cls, workload: Workload, limits: Limits, scores: Sequence[Peaks]
    ) -> ImpossibleError:
        """From the peaks of everything that was tried."""
        device = min(s.device_peak_bytes for s in scores)
        if device > limits.device_bytes:
            missing = device - limits.device_bytes
            return cls(
                f"the plan must fit into {limits.device_bytes / GIB:.2f} GiB of device memory, but "
                f"parameters, buckets and activations alone take {device / GIB:.2f} GiB: "
                f"{missing / GIB:.2f} GiB are missing. A smaller micro-batch or activation "
                "checkpointing helps most; more ranks divide the parameters (--gpu-memory)"
            )
        # Each memory alone may suffice where both together do not: the plan that lacks least tells.
        least = min(scores, key=limits.missing_bytes)
        missing, params = limits.missing_bytes(least), workload.params
        return cls(
            f"the optimizer state must fit into {limits.host_bytes / GIB:.2f} GiB of host memory "
            f"per rank and {limits.device_bytes / GIB:.2f} GiB of device memory, but {params} "
            f"parameters at {STATE_BYTES_PER_PARAM} bytes and their gradients take at least "
            f"{least.host_peak_bytes / GIB:.2f} and {least.device_peak_bytes / GIB:.2f} GiB: "
            f"{missing / GIB:.2f} GiB are missing. More ranks or more device memory for resident "
            "subgroups help (--host-memory, --gpu-memory)"
        )


@dataclass(frozen=True)
class Limits:
    """Bytes per rank, the margin already taken off."""

    device_bytes: int
    host_bytes: int

    @classmethod
    def of(
        cls,
        workload: Workload,
        machine: Machine,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
    ) -> Limits:
        """The machine's memory, or what is given.

        Raises:
            ValueError: a limit is not positive.
        """
        for name, value in (("device_memory_bytes (--gpu-memory)", device_memory_bytes),
                            ("host_memory_bytes (--host-memory)", host_memory_bytes)):  # fmt: skip
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, but got {value}")
        device = device_memory_bytes or machine.device_memory_bytes
        host = host_memory_bytes or machine.host_memory_bytes // max(1, workload.ranks_per_node)
        return cls(int(device * (1 - MARGIN)), int(host * (1 - MARGIN)))

    def missing_bytes(self, peaks: Peaks) -> int:
        """By how much peaks exceed the limits, both memories together."""
        return max(0, peaks.device_peak_bytes - self.device_bytes) + max(
            0, peaks.host_peak_bytes - self.host_bytes
        )

    def hold(self, device_bytes: int, host_bytes: int) -> bool:
        """Whether peaks stay within the limits."""
        return device_bytes <= self.device_bytes and host_bytes <= self.host_bytes
