"""What `tune verify` says of the study's runs, beside what is known of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from studies.verify.defects import Defect
from studies.verify.held_out import ALL
from tuner.verify.judge import Finding, Noise, judge
from tuner.verify.run import Run, read_run
from tuner.verify.sides import NO_OFFLOAD, PLAN, STOCK, compared

LATE = 2  # steps later than it was made, a defect may rise above rounding


@dataclass(frozen=True)
class Case:
    """One defect, judged.

    Attributes:
        judged: against the same ``bits``, or against another Adam's rounding, by ``size``.
        side: that has it.
        named: the step and tensor are those that it was put into, and the side is blamed.
    """

    defect: str
    stage: int
    ranks: int
    judged: str
    side: str
    found: bool
    named: bool
    said: str


class Group:
    """The runs of one ZeRO stage on some ranks."""

    def __init__(self, folder: Path, stage: int, ranks: int, expected: Mapping[str, Any]) -> None:
        self._folder, self._stage, self._ranks = folder, stage, ranks
        self._expected = expected

    def cases(self) -> Iterator[Case]:
        """Each defect under the plan or in stock, in turn, and then by its size."""
        for number, defect in enumerate(ALL):
            yield self._by_bits(defect, PLAN if (number + self._ranks) % 2 else STOCK)
        yield from (self._by_size(defect) for defect in ALL if defect.by_size)

    def right(self) -> Iterator[Finding]:
        """Of pairs in which nothing is wrong."""
        stock, noise = self._run("stock", STOCK), self._noise("bf16")
        yield judge(self._run("plan", PLAN), stock, None, same_bits=True)
        yield judge(self._run("again", "again"), stock, None, same_bits=True)
        yield judge(stock, self._run("no-offload", NO_OFFLOAD), noise, same_bits=False)
        yield judge(stock, noise.reference, noise, same_bits=False)
        fp32 = self._noise("fp32")
        yield judge(self._run("fp32 stock", STOCK), fp32.reference, fp32, same_bits=False)

    def _by_bits(self, defect: Defect, side: str) -> Case:
        sides = {STOCK: self._run("stock", STOCK), PLAN: self._run("plan", PLAN)}
        sides[side] = self._run(defect.name, side)
        last = self._run("no-offload", NO_OFFLOAD)
        noise = Noise(last, (last, self._run("bf16 torch flipped", "flipped")))
        first, *_ = compared((sides[PLAN], sides[STOCK], last), noise)
        return self._case(defect, "bits", side, first, late=0)

    def _by_size(self, defect: Defect) -> Case:
        noise = self._noise("bf16")
        run = self._run(defect.name, STOCK)
        finding = judge(run, noise.reference, noise, same_bits=False)
        return self._case(defect, "size", STOCK, finding, late=LATE)

    def _case(self, defect: Defect, judged: str, side: str, finding: Finding, late: int) -> Case:
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
        return Case(defect.name, self._stage, self._ranks, judged, side, found, named, said)

    def _noise(self, dtype: str) -> Noise:
        reference, *others = (
            self._run(f"{dtype} torch{kind}", NO_OFFLOAD) for kind in ("", " again", " flipped")
        )
        return Noise(reference, tuple(others))

    def _run(self, folder: str, name: str) -> Run:
        run = read_run(self._folder / folder, name)
        assert run is not None, f"{self._folder / folder} must hold a run"
        return replace(run, name=name)


def plain(case: Case) -> dict[str, Any]:
    return asdict(case)
