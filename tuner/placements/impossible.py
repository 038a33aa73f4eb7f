"""The error for a training job that no plan fits into memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.simulator.limits import GIB, Limits, Peaks, size
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload


class ImpossibleError(RuleError):
    """An error for a training job that no plan fits into memory. The message names each memory that is too small.

    Attributes:
        fact: Sentence about the missing memory. The memory that lacks most comes first.
        advice: General advice. `ebbtide.tuner.advice.ways_out` tries changes and gives better advice.
        missing: Missing bytes by memory, for the plan that comes nearest to fitting.
        nearest: Memory peaks of that plan.
        ways: Smallest changes of the job with which a plan fits, if `ebbtide.plan` has looked for them.
    """

    ways: tuple[Any, ...] = ()
    nearest: Peaks | None = None

    def __init__(self, fact: str, advice: str, missing: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{fact}. {advice}")
        self.fact, self.advice, self.missing = fact, advice, dict(missing or {})

    @classmethod
    def explain(cls, workload: Workload, limits: Limits, scores: Sequence[Peaks]) -> "ImpossibleError":
        """Build the error for a training job that no plan fits into memory, from the memory peaks of all
        plans that were tried.
        """
        nearest = min(scores, key=limits.missing_bytes)
        taken = {
            "GPU memory": nearest.device_peak_bytes,
            "host memory": nearest.host_peak_bytes + (nearest.device_peak_bytes if limits.unified else 0),
            "storage": nearest.storage_bytes,
        }
        lacking = limits.missing(nearest.device_peak_bytes, nearest.host_peak_bytes, nearest.storage_bytes)
        binding = sorted(lacking, key=lambda name: -lacking[name])
        short = [_short(name, lacking[name], taken[name], workload.ranks_per_node) for name in binding]
        if limits.unified:
            short.append("GPU and host share one memory")
        short += _logits(workload, lacking.get("GPU memory", 0))
        state = size(workload.params * workload.optimizer_state.state_bytes)
        why = f"The optimizer state of this rank's {workload.params / 1e9:.3g} billion parameters alone takes {state}"
        made = cls("; ".join(short), f"{why}. {_ADVICE[binding[0]]}", lacking)
        made.nearest = nearest
        return made


def _logits(workload: Workload, lacking: int) -> list[str]:
    job = workload.job
    if job is None or job.fused_loss or not lacking:
        return []
    if job.logits_bytes < lacking:
        return []
    return [f"the logits and their fp32 copies take {size(job.logits_bytes)}, which a fused or chunked loss saves"]


def _short(name: str, lacking: int, taken: int, ranks: int) -> str:
    whose = ""
    if name != "GPU memory" and ranks > 1:
        lacking, taken, whose = lacking * ranks, taken * ranks, f" by the {ranks} ranks of a machine together"
    short = f"{lacking / GIB:.2f} GiB" if lacking > 0.01 * GIB else size(lacking)  # 0.00 would hide it
    usable = f"{(taken - lacking) / GIB:.2f} GiB are usable"
    return f"{name} is {short} short ({taken / GIB:.2f} GiB are needed{whose}, {usable})"


_ADVICE = {
    "GPU memory": "Use less with a smaller micro-batch, a shorter sequence, activation checkpointing or ZeRO-3 "
    "(--micro-batch, --sequence, --zero-stage 3), use more ranks (--data-parallel), or allow more GPU memory "
    "(--gpu-memory)",
    "host memory": "Keep state on a drive (--storage, ZeRO-3 only), use more ranks (--data-parallel), "
    "or allow more memory (--host-memory, --gpu-memory)",
    "storage": "Allow more space on the drive or more host memory (--storage, --host-memory)",
}
