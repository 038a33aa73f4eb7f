"""Judgement of a difference between two training runs: did rounding or a defect cause it?

A difference from rounding is small at first, and grows as training goes on. For comparison, one more run is made with a
single flipped bit. That run shows how large the effect of rounding can be on each tensor and at each step. A much
larger difference is a defect. If training is deterministic, a run under a plan and a run with DeepSpeed alone must be
bit-identical, so any difference between these two is a defect.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ebbtide.tuner.verify.differences import Difference, common_steps, differences, moved
from ebbtide.tuner.verify.evidence import Evidence, evidence
from ebbtide.tuner.verify.run import MASTER, Run

# "untold": two runs of one side differ so much that a comparison shows nothing.
Verdict = Literal["identical", "rounding", "nondeterministic", "untold", "defect"]
RATE = "learning rate"
FACTOR = 10.0  # a difference above this multiple of the flipped bit's effect is a defect
# Rounding error of a step's sums that is allowed even if the flipped bit happens to have no effect.
FLOORS = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 1e-5}
# Losses and norms are sums over all elements. The effect of a flipped bit on them is known from all steps and
# micro-batches together. With at least LEAST_SAMPLES of these, a smaller share of FLOORS (SAMPLED_FLOOR) suffices.
LEAST_SAMPLES, SAMPLED_FLOOR = 4, 1 / 64
SAME_SUM = 1e-6  # relative difference of fp32 sums in another order
ANOTHER = 0.01  # share of a step's update by which masters differ although the gradients are the same
ALONE = 0.25  # share of a step's update by which a few tensors differ: more than sums in another order can explain
ULPS = 16.0  # in units of the last place of a tensor's largest element: more than the rounding of one update


@dataclass(frozen=True)
class Finding:
    """The result of comparing two recorded training runs in ``tune verify``.

    Attributes:
        side: Name of the first run.
        against: Name of the second run.
        verdict: Result in one word, such as ``identical``, ``rounding`` or ``defect``.
        steps: Number of compared steps.
        first: First difference that rounding does not explain. If rounding explains every difference, the first
            difference. None if all bits agree.
        also: Number of other tensors that differ in the same step as ``first``.
        explained: Relative difference that rounding explains for ``first``.
        off: Name of the run that is wrong. Empty if unknown.
        why: Sentences on why that run is wrong, and on possible causes.
    """

    side: str
    against: str
    verdict: Verdict
    steps: int
    first: Difference | None = None
    also: int = 0
    explained: float = 0.0
    off: str = ""
    why: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Noise:
    """The size of the differences between training runs that chance explains, measured with repeated runs
    of the same training.

    Attributes:
        reference: First run.
        others: A repeat of the first run, and a repeat with one flipped bit.
    """

    reference: Run
    others: tuple[Run, ...]

    def explained(self, difference: Difference) -> float:
        """Return how much chance alone can make one tensor or scalar differ between two training runs, as a relative
        difference.

        The result is derived from the differences of similar tensors or scalars between repeated runs.

        Args:
            difference: Difference that names the tensor or scalar and the step.
        """
        if not difference.is_tensor:
            return self._of_sums(_kind(difference))
        found = [self._floor(), *(self._of(run, difference) for run in self.others)]
        return max(value for value in found if math.isfinite(value))

    def _of_sums(self, kind: str) -> float:
        if kind == RATE:
            return 0.0  # a learning-rate schedule has no rounding error
        found = [
            d.relative
            for run in self.others
            for step in common_steps(run, self.reference)
            for d in differences(run, self.reference, step)
            if not d.is_tensor and _kind(d) == kind and math.isfinite(d.relative)
        ]
        share = SAMPLED_FLOOR if len(found) >= LEAST_SAMPLES else 1.0
        return max([share * self._floor(), *found])

    def least(self, step: int) -> float:
        """Return how far the fp32 masters of two correct training runs differ by chance at a given step: the 10th
        percentile of the masters' relative differences.

        A master is the fp32 copy of a parameter. Its relative difference is the distance between both runs' values,
        divided by the distance that all updates so far have moved the master. The result is measured between correct
        runs of the same training, but it is never less than a quarter of the expected rounding error. `judge` suspects
        a defect if nine in ten masters differ by more than ten times the result.
        """
        found = [self._floor() / 4]
        for run in self.others:
            if step in common_steps(run, self.reference):
                masters = [d for d in differences(run, self.reference, step) if d.name.endswith(MASTER)]
                if masters and len(masters) == len(self.reference.masters):
                    found.append(_least(masters))
        return max(found)

    def _floor(self) -> float:
        return FLOORS.get(str(self.reference.about.get("dtype")), FLOORS["bf16"])

    def _of(self, run: Run, wanted: Difference) -> float:
        if wanted.step not in common_steps(run, self.reference):
            return 0.0
        like = [d for d in differences(run, self.reference, wanted.step) if _kind(d) == _kind(wanted)]
        own = [d.relative for d in like if d.name == wanted.name]
        return max([*own, median(d.relative for d in like)] if like else [0.0])


def _kind(difference: Difference) -> str:
    if difference.is_tensor:
        return "master" if difference.name.endswith(MASTER) else "parameter"
    return difference.name.split(" of ")[0]


def judge(run: Run, other: Run, noise: Noise | None, *, same_bits: bool) -> Finding:
    """Compare a training run with a more trusted run, and decide if a difference is rounding or a defect.

    Args:
        other: More trusted run. In case of a defect, ``run`` is called wrong unless recorded evidence shows that
            ``other`` is.
        noise: Size of the differences that chance explains, measured with repeated runs. None if no run was repeated.
        same_bits: True if the two runs must agree bit by bit, so that any difference is a defect.
    """
    steps = len(common_steps(run, other)) - 1
    finding = Finding(run.name, other.name, "identical", max(0, steps))
    first: Difference | None = None
    for step in common_steps(run, other):
        found = differences(run, other, step)
        shown = _shown(run, other, step)
        first = first or (found[0] if found else None)
        wrong = _wrong(run, other, step, found, shown, noise, same_bits=same_bits)
        if wrong is not None:
            return _defect(run, other, wrong, found, shown, noise, finding)
    if first is None:
        return finding
    explained = 0.0 if noise is None else noise.explained(first)
    return Finding(
        run.name, other.name, "rounding", steps, first, _others(differences(run, other, first.step), first), explained
    )


def _shown(run: Run, other: Run, step: int) -> list[Evidence]:
    return [*evidence(run, step, other), *evidence(other, step, run)]


def _wrong(
    run: Run,
    other: Run,
    step: int,
    found: Sequence[Difference],
    shown: Sequence[Evidence],
    noise: Noise | None,
    *,
    same_bits: bool,
) -> Difference | None:
    if same_bits and found:
        return found[0]
    large = [d for d in found if _is_large(d, found, noise)]
    if large and not large[0].is_tensor:
        return large[0]
    for piece in shown:
        if piece.certain:
            return _of_evidence(run, other, found, piece)
    if large:
        return large[0]
    if same_bits or noise is None:
        return None
    return (
        _in_one_place(run, other, step, found)
        or _another_update(run, other, step, found)
        or _everywhere(other, found, noise)
    )


def _is_large(difference: Difference, found: Sequence[Difference], noise: Noise | None) -> bool:
    if noise is None or _is_follower(difference, found):
        return False
    return difference.relative > FACTOR * noise.explained(difference)


def _everywhere(other: Run, found: Sequence[Difference], noise: Noise) -> Difference | None:
    """Look for a defect that changes all fp32 master parameters of a run, such as a wrong learning rate.

    If all masters differ between two runs, and nearly all of them by more than rounding explains, return the difference
    of the master that differs most clearly. It is reported as the place of the defect. Otherwise return None, because
    rounding alone would leave some masters nearly equal in both runs.
    """
    masters = [d for d in found if d.name.endswith(MASTER)]
    if not masters or len(masters) < len(other.masters):
        return None
    if noise.least(masters[0].step) * FACTOR >= _least(masters):
        return None
    return max(masters, key=lambda d: d.relative / noise.explained(d))


def _least(masters: Sequence[Difference]) -> float:
    return sorted(d.relative for d in masters)[len(masters) // 10]


def _is_follower(difference: Difference, found: Sequence[Difference]) -> bool:
    if difference.name.endswith(MASTER) or not difference.is_tensor:
        return False
    return any(d.name.endswith(MASTER) for d in found)


def _in_one_place(run: Run, other: Run, step: int, found: Sequence[Difference]) -> Difference | None:
    """Return a difference between two training runs, after one step, that rounding cannot explain.

    Only a difference that appears in a few tensors is returned. If there is none, return None.

    The result is also None in three cases:

    - The step is the first step of training.
    - Some tensor already differed after an earlier step.
    - At least half of the tensors differ now.

    If losses and gradient norms agree bit by bit up to this step, rounding explains a difference of at most the
    rounding of one update. If they do not, gradients may have been summed in another order. Rounding then explains a
    difference of at most a quarter of the step's update.
    """
    tensors = [d for d in found if d.is_tensor]
    earlier = [d for k in range(step) for d in differences(run, other, k)]
    if step < 2 or not tensors or any(d.is_tensor for d in earlier):
        return None
    if len(tensors) >= len(other.steps[step].tensors) / 2:
        return None
    if earlier or len(tensors) < len(found):
        large = [d for d in tensors if d.distance > ALONE * moved(run, other, d)]
    else:
        large = [d for d in tensors[:1] if d.distance > _update_rounding(other, step, tensors)]
    return large[0] if large else None


def _another_update(run: Run, other: Run, step: int, found: Sequence[Difference]) -> Difference | None:
    """Return a difference between two training runs that shows a wrong optimizer update in one of them, or None.

    The update of a step is wrong if three conditions hold. All tensors agreed before the step. Losses, gradient norms
    and learning rates nearly agree up to and including the step. At least half of the fp32 masters (fp32 copies of
    parameters) were updated differently. Rounding has had no time to grow so large.
    """
    earlier = [d for k in range(step) for d in differences(run, other, k)]
    sums = [d for d in (*earlier, *found) if not d.is_tensor]
    masters = [d for d in found if d.name.endswith(MASTER)]
    if step < 2 or any(d.is_tensor for d in earlier) or any(d.relative > SAME_SUM for d in sums):
        return None
    shares = {d: d.distance / (moved(run, other, d) or 1.0) for d in masters}
    if 2 * sum(share > ANOTHER for share in shares.values()) < len(other.masters) or not shares:
        return None
    return max(masters, key=lambda d: shares[d])


def _update_rounding(other: Run, step: int, found: Sequence[Difference]) -> float:
    tensors = other.steps[step].tensors
    largest = max((tensors[d.name].largest for d in found if d.name in tensors), default=0.0)
    return ULPS * 2.0**-23 * largest


def _of_evidence(run: Run, other: Run, found: Sequence[Difference], shown: Evidence) -> Difference:
    for difference in found:
        if difference.name == shown.name:
            return difference
    ours, theirs = (side.steps[shown.step].tensors[shown.name].norm for side in (run, other))
    return Difference(shown.step, shown.name, ours, theirs, relative=0.0, is_tensor=True)


def _defect(
    run: Run,
    other: Run,
    wrong: Difference,
    found: Sequence[Difference],
    shown: Sequence[Evidence],
    noise: Noise | None,
    finding: Finding,
) -> Finding:
    mine = [e for e in shown if e.name.removesuffix(MASTER) == wrong.name.removesuffix(MASTER)]
    own = [e.run for e in mine]
    off = own[0] if own and len(set(own)) == 1 else run.name
    why = tuple(dict.fromkeys(f"{e.run}: {e.text}" for e in mine if e.run == off))
    return Finding(
        run.name,
        other.name,
        "defect",
        finding.steps,
        wrong,
        _others(found, wrong),
        0.0 if noise is None else noise.explained(wrong),
        off,
        (*why, *_early_updates(other, wrong, found)),
    )


def _others(found: Sequence[Difference], first: Difference) -> int:
    return sum(d.is_tensor and d.name != first.name for d in found)


def _early_updates(other: Run, wrong: Difference, found: Sequence[Difference]) -> Iterator[str]:
    if wrong.step == 0:
        yield "the runs begin with different parameters: check the script's seeds and the checkpoint it resumes from"
    elif wrong.name == "gradient norm" and found[0] is wrong:
        yield "the losses of this step are the same: gradients are lost, or counted twice"
    elif wrong.name.endswith(MASTER):
        masters = sum(d.name.endswith(MASTER) for d in found)
        if masters > 1 and masters >= 0.9 * len(other.masters):
            yield "nearly all masters differ: step count, betas, learning rate or clipping"
    elif wrong.name + MASTER in other.steps[wrong.step].tensors and not any(
        d.name == wrong.name + MASTER for d in found
    ):
        yield "the masters are the same: the fault comes after the update"
