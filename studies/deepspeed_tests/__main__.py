"""DeepSpeed's own tests, run with a plan of ebbtide attached to the engines that they build.

    pip install --target PYTEST 'pytest<8.4'
    python -m studies.deepspeed_tests --deepspeed-source DIR --pytest PYTEST --folder OUT --json P

DIR is a checkout of DeepSpeed's source at the installed version. No file of it is copied or changed, only the
function `deepspeed.initialize` is wrapped. If a test's config has ZeRO, the wrapper offloads the optimizer to the CPU
and attaches a plan. If ebbtide refuses to attach a plan to an engine that it should support, the test fails. For
comparison, the tests also run without a plan.

The study takes hours. If it is started again with the same --folder, it continues.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from studies.bench.console import publish, study_parser
from studies.deepspeed_tests import ARMS, UNDER_A_PLAN
from studies.deepspeed_tests.plugin import Orders, lines

FOLDERS = ("unit/checkpoint", "unit/runtime/zero")
HANGS_S = 150
OURS = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("deepspeed_tests", __doc__, required=False)
    parser.add_argument("--deepspeed-source", type=Path, required=True)
    parser.add_argument("--pytest", type=Path, help="folder with an installed pytest that DeepSpeed's tests can use")
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the results. Tests with a result there are not run again"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--for-s", type=float, default=1e9, help="seconds after which no further test begins")
    parser.add_argument("-k", default="", help="run only tests that match this expression, as with pytest -k")
    parser.add_argument(
        "files",
        nargs="*",
        default=FOLDERS,
        help="test files or folders to run, relative to tests/ of DeepSpeed's source",
    )
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + options.for_s
    for arm in options.arms:
        for file in test_files(options.deepspeed_source / "tests", options.files):
            if time.monotonic() < until_s:
                run_file(options, arm, file, until_s - time.monotonic())
    figures = summary(lines(options.folder / "results.jsonl"), lines(options.folder / "notes.jsonl"))
    publish("deepspeed_tests", options.json, figures)
    return int(any(row["failed"] for row in figures["files"] if row["arm"] in UNDER_A_PLAN))


def test_files(root: Path, named: Iterable[str]) -> list[str]:
    found = [path for name in named for path in sorted((root / name).rglob("test_*.py"))]
    found += [root / name for name in named if name.endswith(".py")]
    return [str(path.relative_to(root)) for path in found]


def run_file(options: argparse.Namespace, arm: str, file: str, for_s: float) -> None:
    """Run one file of DeepSpeed's own tests with pytest, with one of the compared kinds of engine.

    If a test that hangs ends pytest early, pytest is started again for the remaining tests.

    Args:
        arm: Kind of engine, such as ``stock`` (DeepSpeed alone, with the optimizer on the CPU) or ``auto`` (under
            ebbtide's plan ``auto``).
    """
    orders = Orders(arm, str(options.folder.resolve()), for_s, commit())
    plugins = ["no:cacheprovider", "no:xdist", "no:schemathesis", "studies.deepspeed_tests.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header"]
    command += [word for plugin in plugins for word in ("-p", plugin)]
    command += ["-k", options.k, file] if options.k else [file]
    log = options.folder / f"{arm}-{file.replace('/', '_')}.log"
    while True:
        before = len(lines(orders.results))
        with log.open("a") as output:
            done = subprocess.run(
                command,
                cwd=options.deepspeed_source / "tests",
                env=environment(options, orders),
                stdout=output,
                stderr=output,
                check=False,
            )
        last = lines(orders.results)[before:][-1:]
        if done.returncode != 1 or not last or "outcome" in last[0]:
            return


@cache
def commit() -> str:
    """Return the git commit of ebbtide's checkout, with ``-dirty`` if files have changed. Empty outside a checkout."""
    command = ["git", "-C", str(OURS), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def environment(options: argparse.Namespace, orders: Orders) -> dict[str, str]:
    """Return the environment variables with which pytest runs DeepSpeed's tests.

    Without a GPU, tests run with two ranks on the CPU. Processes are not reused by later tests.
    """
    paths = [options.pytest, OURS, options.deepspeed_source / "tests"]
    made = {
        **os.environ,
        **orders.to_environment(),
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in paths if path),
        "DS_UNITTEST_TIMEOUT": str(HANGS_S),
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes, because the tests fork
    }
    made.pop("PYTEST_ADDOPTS", None)  # set by the pytest that tests this study
    if not Path("/proc/driver/nvidia").exists():
        made |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_SIZE": "2"}
    return made


# -- what it comes to ----------------------------------------------------------------------------


def summary(results: list[dict[str, Any]], notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a dict of the results of DeepSpeed's tests by file and variant, with a list of the failed tests.

    A variant is for example stock DeepSpeed, or the plan ``auto``. Only tests that pass with stock
    DeepSpeed are counted.
    """
    ended = {(r["arm"], r["case"]): r for r in results if "outcome" in r}
    passed = sorted(case for (arm, case), r in ended.items() if (arm, r["outcome"]) == PASSED)
    files = []
    for arm in [arm for arm in ARMS if any(key[0] == arm for key in ended)]:
        for file in sorted({case.split("::")[0] for _, case in ended}):
            cases = [case for case in passed if case.startswith(file + "::")]
            files.append(row(arm, file, cases, ended, notes))
    commits = {arm: sorted({r["commit"] for (a, _), r in ended.items() if a == arm}) for arm in ARMS}
    return {"commits": commits, "files": files, "total": total(files), "failures": failures(passed, ended)}


PASSED = ("stock", "passed")


def row(arm: str, file: str, cases: list[str], ended: dict[Any, Any], notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a dict of the results of one file of DeepSpeed's tests in one variant, such as the plan ``auto``.

    ``attached`` counts the passed tests in which at least one engine had a plan. ``stepped`` counts the
    passed tests in which an engine also took a step under its plan.
    """
    outcomes = {case: ended.get((arm, case), {}).get("outcome", "not run") for case in cases}
    good = {case for case, outcome in outcomes.items() if outcome == "passed"}
    # The start of the complete run, not of one that was cut off.
    begun_s = {case: ended[arm, case]["begun_s"] for case in good}
    mine = [note for note in notes if note["arm"] == arm and note["case"] in good]
    mine = [note for note in mine if note["at_s"] >= begun_s[note["case"]]]
    by = {e: {n["case"] for n in mine if n["event"] == e} for e in ("attached", "stepped", "left")}
    left = {note["case"]: note["why"] for note in mine if note["event"] == "left"}
    without = good - by["attached"]
    return {
        "arm": arm,
        "file": file,
        "stock_passes": len(cases),
        "passed": len(good),
        "attached": len(by["attached"]),
        "stepped": len(by["stepped"]),
        "without_a_plan": dict(Counter(left.get(c, "no engine with ZeRO") for c in without)),
        "failed": sum(outcome == "failed" for outcome in outcomes.values()),
        "not_run": sum(outcome in ("not run", "skipped") for outcome in outcomes.values()),
    }


def total(files: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    keys = ("stock_passes", "passed", "attached", "stepped", "failed", "not_run")
    arms = {row["arm"] for row in files}
    return {arm: {key: sum(row[key] for row in files if row["arm"] == arm) for key in keys} for arm in sorted(arms)}


def failures(passed: list[str], ended: dict[Any, Any]) -> list[dict[str, str]]:
    """Return a list of the DeepSpeed tests that pass with stock DeepSpeed and fail under a plan, with the error."""
    found = []
    for (arm, case), result in ended.items():
        if arm in UNDER_A_PLAN and case in passed and result["outcome"] == "failed":
            found.append({"arm": arm, "case": case, "why": result["why"][-300:]})
    return found


if __name__ == "__main__":
    raise SystemExit(main())
