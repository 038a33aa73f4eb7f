"""A search within one training run for tensors with a sign of an error that no order of summation can
explain, such as NaNs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.tuner.verify.run import MASTER, Run


@dataclass(frozen=True)
class Evidence:
    """A sign that one training run went wrong, found in the run's tensors after one step.

    Attributes:
        run: Name of the run.
        step: Step after which the error is visible.
        name: Name of the tensor.
        text: Description of the error.
        certain: True if the sign is certainly an error. Otherwise the sign is only a hint at which of two runs is
            wrong.
    """

    run: str
    step: int
    name: str
    text: str
    certain: bool


def evidence(run: Run, step: int, other: Run) -> Iterator[Evidence]:
    """Yield the signs that a training run went wrong, found in the run's tensors after one step, such as NaNs or an
    unchanged tensor.

    Args:
        other: Second run of the same training, which shows what the step should have done.
    """
    goes_on = any(_moves(run, name, step) for name in run.masters)
    for name in run.steps[step].tensors:
        for text in _certain(run, other, step, name):
            yield Evidence(run.name, step, name, text, certain=True)
        if _stands_still(run, other, step, name):
            # With momentum, a master that has moved before moves in every step that is not skipped.
            lost = goes_on and name.endswith(MASTER) and _moves(run, name, step - 1)
            yield Evidence(run.name, step, name, "it is as it was a step before", certain=lost)


def _certain(run: Run, other: Run, step: int, name: str) -> Iterator[str]:
    now, theirs = run.steps[step].tensors[name], other.steps[step].tensors.get(name)
    if not now.copies_agree:
        yield "ranks hold different copies of it"
    if not name.endswith(MASTER) and _is_not_rounded(run, step, name):
        yield "the parameter is not its master, rounded"
    if theirs is None:
        return
    if now.not_finite > theirs.not_finite:
        yield f"{now.not_finite} of its elements are not finite"
    if name.endswith(MASTER) and theirs.low_bits and not now.low_bits:
        yield "its elements have 16 bits only"


def _is_not_rounded(run: Run, step: int, name: str) -> bool:
    now, first = run.steps[step].tensors, run.steps[0].tensors
    master = name + MASTER
    if not all(master in tensors and name in tensors for tensors in (now, first)):
        return False
    held = first[master].narrow == first[name].hash
    return held and now[master].narrow != now[name].hash


def _moves(run: Run, name: str, step: int) -> bool:
    return step > 0 and run.path(name, step) > run.path(name, step - 1)


def _stands_still(run: Run, other: Run, step: int, name: str) -> bool:
    if step == 0:
        return False
    ours = [r.steps[k].tensors.get(name) for r in (run, other) for k in (step - 1, step)]
    if any(tensor is None for tensor in ours):
        return False
    before, now, old, new = (tensor.hash for tensor in ours if tensor is not None)
    return before == now and old != new
