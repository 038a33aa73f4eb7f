"""The first differences between two training runs, and their size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.tuner.verify.run import MASTER, Run, Tensor


@dataclass(frozen=True)
class Difference:
    """A quantity that differs between two training runs after the same step.

    Attributes:
        name: A loss, ``gradient norm``, a learning rate, a parameter, or its fp32 master (``NAME/fp32``).
        ours: A scalar's value or a tensor's norm in the first run.
        theirs: The same in the second run.
        relative: A scalar's difference divided by the larger value. A tensor's distance divided by the distance
            that updates have moved the tensor so far, or by its norm if updates have not moved it.
        distance: Distance of a tensor in the two runs.
    """

    step: int
    name: str
    ours: float
    theirs: float
    relative: float
    distance: float = 0.0
    is_tensor: bool = False


def differences(run: Run, other: Run, step: int) -> list[Difference]:
    """Return all differences between two runs after one step, in the order of their causes.

    The order is losses, norm, learning rates, masters, parameters. Among masters, and among parameters, the
    largest difference comes first.
    """
    scalars = list(_scalars(run, other, step))
    tensors = sorted(_tensors(run, other, step), key=lambda d: (not d.name.endswith(MASTER), -d.relative))
    return [*scalars, *tensors]


def moved(run: Run, other: Run, at: Difference) -> float:
    """Return the distance that one step moved a tensor, in the run that moved it further."""
    return max(r.path(at.name, at.step) - r.path(at.name, at.step - 1) for r in (run, other))


def common_steps(run: Run, other: Run) -> range:
    return range(min(len(run.steps), len(other.steps)))


def _scalars(run: Run, other: Run, step: int) -> Iterator[Difference]:
    ours, theirs = run.steps[step].scalars, other.steps[step].scalars
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name, math.nan), theirs.get(name, math.nan)
        if a != b and not (math.isnan(a) and math.isnan(b)):
            size = max(abs(a), abs(b))
            apart = abs(a - b) / size if math.isfinite(size) and size else math.inf
            yield Difference(step, name, a, b, math.inf if math.isnan(apart) else apart)


def _tensors(run: Run, other: Run, step: int) -> Iterator[Difference]:
    ours, theirs = run.steps[step].tensors, other.steps[step].tensors
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            yield Difference(step, name, _norm(a), _norm(b), math.inf, math.inf, is_tensor=True)
        elif a.hash != b.hash:
            yield _of_tensors(run, other, step, name)


def _of_tensors(run: Run, other: Run, step: int, name: str) -> Difference:
    a, b = run.steps[step].tensors[name], other.steps[step].tensors[name]
    way = max(run.path(name, step), other.path(name, step))
    distance = a.distance(b) if a.not_finite == b.not_finite else math.inf
    relative = distance / (way or b.norm or 1.0)
    return Difference(step, name, a.norm, b.norm, relative, distance, is_tensor=True)


def _norm(tensor: Tensor | None) -> float:
    return math.nan if tensor is None else tensor.norm
