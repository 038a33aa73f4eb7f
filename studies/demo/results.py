"""Reading and comparing the result files of the demo's training runs."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from ebbtide.simulator import Plan, Prediction
from ebbtide.tuner.answer.verdict import role_of

from studies.bench.bits import differences
from studies.bench.phase_clock import PHASES, medians


@dataclass(frozen=True)
class DemoRun:
    """The results of one training run of ebbtide's demo, without the trained tensors.

    Attributes:
        first_step: Step at which the run began: 0, or a later one if the run was resumed.
        losses: Losses from step ``first_step`` on. They are exact, because JSON keeps every bit of a float.
        phases: Seconds of each training phase (forward, backward, step), for each timed step.
        clipped: Number of steps that clipped or overflowed. 0 without a plan.
    """

    name: str
    first_step: int
    losses: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    tensors: int
    clipped: int = 0

    @classmethod
    def load(cls, folder: Path, name: str) -> "DemoRun":
        facts = json.loads((folder / "runs" / f"{name}.json").read_text())
        lists = tuple(facts["losses"]), tuple(facts["phases"])
        return cls(name, facts["first_step"], *lists, facts["tensors"], facts.get("clipped", 0))

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each training phase over the timed steps of this run of the demo."""
        return medians(self.phases)


def same_bits(folder: Path, ours: str, theirs: str) -> tuple[str, ...]:
    """Return the names of parameters and Adam moments that differ between two training runs of the demo."""
    return differences(_tensors(folder, ours), _tensors(folder, theirs))


def _tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    path = folder / "runs" / f"{name}.pt"
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True, mmap=True)
    return loaded


def same_losses(whole: DemoRun, part: DemoRun) -> bool:
    """Return True if a resumed training run has the same losses as an uninterrupted run in each step that it trains."""
    return whole.losses[part.first_step - whole.first_step :] == part.losses


def predicted_phases(plan: Plan, side: str) -> dict[str, dict[str, float]]:
    """Return the phase times that a plan's file predicts for ``side``, in seconds.

    ``side`` is ``plan`` (training under this plan) or ``stock`` (stock DeepSpeed). The result is a dict with one
    entry, such as ``{"plan, predicted": times}``. The dict is empty if the file has no prediction for ``side``.
    """
    if side == "plan":
        chosen = plan.prediction
    else:
        chosen = next((p for p in plan.alternatives if role_of(p.strategy) == "stock"), None)
    return {f"{side}, predicted": _phases(chosen)} if chosen else {}


def _phases(prediction: Prediction) -> dict[str, float]:
    row = {name: float(getattr(prediction, f"{name}_s")) for name in PHASES}
    return {**row, "iteration": prediction.iteration_s}
