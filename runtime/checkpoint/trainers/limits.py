"""The checkpoint settings of the trainer that runs the training, such as transformers' Trainer.

They say how many checkpoints the trainer keeps, and whether it loads its best checkpoint at the end of training.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINER, ACCELERATOR = ("transformers.trainer", "Trainer"), ("accelerate.accelerator", "Accelerator")


@dataclass(frozen=True)
class TrainersLimit:
    """The settings of a trainer about its checkpoints: how many it keeps, and whether it loads its best one.

    Attributes:
        most: Number of checkpoints that exist at the end of a save. None if the trainer deletes none.
        loads_best: True if the trainer loads its best checkpoint at the end of training.
        trainer: Weak reference to the transformers Trainer. None for another library.
    """

    most: int | None
    loads_best: bool = False
    trainer: weakref.ref[Any] | None = None

    def is_best(self, checkpoint: Path) -> bool:
        """Return whether a path is the best checkpoint so far by the trainer's metric, or a folder inside it."""
        trainer = None if self.trainer is None or not self.loads_best else self.trainer()
        best = getattr(getattr(trainer, "state", None), "best_model_checkpoint", None)
        return best is not None and checkpoint.resolve().is_relative_to(Path(best).resolve())


def trainers_limit() -> TrainersLimit | None:
    """Return the checkpoint settings of the transformers Trainer or accelerate's Accelerator that is calling this code.

    The Trainer or Accelerator is found on the call stack, as ``self`` of one of the calling methods. If both are there,
    the Trainer's settings are returned. The result is None if neither is there.
    """
    found = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        caller = frame.f_locals.get("self")
        kinds = {(kind.__module__, kind.__name__) for kind in type(caller).__mro__}
        if TRAINER in kinds and hasattr(caller, "args"):
            return _of_trainer(caller)
        if ACCELERATOR in kinds and found is None:
            found = TrainersLimit(getattr(getattr(caller, "project_configuration", None), "total_limit", None))
    return found


def _of_trainer(trainer: Any) -> TrainersLimit:
    most = getattr(trainer.args, "save_total_limit", None)
    loads_best = bool(getattr(trainer.args, "load_best_model_at_end", False))
    if most is not None and most > 0 and loads_best:
        most = max(most, 2)  # the newest checkpoint and the best one
    return TrainersLimit(most if most and most > 0 else None, loads_best, weakref.ref(trainer))
