"""Test of `tune verify`, which compares training under ebbtide with stock DeepSpeed.

    python -m studies.verify --json verify.json

`tune verify` must find defects that are put into training and name them, and accept correct runs.
The defects are put into engines of stock DeepSpeed on one and two ranks, with ZeRO-2 and ZeRO-3.

Each defect is judged in two ways. First, its run is compared with runs that must have the same
bits, as ebbtide and stock DeepSpeed must. Second, its run is compared with another implementation of
AdamW, and the size of the difference is judged. If 16 bits would hide the defect, fp32 is used.

Correct runs of other model shapes must be accepted. `tune verify` also runs on versions of DeepSpeed that are known to
be wrong, if `scripts/compat.sh` has installed them. The study takes under 10 minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from ebbtide.tuner.verify.judge import Finding
from rich.console import Console

from studies.bench.console import study_parser, tables
from studies.bench.record import write_record
from studies.verify.judging import Case, Group
from studies.verify.rounds import ROUNDS
from studies.verify.versions import known_versions

STAGES, RANKS = (2, 3), (1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("verify", __doc__, required=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument(
        "--rounds",
        nargs="+",
        choices=ROUNDS,
        default=list(ROUNDS),
        help="groups of artificial defects to test with (default: all groups). The study puts each defect into a "
        "training run, and checks that tune verify finds it",
    )
    parser.add_argument("--no-overhead", action="store_true")
    parser.add_argument("--no-versions", action="store_true", help="test only the installed version of DeepSpeed")
    options = parser.parse_args(arguments)
    console, overheads = Console(), {}
    cases: list[Case] = []
    right: list[dict[str, Any]] = []
    for stage in options.stages:
        for ranks in options.ranks:
            judged = trained(stage, ranks, options.rounds, cases, right)
            console.print(
                f"ZeRO-{stage}, {ranks} rank(s): tune verify judged {judged} pairs of training runs. Either both runs "
                "of a pair are correct, or this study has put a defect into one of them."
            )
        if not options.no_overhead:
            overheads[f"zero{stage}"] = overhead_pct(stage)
    versions = [] if options.no_versions else known_versions()
    figures = summary(cases, right, overheads, versions)
    show(figures, console)
    if options.json:
        write_record(options.json, "verify", figures)
    return int(figures["found"] != figures["seeded"] or figures["false_alarms"] > 0)


def trained(stage: int, ranks: int, rounds: Sequence[str], cases: list[Case], right: list[dict[str, Any]]) -> int:
    """Train one group of runs, with and without deliberate defects in ebbtide's code. Judge each run by `tune
    verify`, and return the number of judgements.

    Args:
        stage: ZeRO stage of the group.
        ranks: Number of ranks of the group.
        rounds: Names of the groups of defects to train with (keys of `ROUNDS`).
        cases: List to which the judgements of runs with a defect are appended.
        right: List to which the judgements of runs without a defect are appended.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as scratch:
        expected = _launch(stage, ranks, Path(scratch), "--rounds", *rounds)
        group = Group(Path(scratch), stage, ranks, expected)
        found = list(group.cases())
        fine = [
            {"right": name, "stage": stage, "ranks": ranks, **verdict_of(finding)} for name, finding in group.right()
        ]
    cases += found
    right += fine
    return len(found) + len(fine)


def verdict_of(finding: Finding) -> dict[str, str]:
    """Return what `tune verify` says of two compared training runs: its verdict, and the first difference
    that it names.
    """
    first = finding.first
    said = "" if first is None else f"step {first.step}: {first.name}"
    return {"verdict": finding.verdict, "said": said}


def overhead_pct(stage: int) -> float:
    """Return how much longer a training step takes when `tune verify` records the step, in percent.

    The time is measured with one rank.
    """
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
    cases: Sequence[Case],
    right: Sequence[dict[str, Any]],
    overheads: dict[str, float],
    versions: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a summary of the test of `tune verify` as a dict.

    A judgement is the result of one use of `tune verify`. ``seeded`` is the number of judgements of runs with a known
    defect, including runs with versions of DeepSpeed known to be wrong. ``found`` is the number of ``seeded``
    judgements that report a defect. ``named_rightly`` is the fraction of ``seeded`` judgements that name the right
    step, tensor and run.
    """
    run = [row for row in versions if "skipped" not in row]
    wrong = [row for row in run if row["wrong"]]
    named = sum(case.named for case in cases) + sum(row["named"] for row in wrong)
    seeded = len(cases) + len(wrong)
    fine = [row["verdict"] == "defect" for row in right]
    fine += [row["found"] for row in run if not row["wrong"]]
    return {
        "seeded": seeded,
        "found": sum(case.found for case in cases) + sum(row["found"] for row in wrong),
        "named_rightly": named / seeded if seeded else 0.0,
        "right": len(fine),
        "false_alarms": sum(fine),
        "by_round": {name: _round(cases, name) for name in ROUNDS},
        "overhead_pct": max(overheads.values(), default=0.0),
        "overheads_pct": overheads,
        "versions": list(versions),
        "cases": [asdict(case) for case in cases],
        "right_pairs": list(right),
    }


def _round(cases: Sequence[Case], name: str) -> dict[str, int]:
    own = [case for case in cases if case.round == name]
    return {"seeded": len(own), "found": sum(case.found for case in own), "named": sum(case.named for case in own)}


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the results of the test of `tune verify`, and the runs that it judged wrongly."""
    missed = [case for case in figures["cases"] if not case["named"]]
    alarms = [row for row in figures["right_pairs"] if row["verdict"] == "defect"]
    console.print(*tables("verify", {**figures, "cases": missed, "right_pairs": alarms}))


if __name__ == "__main__":
    raise SystemExit(main())
