"""The differences between two runs of the same training command, which should have given equal results.

Such differences are either noise of the kernels' summation order, or the runs train differently, for example because a
random generator has no fixed seed. If the runs train differently, no comparison with another run is possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ebbtide.tuner.verify.differences import Difference, common_steps, differences, moved
from ebbtide.tuner.verify.run import MASTER, Run

# Fraction of a step's change of a tensor. Sums in another order change the few elements of Adam's first update whose
# gradient is about zero (in 16 bits a tenth of the elements). Another batch or other dropout changes most of them.
ANOTHER = 0.25


@dataclass(frozen=True)
class Chance:
    """The difference between two runs of the same training command in ``tune verify``. The runs should have given equal
    results.

    Attributes:
        where: Text on the first difference, with a hint about its cause.
        apart: How far apart the runs are after the first step at which their parameters differ, relative to how far
            this step moved the parameters. It is the median, over the tensors that differ, of the ratio of these two
            Euclidean distances. 0 if the runs begin with different parameters, or no parameter differs.
        blind: True if the runs differ so much that a comparison with another run would show nothing.
    """

    where: str
    apart: float
    blind: bool


def chance_of(run: Run, other: Run) -> Chance | None:
    """Return the difference between two recorded runs of the same training command, or None if all bits agree."""
    steps = [differences(run, other, step) for step in common_steps(run, other)]
    found = [(step, each) for step, each in enumerate(steps) if each]
    if not found:
        return None
    step, first = found[0]
    apart = 0.0
    if step:
        apart = next((_apart(run, other, each) for _, each in found if _tensors(each)), 0.0)
    return Chance(_where(step, first[0]), apart, blind=step == 0 or apart > ANOTHER)


def _tensors(found: Sequence[Difference]) -> list[Difference]:
    tensors = [d for d in found if d.is_tensor]
    return [d for d in tensors if d.name.endswith(MASTER)] or tensors


def _apart(run: Run, other: Run, found: Sequence[Difference]) -> float:
    return median(d.distance / (moved(run, other, d) or 1.0) for d in _tensors(found))


def _where(step: int, first: Difference) -> str:
    if step == 0:
        return (
            "the parameters differ before the first step: the script seeds a random generator differently "
            "in each run, or the checkpoint that it resumes from has changed"
        )
    if first.name.startswith("loss"):
        return (
            f"the losses of step {step} differ although the parameters are the same: look for different data (a "
            "sampler or a loader with a generator of its own), or a dropout seed that differs in each run"
        )
    if first.is_tensor:
        return f"losses and norm of step {step} are the same, but {first.name} differs: look at the update"
    return f"the losses of step {step} are the same, but its {first.name} differs: look at backward"
