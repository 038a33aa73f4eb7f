"""What a plan may take of device and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.machine import Machine
from simulator.workload import Workload
from tuner.calibrate.interval import IQR_OVER_SIGMA

UNKNOWN_MARGIN = 0.05  # left free where no profile says how much the peaks vary
LEAST_MARGIN = 0.02  # of a memory: what an allocator cannot use
SIGMAS = 3.0  # of the profiled steps' peaks
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
            f"parameters at {workload.optimizer_state.state_bytes} bytes and their gradients take "
            f"at least {least.host_peak_bytes / GIB:.2f} and {least.device_peak_bytes / GIB:.2f} "
            f"GiB: {missing / GIB:.2f} GiB are missing. More ranks or more device memory for "
            "resident subgroups help (--host-memory, --gpu-memory)"
        )


@dataclass(frozen=True)
class Limits:
    """Bytes per rank, the margin already taken off.

    Attributes:
        explained: how large the margins are, and why.
    """

    device_bytes: int
    host_bytes: int
    explained: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        workload: Workload,
        machine: Machine,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        margin: float | None = None,
    ) -> Limits:
        """The machine's memory, or what is given.

        Args:
            margin: share of each memory that stays free; None: from the spread of the profiled
                steps' peaks (`Workload.memory_peaks`).

        Raises:
            ValueError: a limit is not positive, or a margin not a share.
        """
        for name, value in (("device_memory_bytes (--gpu-memory)", device_memory_bytes),
                            ("host_memory_bytes (--host-memory)", host_memory_bytes)):  # fmt: skip
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, but got {value}")
            there = getattr(machine, name.partition(" ")[0])
            if value is not None and value > there:
                raise ValueError(
                    f"{name} must be at most what the machine has, {there / GIB:.1f} GiB, but got "
                    f"{value / GIB:.1f} GiB: leave it out, or take another machine (--machine)"
                )
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(
                f"memory_margin (--memory-margin) must lie in [0%, 100%), but got {margin:.0%}"
            )
        available = {
            "device": device_memory_bytes or machine.device_memory_bytes,
            "host": host_memory_bytes or machine.host_memory_bytes // workload.ranks_per_node,
        }
        left = {
            name: _margin_bytes(workload, name, size, margin) for name, size in available.items()
        }
        explained = [
            f"{left_free / GIB:.2f} GiB of {available[name] / GIB:.1f} GiB of {name} memory stay "
            f"free: {why} (--memory-margin)"
            for name, (left_free, why) in left.items()
        ]
        reserved = machine.device_reserved_bytes
        if reserved:
            explained.append(
                f"{reserved / GIB:.2f} GiB of device memory are the CUDA context's and NCCL's"
            )
        return cls(
            max(0, int(available["device"] - left["device"][0]) - reserved),
            max(0, int(available["host"] - left["host"][0])),
            tuple(explained),
        )

    def missing_bytes(self, peaks: Peaks) -> int:
        """By how much peaks exceed the limits, both memories together."""
        return max(0, peaks.device_peak_bytes - self.device_bytes) + max(
            0, peaks.host_peak_bytes - self.host_bytes
        )

    def shortfall(self, device_bytes: int, host_bytes: int, unified: bool = False) -> str:
        """What is missing, for people; empty where both peaks fit. ``unified``: one memory."""
        missing = {"host": host_bytes - self.host_bytes}
        if not unified:
            missing = {"GPU": device_bytes - self.device_bytes, **missing}
        parts = [f"needs {n / GIB:.1f} GiB more {name} memory" for name, n in missing.items()
                 if n > 0]  # fmt: skip
        return " and ".join(parts)

    def hold(self, device_bytes: int, host_bytes: int) -> bool:
        """Whether peaks stay within the limits."""
        return device_bytes <= self.device_bytes and host_bytes <= self.host_bytes


def _margin_bytes(
    workload: Workload, name: str, size_bytes: int, margin: float | None
) -> tuple[float, str]:
    """What stays free of a memory, and why so much."""
    if margin is not None:
        return margin * size_bytes, f"{margin:.1%} as asked for"
    peak = workload.memory_peaks.get(name)
    if peak is None or peak.n < 2:
        return UNKNOWN_MARGIN * size_bytes, f"{UNKNOWN_MARGIN:.0%}, no profile tells its spread"
    sigma = (peak.q3 - peak.q1) / IQR_OVER_SIGMA
    return (
        LEAST_MARGIN * size_bytes + SIGMAS * sigma,
        f"{LEAST_MARGIN:.0%}, and three sigma ({sigma / GIB:.3f} GiB) of {peak.n} profiled steps' "
        "peaks",
    )
