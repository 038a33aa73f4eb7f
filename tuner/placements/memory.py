"""What is said where no plan fits into memory."""

from collections.abc import Sequence
from typing import Any

from ebbtide.simulator.limits import GIB, Limits, Peaks
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload


class ImpossibleError(RuleError):
    """Nothing fits; the message says how much is missing and which knob helps most.

    Attributes:
        fact: the first of the two; ``advice``: the second, of somebody who has not tried it
            (`ebbtide.tuner.answer.ways_out` does).
        ways: the nearest changes that fit, with their plans, where `ebbtide.plan` has looked for them.
    """

    ways: tuple[Any, ...] = ()

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(f"{fact}. {advice}")
        self.fact, self.advice = fact, advice

    @classmethod
    def explain(cls, workload: Workload, limits: Limits, scores: Sequence[Peaks]) -> "ImpossibleError":
        """From the peaks of everything that was tried."""
        if limits.unified:
            return cls._of_one_memory(limits, scores)
        device = min(s.device_peak_bytes for s in scores)
        if device > limits.device_bytes:
            missing = device - limits.device_bytes
            return cls(
                f"the plan must fit into {limits.device_bytes / GIB:.2f} GiB of device memory, but "
                f"parameters, buckets and activations alone take {device / GIB:.2f} GiB: "
                f"{missing / GIB:.2f} GiB are missing",
                "A smaller micro-batch or activation checkpointing helps most; more ranks divide "
                "the parameters (--gpu-memory)",
            )
        # Each memory alone may suffice where both together do not: the plan that lacks least tells.
        least = min(scores, key=limits.missing_bytes)
        missing, params = limits.missing_bytes(least), workload.params
        room = f"{limits.device_bytes / GIB:.2f} GiB of device memory"
        taken = f"{least.host_peak_bytes / GIB:.2f} and {least.device_peak_bytes / GIB:.2f}"
        if limits.storage_bytes is not None:
            room += f" and {limits.storage_bytes / GIB:.2f} GiB of storage (each state twice)"
            taken += f" and {least.storage_bytes / GIB:.2f}"
        return cls(
            f"the optimizer state must fit into {limits.host_bytes / GIB:.2f} GiB of host memory "
            f"per rank and {room}, but {params} "
            f"parameters at {workload.optimizer_state.state_bytes} bytes and their gradients take "
            f"at least {taken} GiB: {missing / GIB:.2f} GiB are missing",
            "More ranks, more device memory for resident subgroups or room for state on storage "
            "under ZeRO-3 help (--host-memory, --gpu-memory, --storage)",
        )

    @classmethod
    def _of_one_memory(cls, limits: Limits, scores: Sequence[Peaks]) -> "ImpossibleError":
        least = min(scores, key=limits.missing_bytes)
        needed = least.device_peak_bytes + least.host_peak_bytes
        if limits.storage_bytes is not None and least.storage_bytes > limits.storage_bytes:
            return cls(
                f"the stored state must fit into {limits.storage_bytes / GIB:.2f} GiB of storage, "
                f"but takes {least.storage_bytes / GIB:.2f} GiB",
                "More of it (--storage) or of memory (--host-memory) helps",
            )
        return cls(
            f"the plan must fit into {limits.host_bytes / GIB:.2f} GiB of memory, which device and "
            f"host share here, but takes at least {needed / GIB:.2f} GiB: "
            f"{limits.missing_bytes(least) / GIB:.2f} GiB are missing",
            "A smaller micro-batch or activation checkpointing helps, and under ZeRO-3 state on "
            "storage (--storage); more ranks divide the parameters (--host-memory)",
        )
