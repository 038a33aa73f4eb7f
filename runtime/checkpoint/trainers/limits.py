"""The number of checkpoints that the calling trainer keeps, by its own settings."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINER, ACCELERATOR = ("transformers.trainer", "Trainer"), ("accelerate.accelerator", "Accelerator")


@dataclass(frozen=True)
class TrainersLimit:
    """The checkpoints that a trainer keeps.

    Attributes:
        most: number of checkpoints at the end of a save; None if the trainer deletes none.
        loads_best: whether the trainer loads its best checkpoint at the end of training.
        trainer: the transformers Trainer; None for another library.
    """

    most: int | None
    loads_best: bool = False
    trainer: weakref.ref[Any] | None = None

    def is_best(self, checkpoint: Path) -> bool:
        """Return whether this is, by now, the trainer's best checkpoint or a folder in it."""
        trainer = None if self.trainer is None or not self.loads_best else self.trainer()
        best = getattr(getattr(trainer, "state", None), "best_model_checkpoint", None)
        return best is not None and checkpoint.resolve().is_relative_to(Path(best).resolve())


def trainers_limit() -> TrainersLimit | None:
    """Return the limit of the trainer that called, directly or not. None if no trainer did."""
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        kinds = {(kind.__module__, kind.__name__) for kind in type(caller).__mro__}
        if TRAINER in kinds and hasattr(caller, "args"):
            return _of_trainer(caller)
        if ACCELERATOR in kinds and found is None:
            found = TrainersLimit(getattr(getattr(caller, "project_configuration", None), "total_limit", None))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _of_trainer(trainer: Any) -> TrainersLimit:
    most = getattr(trainer.args, "save_total_limit", None)
    loads_best = bool(getattr(trainer.args, "load_best_model_at_end", False))
    if most is not None and most > 0 and loads_best:
        most = max(most, 2)  # the newest and the best one
    return TrainersLimit(most if most and most > 0 else None, loads_best, weakref.ref(trainer))
