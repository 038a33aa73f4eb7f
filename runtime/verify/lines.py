"""The file that each rank writes in a run of `tune verify`: one line of JSON per optimizer step.

The first line describes the run, and the second (step 0) has the state before the first step. A tensor is written as
``[start, count, total, digest]``. The rank has ``count`` of the tensor's ``total`` elements, from element ``start`` on.
``digest`` is the text that `ebbtide.runtime.kernels.digest.Digest.packed` returns for them.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.kernels.digest import digest

# Repeated in `ebbtide.runtime.frontdoor.verified`, which imports no other module of ebbtide.
VARIABLE = "EBBTIDE_VERIFY"


@dataclass(frozen=True)
class RecordingSettings:
    """The settings of `tune verify` that every process of a recorded training run gets.

    Attributes:
        side: The run: ``plan`` (the config as given), ``stock`` (without the key ``"ebbtide"``) or ``no-offload``.
        steps: Number of optimizer steps, after which the process ends.
        seed: Seed of the random generators that a script does not seed itself.
    """

    folder: str
    side: str
    steps: int
    seed: int = 0
    deterministic: bool = False
    strict: bool = False


def current_job() -> RecordingSettings:
    """Return the settings of `tune verify` for this process, from the environment variable that `tune verify` sets."""
    return RecordingSettings(**json.loads(os.environ[VARIABLE]))


@dataclass(frozen=True)
class Piece:
    """A part of one named tensor of the training state, as a flat view.

    Attributes:
        name: ``NAME`` for a parameter as the model computes with it, ``NAME/fp32`` for its master.
        values: Elements ``start`` to ``start + len(values)`` of the flattened tensor.
    """

    name: str
    values: torch.Tensor
    start: int
    total: int


class Lines:
    """The file that one rank writes in a run of `tune verify`: one line of JSON per optimizer step.

    Each line is flushed to the operating system.
    """

    def __init__(self, folder: Path, rank: int, about: dict[str, Any]) -> None:
        self._file = (folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self._threads = max(1, torch.get_num_threads())
        self.steps = -1
        self._write({"rank": rank, **about})

    def step(self, pieces: Iterable[Piece], **scalars: Any) -> None:
        """Write one line with the digests of the training state after one more step. The first call writes step 0."""
        tensors = {piece.name: self._digest(piece) for piece in pieces}
        self.steps += 1
        self._write({"step": self.steps, **scalars, "tensors": tensors})

    def close(self) -> None:
        self._file.close()

    def _digest(self, piece: Piece) -> list[Any]:
        made = digest(piece.values, piece.start, self._threads)
        return [piece.start, piece.values.numel(), piece.total, made.packed()]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def number(value: Any) -> float | None:
    """Return a number or one-element tensor as a float, and None for any other value.

    For a tensor distributed over ranks this is a collective call.
    """
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
