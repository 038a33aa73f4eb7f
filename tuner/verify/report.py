"""The result of ``tune verify`` (training compared with and without a plan) as text, and as JSON."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ebbtide.tuner.doctor.known_wrong import known_wrong
from ebbtide.tuner.verify.comparison import NO_OFFLOAD, RunComparison, Verification
from ebbtide.tuner.verify.differences import Difference
from ebbtide.tuner.verify.run import RecordedRun


def screen(result: Verification) -> list[str]:
    """Return the lines of text that `tune verify` prints about its result."""
    lines = [_headline(result.runs[0]), ""]
    lines += [_row(run) for run in result.runs]
    for finding in result.findings:
        lines += ["", *_finding(finding)]
    if any(finding.verdict == "nondeterministic" for finding in result.findings):
        lines += ["", f"torch names {', '.join(result.operations) or 'no operation'} as nondeterministic"]
    lines += [f"known: {line}" for line in _known(result)]
    return lines


def _headline(run: RecordedRun) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.about["versions"].items())
    stage = run.about.get("stage")
    kind = f"ZeRO-{stage}, {run.about['dtype']}, " if stage is not None else ""
    taken = len(run.steps) - 1
    fewer = f" (of {run.asked} asked for: the command ended)" if taken < run.asked else ""
    return f"{taken} steps{fewer} on {run.about['ranks']} rank(s), {kind}{versions}"


def _row(run: RecordedRun) -> str:
    last = run.steps[-1].scalars
    losses = [value for name, value in last.items() if name.startswith("loss")]
    shown = f"last loss {losses[-1]:.6g}" if losses else "no loss seen"
    norm = last.get("gradient norm")
    return f"{run.name:16} {shown}" + ("" if norm is None else f", gradient norm {norm:.6g}")


def _finding(finding: RunComparison) -> Iterator[str]:
    pair = f"{finding.side} against {finding.against}"
    first = finding.first
    if first is None:
        yield f"{pair}: identical, every bit of {finding.steps} steps"
        return
    where = f"step {first.step}: {first.name}" + (f" and {finding.also} more" if finding.also else "")
    if finding.verdict == "different":
        yield f"{pair}: DIFFERENT from {where}"
    else:
        yield f"{pair}: NOTHING CAN BE SAID, since the script differs from itself, from {where}"
    yield f"  {_size(first)}"
    yield from (f"  {line}" for line in finding.why)
    if finding.against == NO_OFFLOAD and finding.verdict == "different":
        yield "  without offload sums are made in another order: a small difference that grows slowly is rounding"


def _size(first: Difference) -> str:
    if not first.is_tensor:
        return f"{first.ours:.9g} against {first.theirs:.9g}: {_share(first.relative)} apart"
    if not math.isfinite(first.distance):
        return "not measurable (infinities, NaNs, or on one side only)"
    return f"{first.distance:.3g} apart (norm), {_share(first.relative)} of the change by updates"


def _share(value: float) -> str:
    return f"{value:.3%}" if value >= 1e-5 else f"{value:.2g}"


def _known(result: Verification) -> list[str]:
    about = result.runs[0].about
    version = about["versions"].get("deepspeed")
    if version is None or all(finding.first is None for finding in result.findings):
        return []
    return [str(row) for row in known_wrong(str(version), about.get("config") or {})]


def as_json(result: Verification) -> dict[str, Any]:
    """Return the result of ``tune verify`` as JSON data.

    ``right`` is true if the script trains correctly under its plan, false if not, and null if unknown. ``sides`` has
    the runs. ``findings`` has the result of each comparison, with the first difference between the two runs.
    """
    return {
        "right": result.right,
        "identical": all(f.verdict == "identical" for f in result.findings),
        "sides": [{"name": run.name, "steps": len(run.steps) - 1, **_facts(run)} for run in result.runs],
        "findings": [_plain(asdict(finding)) for finding in result.findings],
        "operations": list(result.operations),
        "known": _known(result),
    }


def _facts(run: RecordedRun) -> dict[str, Any]:
    return {key: run.about.get(key) for key in ("ranks", "stage", "dtype", "versions")}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
