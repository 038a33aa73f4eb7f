"""The runs that ``tune verify`` makes of a training command, and their comparison in pairs.

A comparison has one of three results: all bits agree, the runs differ (the first difference is named), or the script
differs from itself: two runs of the same command differ, so nothing can be said.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ebbtide.tuner.verify.differences import Difference, common_steps, differences
from ebbtide.tuner.verify.launch import Side
from ebbtide.tuner.verify.run import MASTER, RecordedRun

PLAN, STOCK, NO_OFFLOAD = "plan", "stock", "no-offload"
AGAIN = "the same again"
Verdict = Literal["identical", "different", "nondeterministic"]


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing two recorded training runs in ``tune verify``.

    Attributes:
        against: Name of the second run.
        verdict: ``nondeterministic`` if two runs of the same command differ too.
        first: First difference. None if all bits agree.
        also: Number of other tensors that differ in the same step as ``first``.
        why: Sentences on possible causes of the difference.
    """

    side: str
    against: str
    verdict: Verdict
    steps: int
    first: Difference | None = None
    also: int = 0
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The result of ``tune verify``: the compared training runs and what was found.

    Attributes:
        findings: Result of comparing each run with the next, and last, if two runs of the same command differ, the
            result of comparing these.
        operations: Names of the operations that torch's warnings call nondeterministic.
    """

    runs: tuple[RecordedRun, ...]
    findings: tuple[RunComparison, ...]
    operations: tuple[str, ...] = ()

    @property
    def right(self) -> bool | None:
        """True if the plan computes the bits of DeepSpeed alone, False if not, None if the runs do not tell.

        A run without offload adds in another order, so its difference alone proves no run wrong. It decides only if
        there is no other comparison.
        """
        if any(finding.verdict == "nondeterministic" for finding in self.findings):
            return None
        same_bits = [f for f in self.findings if f.against != NO_OFFLOAD]
        if same_bits:
            return all(f.verdict == "identical" for f in same_bits)
        return True if all(f.verdict == "identical" for f in self.findings) else None


def verify(against: Sequence[str], start: Callable[[Side], RecordedRun], say: Callable[[str], None]) -> Verification:
    """Run a training command under its plan and in other ways, and compare each run with the next.

    The order is: under the plan, with DeepSpeed alone, without offload. If the first two differ, the command is run
    again, to see if the script differs from itself.

    Args:
        against: Runs to compare with: ``stock`` (DeepSpeed without a plan), ``no-offload`` or both.
        start: Function that runs the command in the way that a `Side` describes, and returns the recorded run.
        told: Called with a description of each run before it starts.
    """

    def made(side: Side) -> RecordedRun:
        say(side.title if side != Side(PLAN) else "the command as it is")
        return start(side)

    runs = _sides(against, made)
    findings = [compare(run, other) for run, other in pairwise(runs)]
    if findings[0].verdict == "identical":  # two runs have the same bits, so the script repeats its own results
        return Verification(runs, tuple(findings))
    itself = findings[0]
    if runs[1].name != AGAIN:
        trusted = next((run for run in runs if run.name == STOCK), runs[0])
        itself = compare(trusted, replace(made(Side(trusted.name)), name=AGAIN))
        if itself.verdict == "identical":
            if trusted is runs[1] and _differ(runs[0], made(Side(runs[0].name))):
                said = f"{runs[0].name} gave other results when it was run again (a race, or faulty hardware)"
                findings[0] = replace(findings[0], why=(*findings[0].why, said))
            return Verification(runs, tuple(findings))
        findings.append(itself)
    operations = made(Side(itself.side, deterministic=True)).operations
    found = (f if f.verdict == "identical" else replace(f, verdict="nondeterministic") for f in findings)
    return Verification(runs, tuple(found), operations)


def _sides(against: Sequence[str], made: Callable[[Side], RecordedRun]) -> tuple[RecordedRun, ...]:
    first = made(Side(PLAN))
    runs = [first if first.about.get("key") else replace(first, name=STOCK)]
    if first.about.get("key") and STOCK in against:
        runs.append(made(Side(STOCK)))
    if NO_OFFLOAD in against and first.about.get("offload"):
        runs.append(made(Side(NO_OFFLOAD)))
    if len(runs) == 1:  # there is no other run to compare with
        runs.append(replace(made(Side(PLAN)), name=AGAIN))
    return tuple(runs)


def _differ(run: RecordedRun, other: RecordedRun) -> bool:
    return compare(run, other).verdict == "different"


def compare(run: RecordedRun, other: RecordedRun) -> RunComparison:
    """Compare two recorded training runs bit by bit."""
    steps = common_steps(run, other)
    for step in steps:
        found = differences(run, other, step)
        if found:
            also = sum(d.is_tensor for d in found[1:])
            return RunComparison(
                run.name, other.name, "different", len(steps) - 1, found[0], also, tuple(_why(run, other, found))
            )
    if len(run.steps) == len(other.steps):
        return RunComparison(run.name, other.name, "identical", len(steps) - 1)
    ours, theirs = len(run.steps) - 1, len(other.steps) - 1
    ended = Difference(len(steps), "number of steps", ours, theirs, abs(ours - theirs) / max(ours, theirs))
    return RunComparison(run.name, other.name, "different", len(steps) - 1, ended)


def _why(run: RecordedRun, other: RecordedRun, found: Sequence[Difference]) -> Iterator[str]:
    first = found[0]
    if first.step == 0:
        yield (
            "the parameters differ before the first step: the script seeds a random generator differently in each run, "
            "or the checkpoint that it resumes from has changed"
        )
    elif first.name.startswith("loss"):
        yield (
            "the parameters before this step are the same: look for different data (a sampler or a loader with a "
            "generator of its own), or a dropout seed that differs in each run"
        )
    elif first.name == "gradient norm":
        yield "the losses of this step are the same: gradients are lost, counted twice, or added in another order"
    elif first.name.endswith(MASTER):
        masters = sum(d.name.endswith(MASTER) for d in found)
        if masters > 1 and masters >= 0.9 * len(other.masters):
            yield "nearly all masters differ: step count, betas, learning rate or clipping"
    elif first.is_tensor and first.name + MASTER in other.steps[first.step].tensors:
        yield "the masters are the same: the fault comes after the update"
    for side in (run, other):
        here = side.steps[first.step].tensors.get(first.name)
        if here is not None and not here.copies_agree:
            yield f"{side.name}: ranks hold different copies of it"
