"""Which runs are made, and what is compared with what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tuner.verify.differences import Difference, common_steps, differences
from tuner.verify.judge import Finding, Noise, judge
from tuner.verify.launch import Launched, Side
from tuner.verify.run import Run

PLAN, STOCK, NO_OFFLOAD = "plan", "stock", "no-offload"
AGAIN = "the same again"
NEARER = 4.0  # times: whoever is so much nearer to a third side agrees with it


@dataclass(frozen=True)
class Verification:
    """What came of all comparisons.

    Attributes:
        runs: the sides, the nearest to what is known to be right last.
        operations: that torch names as not deterministic.
    """

    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]
    operations: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return all(finding.verdict != "defect" for finding in self.findings)


def verify(
    against: Sequence[str], start: Callable[[Side], Launched], told: Callable[[str], None]
) -> Verification:
    """Runs the sides and compares each with the next; further runs only where bits differ.

    Args:
        against: of ``stock`` and ``no-offload``.
        start: makes a run.
        told: is told what is being run.
    """

    def made(side: Side) -> Launched:
        told(side.title if side != Side(PLAN) else "the command as it is")
        return start(side)

    runs = _sides(against, made)
    if all(_same(run, other) for run, other in pairwise(runs)):
        return Verification(runs, tuple(
            judge(run, other, None, same_bits=True) for run, other in pairwise(runs)
        ))  # fmt: skip
    reference = runs[-1]
    side = reference.name if reference.name != AGAIN else runs[0].name
    again = made(Side(side)).run if reference.name != AGAIN else runs[0]
    chance = not _same(again, reference)
    flipped = made(Side(side, perturb=True)).run
    operations = made(Side(side, deterministic=True)).operations if chance else ()
    noise = Noise(reference, (again, flipped))
    return Verification(runs, compared(runs, noise, chance=chance), operations)


def compared(runs: Sequence[Run], noise: Noise, *, chance: bool = False) -> tuple[Finding, ...]:
    """Each side against the next. ``chance``: one side does not even agree with itself, so that no
    two must have the same bits.
    """
    findings = []
    for run, other in pairwise(runs):
        must = other.name != NO_OFFLOAD and not chance
        finding = judge(run, other, noise, same_bits=must)
        if chance and finding.verdict == "rounding":
            finding = replace(finding, verdict="nondeterministic")
        findings.append(finding)
    return tuple(_blamed(runs, findings, noise))


def _blamed(runs: Sequence[Run], findings: list[Finding], noise: Noise) -> list[Finding]:
    """Of two that differ the wrong one is not the one that agrees with a third."""
    first = findings[0].first
    if len(runs) != 3 or findings[0].verdict != "defect" or first is None:
        return findings
    nearer = _apart(runs[1], runs[2], first) > NEARER * _apart(runs[0], runs[2], first)
    if not nearer and findings[1].verdict == "defect":
        nearer = judge(runs[0], runs[2], noise, same_bits=False).verdict != "defect"
    if not nearer:
        return findings
    why = (*findings[0].why, f"{runs[0].name} agrees with {runs[2].name}")
    return [replace(findings[0], off=runs[1].name, why=why), findings[1]]


def _apart(run: Run, other: Run, at: Difference) -> float:
    """Of the quantity in which two others differ; 0: the same."""
    if at.step not in common_steps(run, other):
        return 0.0
    found = (d for d in differences(run, other, at.step) if d.name == at.name)
    return next((d.distance if d.is_tensor else d.relative for d in found), 0.0)


def _sides(against: Sequence[str], made: Callable[[Side], Launched]) -> tuple[Run, ...]:
    """The command as it is shows whether it has a plan and whether it offloads."""
    first = made(Side(PLAN)).run
    runs = [first if first.about.get("key") else replace(first, name=STOCK)]
    if first.about.get("key") and STOCK in against:
        runs.append(made(Side(STOCK)).run)
    if NO_OFFLOAD in against and first.about.get("offload"):
        runs.append(made(Side(NO_OFFLOAD)).run)
    if len(runs) == 1:  # nothing to compare with but itself
        runs.append(replace(made(Side(PLAN)).run, name=AGAIN))
    return tuple(runs)


def _same(run: Run, other: Run) -> bool:
    return len(run.steps) == len(other.steps) and not any(
        differences(run, other, step) for step in common_steps(run, other)
    )
