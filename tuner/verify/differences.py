"""The quantities (losses, gradient norms, learning rates and tensors) that differ between two recorded training runs
after the same step, with the size of each difference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.tuner.verify.run import MASTER, RecordedRun, Tensor


@dataclass(frozen=True)
class Difference:
    """A quantity (a loss, norm, rate or tensor) that differs between two training runs after the same step.

    Attributes:
        name: A loss, ``gradient norm``, a learning rate, a parameter, or its fp32 master (``NAME/fp32``).
        theirs: Value of the scalar, or norm of the tensor, in the second run.
        relative: For a scalar, the difference divided by the larger value. For a tensor, the distance divided by
            the distance that updates have moved the tensor so far, or by its norm if they have not moved it.
        distance: Euclidean distance between the tensor's values in the two runs.
        is_tensor: True for a tensor, False for a scalar.
    """

    step: int
    name: str
    ours: float
    theirs: float
    relative: float
    distance: float = 0.0
    is_tensor: bool = False


def differences(run: RecordedRun, other: RecordedRun, step: int) -> list[Difference]:
    """Return a list of all quantities that differ between two training runs after one step, causes before effects."""
    scalars = list(_scalars(run, other, step))
    tensors = sorted(_tensors(run, other, step), key=lambda d: (not d.name.endswith(MASTER), -d.relative))
    return [*scalars, *tensors]


def common_steps(run: RecordedRun, other: RecordedRun) -> range:
    return range(min(len(run.steps), len(other.steps)))


def _scalars(run: RecordedRun, other: RecordedRun, step: int) -> Iterator[Difference]:
    ours, theirs = run.steps[step].scalars, other.steps[step].scalars
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name, math.nan), theirs.get(name, math.nan)
        if a != b and not (math.isnan(a) and math.isnan(b)):
            size = max(abs(a), abs(b))
            apart = abs(a - b) / size if math.isfinite(size) and size else math.inf
            yield Difference(step, name, a, b, math.inf if math.isnan(apart) else apart)


def _tensors(run: RecordedRun, other: RecordedRun, step: int) -> Iterator[Difference]:
    ours, theirs = run.steps[step].tensors, other.steps[step].tensors
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            yield Difference(step, name, _norm(a), _norm(b), math.inf, math.inf, is_tensor=True)
        elif (a.hash, a.copies_agree) != (b.hash, b.copies_agree):
            yield _of_tensors(run, other, step, name)


def _of_tensors(run: RecordedRun, other: RecordedRun, step: int, name: str) -> Difference:
    a, b = run.steps[step].tensors[name], other.steps[step].tensors[name]
    way = max(run.path(name, step), other.path(name, step))
    distance = a.distance(b) if a.not_finite == b.not_finite else math.inf
    relative = distance / (way or b.norm or 1.0)
    return Difference(step, name, a.norm, b.norm, relative, distance, is_tensor=True)


def _norm(tensor: Tensor | None) -> float:
    return math.nan if tensor is None else tensor.norm
