"""Pictures of the GPU suite's results, drawn from the suite's JSON files on any machine."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbtide.simulator import OpKind
from ebbtide.simulator.drawing import PHASES, draw_spans
from ebbtide.tuner.service.report import read_timelines

from studies.bench.pictures import picture

Figures = dict[str, Any]
NAMES = {
    "stock": "DeepSpeed alone",
    "stock_again": "DeepSpeed alone, again",
    "stock_offload_param": "DeepSpeed alone, offload_param cpu",
}


def draw_parts(folder: Path) -> list[Path]:
    """Draw a picture for each usable result file in a folder of the GPU suite, and return the pictures' paths.

    A result file is usable if it records a measured iteration time and no failure.

    Raises:
        SystemExit: The folder has no usable result file.
    """
    result = []
    for part, draw in DRAWERS.items():
        path = folder / f"{part}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        if "failed" in record or not _rows(record):
            continue
        result.append(_drawn(record, draw, path.with_suffix(".png")))
    if (trace := folder / "measured_trace.json").exists():
        result.append(_drawn_extremes(trace))
    if not result:
        raise SystemExit(
            f"--plot must be a folder with result files of `python -m studies.gpu --out DIR`, but {folder} has none"
        )
    return result


def _drawn_extremes(trace: Path) -> Path:
    (timeline,) = read_timelines(trace.read_text())
    forwards = [s for s in timeline.spans if s.kind == OpKind.FORWARD]
    starts = sorted(min(s.start_s for s in forwards if s.iteration == n) for n in {s.iteration for s in forwards})
    whole = sorted(pairwise(starts), key=lambda pair: pair[1] - pair[0])
    path = trace.with_suffix(".png")
    with picture(path, 2, 1, figsize=(11, 7.2), sharex=True) as (_, axes):
        for ax, kind, (start_s, end_s) in zip(axes, ("a fast", "a slow"), (whole[0], whole[-1]), strict=True):
            inside = [s for s in timeline.spans if s.start_s < end_s and s.end_s > start_s]
            cut = [replace(s, start_s=max(s.start_s, start_s), end_s=min(s.end_s, end_s)) for s in inside]
            draw_spans(cut, f"NVIDIA H200, measured: {kind} iteration, {1e3 * (end_s - start_s):.0f} ms", ax)
        axes[0].set_xlim(0, 1e3 * (whole[-1][1] - whole[-1][0]))
    return path


def _rows(record: Figures) -> list[Figures]:
    return [row for row in record.get("rows") or [] if row.get("iteration_s")]


def _drawn(record: Figures, draw: Callable[[Any, Figures], None], path: Path) -> Path:
    with picture(path, figsize=(8, 4.2)) as (figure, ax):
        draw(ax, record)
        figure.suptitle(_where(record), fontsize=9, color="0.35")
    return path


def _where(record: Figures) -> str:
    if record.get("device_kind") == "emulated":
        return "emulated device: no GPU figures"
    return str(record.get("machine", {}).get("gpu") or "no GPU")


def _phases(ax: Any, record: Figures) -> None:
    rows = sorted(_rows(record), key=lambda row: row["iteration_s"])
    names = [NAMES.get(name, name) for row in rows for name in [row.get("name") or row["variant"]]]
    left = [0.0] * len(rows)
    for phase, colour in PHASES.items():
        widths = [1e3 * row[f"{phase}_s"] for row in rows]
        ax.barh(names, widths, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        label = f" {row['speedup']:.2f}x" if row.get("speedup") else ""
        label += "" if row.get("exact", True) else " (not exact)"
        ax.text(left[place], place, label, va="center", fontsize=8)
    ax.set_xlabel("measured time of an iteration (ms), median")
    ax.margins(x=0.15)
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def _baseline(ax: Any, record: Figures) -> None:
    _phases(ax, record)
    rows = sorted(_rows(record), key=lambda row: row["iteration_s"])
    predicted = {name: f"{name}_predicted_s" for name in ("stock", "stock_offload_param")} | {"ebbtide": "predicted_s"}
    marks = [
        (record[key], place) for place, row in enumerate(rows) if record.get(key := predicted.get(row["name"], ""))
    ]
    for number, (seconds, place) in enumerate(marks):
        ax.plot(
            [1e3 * seconds] * 2,
            [place - 0.45, place + 0.45],
            color="black",
            linewidth=2,
            label=None if number else "predicted for the iteration",
        )
    ax.legend(frameon=False, fontsize=8, loc="lower right")


DRAWERS: dict[str, Callable[[Any, Figures], None]] = {"baseline": _baseline, "peers": _phases, "ablation": _phases}
