"""The results of the demo's training runs, read and compared."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from ebbtide.simulator import Plan, Prediction

from studies.bench.bits import differences
from studies.bench.phase_clock import PHASES, medians

# Of the simulator's strategy, as a plan's alternatives name it.
STOCK_NAMES = ("stock ZeRO-3 offload", "zero3_offload")


@dataclass(frozen=True)
class Run:
    """One training run's results, without its tensors.

    Attributes:
        first_step: 0, or the step at which a resumed run continued.
        losses: of steps ``first_step`` and later. Exact: JSON keeps a float's every bit.
        phases: seconds of each phase, per timed step.
    """

    name: str
    first_step: int
    losses: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    tensors: int

    @classmethod
    def load(cls, folder: Path, name: str) -> "Run":
        facts = json.loads((folder / "runs" / f"{name}.json").read_text())
        return cls(name, facts["first_step"], tuple(facts["losses"]), tuple(facts["phases"]), facts["tensors"])

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each phase over the timed steps."""
        return medians(self.phases)


def same_bits(folder: Path, ours: str, theirs: str) -> tuple[str, ...]:
    """Names of the parameters and moments that differ between two runs; empty if none."""
    return differences(_tensors(folder, ours), _tensors(folder, theirs))


def _tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    path = folder / "runs" / f"{name}.pt"
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True, mmap=True)
    return loaded


def same_losses(whole: Run, part: Run) -> bool:
    """Return whether the second run's losses equal the first one's, from its first step to the end."""
    return whole.losses[part.first_step - whole.first_step :] == part.losses


def predicted_phases(plan: Plan, side: str) -> dict[str, dict[str, float]]:
    """``{"plan, predicted": phases}``; for stock from the plan's alternatives, {} if not there."""
    if side == "plan":
        chosen = plan.prediction
    else:
        chosen = next((p for p in plan.alternatives if p.strategy in STOCK_NAMES), None)
    return {f"{side}, predicted": _phases(chosen)} if chosen else {}


def _phases(prediction: Prediction) -> dict[str, float]:
    row = {name: float(getattr(prediction, f"{name}_s")) for name in PHASES}
    return {**row, "iteration": prediction.iteration_s}
