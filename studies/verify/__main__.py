"""Test of `tune verify`, which compares training under ebbtide with stock DeepSpeed.

    python -m studies.verify --json verify.json

`tune verify` must find defects that are put into training and name their step and tensor, and find no difference
between correct runs. The defects are put into engines of stock DeepSpeed on one and two ranks, with ZeRO-2 and ZeRO-3.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from ebbtide.tuner.verify.comparison import compare
from ebbtide.tuner.verify.run import RecordedRun, read_run
from rich.console import Console

from studies.bench.console import study_parser, tables
from studies.bench.record import write_record
from studies.verify.shapes import shapes_of

STAGES, RANKS = (2, 3), (1, 2)


@dataclass(frozen=True)
class JudgedDefect:
    """The judgement of `tune verify` on one training run with a known defect.

    Attributes:
        found: True if the run differs from stock DeepSpeed's.
        named: True if the first difference is the defect's step and tensor.
    """

    defect: str
    stage: int
    ranks: int
    found: bool
    named: bool
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("verify", __doc__, required=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--no-overhead", action="store_true")
    options = parser.parse_args(arguments)
    console, overheads = Console(), {}
    cases: list[JudgedDefect] = []
    right: list[dict[str, Any]] = []
    for stage in options.stages:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as scratch:
                expected = _launch(stage, ranks, Path(scratch))
                cases += judged(Path(scratch), stage, ranks, expected)
                right += right_pairs(Path(scratch), stage, ranks)
            console.print(f"ZeRO-{stage}, {ranks} rank(s): {len(cases)} runs with a defect, {len(right)} without")
        if not options.no_overhead:
            overheads[f"zero{stage}"] = overhead_pct(stage)
    figures = summary(cases, right, overheads)
    show(figures, console)
    if options.json:
        write_record(options.json, "verify", figures)
    return int(figures["found"] != figures["seeded"] or figures["false_alarms"] > 0)


def judged(folder: Path, stage: int, ranks: int, expected: dict[str, Any]) -> list[JudgedDefect]:
    """Compare each recorded run with a defect with stock DeepSpeed's, and return what was found.

    Args:
        expected: Step and names of the values in which each defect shows first, by the name of the defect.
    """
    stock, cases = _run(folder, "stock"), []
    for defect, known in expected.items():
        first = compare(_run(folder, defect), stock).first
        named = first is not None and first.step == known["step"] and first.name in known["names"]
        said = "" if first is None else f"step {first.step}: {first.name}"
        cases.append(JudgedDefect(defect, stage, ranks, first is not None, named, said))
    return cases


def right_pairs(folder: Path, stage: int, ranks: int) -> list[dict[str, Any]]:
    """Compare the recorded runs under a plan with those of stock DeepSpeed. Return the verdicts."""
    shapes = [("plan", "stock"), ("again", "stock")]
    shapes += [(f"{shape.name}, plan", f"{shape.name}, stock") for shape in shapes_of(stage)]
    rows = []
    for name, stock in shapes:
        verdict = compare(_run(folder, name), _run(folder, stock)).verdict
        rows.append({"right": name, "stage": stage, "ranks": ranks, "verdict": verdict})
    return rows


def _run(folder: Path, name: str) -> RecordedRun:
    run = read_run(folder / name, name)
    assert run is not None, f"{folder / name} must hold a run"
    return replace(run, name=name)


def overhead_pct(stage: int) -> float:
    """Return how much longer a training step takes when `tune verify` records the step, in percent."""
    # The time is measured with one rank.
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as scratch:
        return float(_launch(stage, 1, Path(scratch), "--overhead")["overhead_pct"])


def _launch(stage: int, ranks: int, out: Path, *more: str) -> Any:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={port}",
        "-m",
        "studies.verify.training",
        f"--stage={stage}",
        f"--out={out}",
        *more,
    ]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": threads}
        )
    finally:
        remove_shared_buffers(port)
    if not (out / "expected.json").exists():
        raise RuntimeError(f"the runs of ZeRO-{stage} failed: {done.stderr[-3000:]}")
    return json.loads((out / "expected.json").read_text())


def summary(
    cases: Sequence[JudgedDefect], right: Sequence[dict[str, Any]], overheads: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of the study: of ``seeded`` runs with a defect, ``found`` differ from stock's, and for the
    fraction ``named_rightly`` the first difference is the defect's step and tensor.
    """
    named = sum(case.named for case in cases)
    return {
        "seeded": len(cases),
        "found": sum(case.found for case in cases),
        "named_rightly": named / len(cases) if cases else 0.0,
        "right": len(right),
        "false_alarms": sum(row["verdict"] != "identical" for row in right),
        "overhead_pct": max(overheads.values(), default=0.0),
        "overheads_pct": overheads,
        "cases": [asdict(case) for case in cases],
        "right_pairs": list(right),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the results of the test of `tune verify`, and the runs that it judged wrongly."""
    missed = [case for case in figures["cases"] if not case["named"]]
    alarms = [row for row in figures["right_pairs"] if row["verdict"] != "identical"]
    console.print(*tables("verify", {**figures, "cases": missed, "right_pairs": alarms}))


if __name__ == "__main__":
    raise SystemExit(main())
