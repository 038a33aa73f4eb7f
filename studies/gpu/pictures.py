"""Pictures of the GPU suite's results, drawn from the suite's JSON files on any machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.bench.pictures import picture

Figures = dict[str, Any]
PHASES = {"forward": "#56b4e9", "backward": "#e69f00", "step": "#009e73"}


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
    if not result:
        raise SystemExit(
            f"--plot must be a folder with result files of `python -m studies.gpu --out DIR`, but {folder} has none"
        )
    return result


def _rows(record: Figures) -> list[Figures]:
    """Return the rows of one section's result, without the rows of runs that failed."""
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
    names = [row.get("name") or row["variant"] for row in rows]
    left = [0.0] * len(rows)
    for phase, colour in PHASES.items():
        widths = [1e3 * row[f"{phase}_s"] for row in rows]
        ax.barh(names, widths, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        label = f" {row['speedup']:.2f}x" if row.get("speedup") else ""
        label += "" if row.get("exact", True) else " (not exact)"
        ax.text(left[place], place, label, va="center", fontsize=8)
    ax.set_xlabel("ms per iteration")
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
            label=None if number else "predicted iteration",
        )
    ax.legend(frameon=False, fontsize=8, loc="lower right")


DRAWERS: dict[str, Callable[[Any, Figures], None]] = {"baseline": _baseline, "peers": _phases, "ablation": _phases}
