"""The judgements of `tune verify` on training runs with and without a known defect."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.tuner.verify.judge import Finding, Noise, judge
from ebbtide.tuner.verify.run import Run, read_run
from ebbtide.tuner.verify.sides import NO_OFFLOAD, PLAN, STOCK, compared

from studies.verify.defects import Defect
from studies.verify.rounds import ROUNDS
from studies.verify.shapes import KINDS, shapes_of

LATE = 2  # number of steps in which the effect of a defect may grow beyond rounding


@dataclass(frozen=True)
class Case:
    """The judgement of `tune verify` on one training run with a known defect.

    Attributes:
        round: Group of defects (a round of testing) to which the defect belongs.
        judged: Kind of comparison. ``bits``: with a run that must be equal. ``size``: with another implementation of
            Adam, allowing for rounding. ``no-offload``: with a run without offload that uses the same Adam.
        side: Run that has the defect: that of the plan, or that of stock DeepSpeed.
        found: True if the judgement is that there is a defect.
        named: True if the judgement names the defect's step and tensor, and blames the right run.
    """

    defect: str
    round: str
    stage: int
    ranks: int
    judged: str
    side: str
    found: bool
    named: bool
    said: str


class Group:
    """All training runs of one ZeRO stage and one number of ranks that were recorded for `tune verify` to judge."""

    def __init__(self, folder: Path, stage: int, ranks: int, expected: Mapping[str, Any]) -> None:
        self._folder, self._stage, self._ranks = folder, stage, ranks
        self._expected = expected

    def cases(self) -> Iterator[Case]:
        """Yield the judgements of `tune verify` on the recorded training runs that have an artificial defect.

        Each of these runs is compared bit by bit with a correct run. In about half of the comparisons, the run with the
        defect replaces the run under a plan, and in the others the run of DeepSpeed alone. For some defects, `tune
        verify` then also judges whether rounding can explain the size of the differences.
        """
        known = [(name, defect) for name, defects in ROUNDS.items() for defect in defects]
        for number, (name, defect) in enumerate(known):
            if defect.name in self._expected:
                yield self._by_bits(name, defect, PLAN if (number + self._ranks) % 2 else STOCK)
        for name, defect in known:
            if defect.by_size and defect.name in self._expected:
                yield self._by_size(name, defect)
                yield self._without_offload(name, defect)

    def right(self) -> Iterator[tuple[str, Finding]]:
        """Yield what `tune verify` finds in pairs of correct training runs, each finding with the name of the pair.

        Neither run of a pair has an artificial defect, so `tune verify` should find no defect.
        """
        stock, noise = self._run("stock", STOCK), self._noise("bf16")
        yield "plan", judge(self._run("plan", PLAN), stock, None, same_bits=True)
        yield "again", judge(self._run("again", "again"), stock, None, same_bits=True)
        yield "no-offload", judge(stock, self._run("no-offload", NO_OFFLOAD), noise, same_bits=False)
        yield "another Adam", judge(stock, noise.reference, noise, same_bits=False)
        fp32 = self._noise("fp32")
        yield "fp32", judge(self._run("fp32 stock", STOCK), fp32.reference, fp32, same_bits=False)
        for shape in shapes_of(self._stage):
            yield from self._right_shape(shape.name)

    def _right_shape(self, name: str) -> Iterator[tuple[str, Finding]]:
        stock, plan, torch, flipped = (
            self._run(f"{name}, {kind}", side)
            for kind, side in zip(KINDS, (STOCK, PLAN, NO_OFFLOAD, "flipped"), strict=True)
        )
        yield f"{name}, plan", judge(plan, stock, None, same_bits=True)
        noise = Noise(torch, (torch, flipped))
        yield f"{name}, another Adam", judge(stock, torch, noise, same_bits=False)

    def _by_bits(self, name: str, defect: Defect, side: str) -> Case:
        """Compare a run that has a defect with a correct run, bit by bit, and return what `tune verify` finds.

        `tune verify` compares a run under a plan with a run of stock DeepSpeed. ``side`` tells which of the two has the
        defect. In fp32, a correct run under a plan would have the same bits as a correct run of stock DeepSpeed. So if
        stock DeepSpeed has the defect in fp32, a correct run of stock DeepSpeed takes the place of the run under a
        plan.
        """
        wide = defect.dtype == "fp32"
        right = self._run("fp32 stock" if wide else "stock", STOCK)
        sides = {STOCK: right, PLAN: replace(right if wide else self._run("plan", PLAN), name=PLAN)}
        sides[side] = self._run(defect.folder, side)
        last = self._run("fp32 no-offload" if wide else "no-offload", NO_OFFLOAD)
        noise = Noise(last, (last, self._run(f"{defect.dtype} torch flipped", "flipped")))
        first, *_ = compared((sides[PLAN], sides[STOCK], last), noise)
        return self._case(name, defect, "bits", side, first, late=0)

    def _by_size(self, name: str, defect: Defect) -> Case:
        noise = self._noise(defect.dtype)
        run = self._run(defect.folder, STOCK)
        finding = judge(run, noise.reference, noise, same_bits=False)
        return self._case(name, defect, "size", STOCK, finding, late=LATE)

    def _without_offload(self, name: str, defect: Defect) -> Case:
        """Return what the command `tune verify` finds if it compares a run that has a defect with a run without
        offload.

        The two runs add up the gradient norm in different orders, so they may differ even without the defect.
        """
        wide = "fp32 " if defect.dtype == "fp32" else ""
        last = self._run(f"{wide}no-offload", NO_OFFLOAD)
        noise = Noise(last, (last, self._run(f"{wide}no-offload flipped", "flipped")))
        run = self._run(defect.folder, STOCK)
        finding = judge(run, last, noise, same_bits=False)
        return self._case(name, defect, "no-offload", STOCK, finding, late=LATE)

    def _case(self, name: str, defect: Defect, judged: str, side: str, finding: Finding, late: int) -> Case:
        known, first = self._expected[defect.name], finding.first
        found = finding.verdict == "defect"
        named = (
            found
            and first is not None
            and known["step"] <= first.step <= known["step"] + late
            and first.name in known["names"]
            and finding.off == side
        )
        said = "" if first is None else f"step {first.step}: {first.name}, off: {finding.off}"
        return Case(defect.name, name, self._stage, self._ranks, judged, side, found, named, said)

    def _noise(self, dtype: str) -> Noise:
        reference, *others = (self._run(f"{dtype} torch{kind}", NO_OFFLOAD) for kind in ("", " again", " flipped"))
        return Noise(reference, tuple(others))

    def _run(self, folder: str, name: str) -> Run:
        run = read_run(self._folder / folder, name)
        assert run is not None, f"{self._folder / folder} must hold a run"
        return replace(run, name=name)
