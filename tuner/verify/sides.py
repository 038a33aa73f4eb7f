"""The runs that ``tune verify`` makes of a training command, and their comparison in pairs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ebbtide.tuner.verify.chance import Chance, chance_of
from ebbtide.tuner.verify.differences import Difference, common_steps, differences
from ebbtide.tuner.verify.judge import Finding, Noise, judge
from ebbtide.tuner.verify.launch import Side
from ebbtide.tuner.verify.run import Run

PLAN, STOCK, NO_OFFLOAD = "plan", "stock", "no-offload"
AGAIN = "the same again"
NEARER = 4.0  # a side that is nearer to a third side by this factor agrees with it


@dataclass(frozen=True)
class Verification:
    """The result of ``tune verify``: the compared training runs and what was found.

    Attributes:
        runs: Compared runs, the most trusted one last.
        findings: Result of comparing each run with the next.
        operations: Names of the operations that torch's warnings call nondeterministic.
        chance: Difference between two runs of the same command. None if they are equal.
    """

    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]
    operations: tuple[str, ...] = ()
    chance: Chance | None = None

    @property
    def right(self) -> bool | None:
        """Return True if ``tune verify`` found that the script trains right under its plan, False if the
        script trains wrong, and None if the runs do not tell.
        """
        verdicts = {finding.verdict for finding in self.findings}
        if "defect" in verdicts:
            return False
        return None if "untold" in verdicts else True


def verify(against: Sequence[str], start: Callable[[Side], Run], told: Callable[[str], None]) -> Verification:
    """Run a training command under its plan and in other ways, such as with DeepSpeed alone, and compare the results.

    Each run is compared with the next one, in the order: under the plan, with DeepSpeed alone, without offload. If the
    results of all runs are bit-identical, no further run is made. Otherwise, some runs are repeated, and one run is
    made with a flipped bit. These runs show how large differences by chance and by rounding are.

    Args:
        against: Runs to compare with: ``stock`` (DeepSpeed without a plan), ``no-offload`` or both.
        start: Function that runs the command in the way that a `Side` describes, and returns the recorded run.
        told: Called with a description of each run before it starts.
    """

    def made(side: Side) -> Run:
        told(side.title if side != Side(PLAN) else "the command as it is")
        return start(side)

    runs = _sides(against, made)
    if all(_same(run, other) for run, other in pairwise(runs)):
        return Verification(runs, tuple(judge(run, other, None, same_bits=True) for run, other in pairwise(runs)))
    repeated = _repeated(runs, made)
    reference = runs[-1]
    side = reference.name if reference.name != AGAIN else runs[0].name
    again = repeated.get(side) or (made(Side(side)) if reference.name != AGAIN else runs[0])
    chance = None if _once(runs, repeated) else chance_of(again, reference)
    flipped = made(Side(side, perturb=True))
    operations = made(Side(side, deterministic=True)).operations if chance else ()
    noise = Noise(reference, (again, flipped))
    found = compared(runs, noise, repeated, chance=chance)
    return Verification(runs, found, operations, chance)


def _repeated(runs: Sequence[Run], made: Callable[[Side], Run]) -> dict[str, Run]:
    """Repeat the training runs under the plan and with DeepSpeed alone if their recorded losses or tensors
    differ in any bit.

    Return a dict from the name of a run to its repeat. The repeats show if the difference occurs again,
    and which run caused it.
    """
    if [run.name for run in runs[:2]] != [PLAN, STOCK] or _same(runs[0], runs[1]):
        return {}
    return {run.name: replace(made(Side(run.name)), name=run.name) for run in runs[:2]}


def _once(runs: Sequence[Run], repeated: Mapping[str, Run]) -> Run | None:
    if not repeated or not _same(repeated[PLAN], repeated[STOCK]):
        return None
    odd = [run for run in runs[:2] if not _same(run, repeated[PLAN])]
    return odd[0] if len(odd) == 1 else None


def compared(
    runs: Sequence[Run], noise: Noise, repeated: Mapping[str, Run] | None = None, *, chance: Chance | None = None
) -> tuple[Finding, ...]:
    """Compare each recorded training run with the next one in the list, and return one finding per pair.

    Args:
        runs: Runs, such as under the plan, with DeepSpeed alone, and without offload. The most trusted one is last.
        noise: Size of the differences that rounding and chance explain, measured with a run, its repeat, and a repeat
            with one flipped bit.
        repeated: Second runs under the plan and with DeepSpeed alone, by the name of the run that they repeat. Empty if
            there are no second runs.
        chance: Difference between a run and its repeat, if training is not deterministic. If None, training is taken to
            be deterministic: the run under the plan must then have the same bits as the run with DeepSpeed alone.
    """
    findings = []
    for run, other in pairwise(runs):
        must = other.name != NO_OFFLOAD and chance is None
        finding = judge(run, other, noise, same_bits=must)
        if chance is not None and finding.verdict == "rounding":
            finding = replace(finding, verdict="untold" if chance.blind else "nondeterministic")
        findings.append(finding)
    once = _once(runs, repeated or {})
    if once is not None and findings[0].verdict == "defect":
        said = f"{once.name} gave different results when it was run again, those of {_other(runs, once)}"
        findings[0] = replace(
            findings[0], off=once.name, why=(f"{said}: the difference does not recur (a race, or faulty hardware)",)
        )
        return tuple(findings)
    return tuple(_blamed(runs, findings, noise))


def _other(runs: Sequence[Run], one: Run) -> str:
    return next(run.name for run in runs[:2] if run is not one)


def _blamed(runs: Sequence[Run], findings: list[Finding], noise: Noise) -> list[Finding]:
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
    if at.step not in common_steps(run, other):
        return 0.0
    found = (d for d in differences(run, other, at.step) if d.name == at.name)
    return next((d.distance if d.is_tensor else d.relative for d in found), 0.0)


def _sides(against: Sequence[str], made: Callable[[Side], Run]) -> tuple[Run, ...]:
    first = made(Side(PLAN))
    runs = [first if first.about.get("key") else replace(first, name=STOCK)]
    if first.about.get("key") and STOCK in against:
        runs.append(made(Side(STOCK)))
    if NO_OFFLOAD in against and first.about.get("offload"):
        runs.append(made(Side(NO_OFFLOAD)))
    if len(runs) == 1:  # there is no other run to compare with
        runs.append(replace(made(Side(PLAN)), name=AGAIN))
    return tuple(runs)


def _same(run: Run, other: Run) -> bool:
    return len(run.steps) == len(other.steps) and not any(
        differences(run, other, step) for step in common_steps(run, other)
    )
