"""A recorded training run of ``tune verify``, put together from the records of the run's ranks.

The recorded numbers do not depend on how tensors are divided among the ranks.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

LANES = 16  # number of random sums in a digest
_LAYOUT = f"<Qq{1 + LANES}d"  # layout of `ebbtide.runtime.kernels.digest.Digest.packed`
_MASK = (1 << 64) - 1
MASTER = "/fp32"


@dataclass(frozen=True)
class Tensor:
    """A digest of one tensor in a training run, put together from the parts that the ranks hold.

    Attributes:
        sketch: Short vector. The distance of two sketches is about the distance of the tensors.
        copies_agree: True if ranks that hold the same part of the tensor hold the same bits.
    """

    hash: int
    not_finite: int
    norm: float
    sketch: tuple[float, ...]
    copies_agree: bool = True

    def distance(self, other: "Tensor") -> float:
        """Return the approximate Euclidean distance, within a factor of two of the true one."""
        return math.dist(self.sketch, other.sketch)


@dataclass(frozen=True)
class RecordedStep:
    """The recorded state of a training run after one optimizer step, or before the first step.

    Attributes:
        scalars: Losses, gradient norm and learning rates by name, in the order of their computation.
        tensors: Digests by name: first the fp32 masters, then the parameters.
    """

    scalars: Mapping[str, float]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class RecordedRun:
    """A recorded training run.

    Attributes:
        name: Name of the kind of run: ``plan``, ``stock`` (DeepSpeed without a plan) or ``no-offload``.
        about: Facts recorded by rank 0: versions, ZeRO stage, number of ranks, dtype.
        steps: Recorded states. Number 0 is the state before the first step.
        asked: Number of requested steps. 0 if unknown.
        silent: Number of ranks without any recorded step.
        operations: Names of the operations that torch's warnings call nondeterministic.
    """

    name: str
    about: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]
    asked: int = 0
    silent: int = 0
    operations: tuple[str, ...] = ()
    _paths: dict[tuple[str, int], float] = field(default_factory=dict, compare=False, repr=False)

    def path(self, name: str, step: int) -> float:
        """Return the total distance that a training run's updates have moved a tensor up to a step: the sum
        of the distances of all steps.

        The result is never NaN.
        """
        if step == 0:
            return 0.0
        known = self._paths.get((name, step))
        if known is None:
            now, before = (self.steps[k].tensors.get(name) for k in (step, step - 1))
            moved = now.distance(before) if now is not None and before is not None else 0.0
            known = self._paths[(name, step)] = self.path(name, step - 1) + moved
        return known

    @cached_property
    def masters(self) -> tuple[str, ...]:
        return tuple(name for name in self.steps[0].tensors if name.endswith(MASTER))


def read_run(folder: Path, name: str) -> RecordedRun | None:
    """Read a training run from the files that its ranks wrote to a folder. Return None if there are none."""
    ranks = [_lines(path) for path in sorted(folder.glob("rank*.jsonl"))]
    ranks = [lines for lines in ranks if len(lines) > 1]
    if not ranks:
        return None
    ranks.sort(key=lambda lines: int(lines[0]["rank"]))
    count = min(len(lines) for lines in ranks) - 1
    steps = tuple(_step([lines[1 + k] for lines in ranks]) for k in range(count))
    return RecordedRun(name, ranks[0][0], steps, silent=int(ranks[0][0]["ranks"]) - len(ranks))


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _step(ranks: list[dict[str, Any]]) -> RecordedStep:
    parts: dict[str, list[list[Any]]] = defaultdict(list)
    for line in ranks:
        for name, part in line["tensors"].items():
            parts[name].append(part)
    ordered = sorted(parts, key=lambda name: not name.endswith(MASTER))
    return RecordedStep(_scalars(ranks), {name: _whole(parts[name]) for name in ordered})


def _scalars(ranks: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for rank, line in enumerate(ranks):
        for number, loss in enumerate(line["losses"], 1):
            found[f"loss of micro-batch {number}, rank {rank}"] = loss
    found["gradient norm"] = ranks[0]["norm"]
    for group, rate in enumerate(ranks[0]["rates"]):
        found[f"learning rate of group {group}"] = rate
    return {name: value for name, value in found.items() if value is not None}


def _whole(parts: Iterable[list[Any]]) -> Tensor:
    by_start: dict[int, tuple[Any, ...]] = {}
    agree = True
    for start, _, _, packed in parts:
        digest = struct.unpack(_LAYOUT, bytes.fromhex(packed))
        agree = agree and by_start.get(start, digest)[0] == digest[0]
        by_start.setdefault(start, digest)
    columns = list(zip(*by_start.values(), strict=True))
    return Tensor(
        hash=sum(columns[0]) & _MASK,
        not_finite=sum(columns[1]),
        norm=math.sqrt(sum(columns[2])),
        sketch=tuple(sum(column) for column in columns[3:]),
        copies_agree=agree,
    )
