"""The demo's pictures: an iteration's timeline, its memory use, and times with stock DeepSpeed and under the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.simulator import Machine, MemoryPoint, OpKind, Timeline, Workload, drawing

from studies.bench.phase_clock import PHASES
from studies.bench.pictures import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PHASE_COLOURS = {**drawing.PHASES, "other": drawing.COLOURS["idle"]}
_WHITE_TEXT = {"forward", "step"}


def machine_label(machine: Machine) -> str:
    """Return a label for the demo's pictures that names the machine on which the times were measured."""
    where = machine.device_name or machine.name
    if machine.device_kind == "cuda":
        return where
    return f"CPU-only machine ({machine.cpu_cores} cores), no GPU figures"


def draw_timelines(predicted: Timeline, measured: Timeline, path: Path, label: str, iterations: int = 2) -> None:
    """Draw the ops of the last training steps over time: predicted ones above, measured ones below."""
    pair = [last_iterations(timeline, iterations) for timeline in (predicted, measured)]
    longest = max(timeline.makespan_s for timeline in pair)
    scale = 1e3 if longest < 2 else 1.0
    with picture(path, 2, 1, dpi=140, figsize=(13, 6)) as (figure, axes):
        for ax, timeline in zip(axes, pair, strict=True):
            timeline.plot(ax)
            ax.set_xlim(0, 1.02 * longest * scale)  # so that the last bar does not look cut
            ax.set_xlabel("time (ms)" if longest < 2 else "time (s)")
        figure.suptitle(f"{iterations} training iterations under the plan: {label}", fontsize=12)


def last_iterations(timeline: Timeline, count: int) -> Timeline:
    """Return the last ``count`` completed iterations of a timeline, shifted to begin at second 0."""
    return _cut(timeline, _ended(timeline)[-count:])


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """Return the timeline of median length among several, so that one from a disturbed machine is not shown."""
    return sorted(timelines, key=lambda timeline: timeline.makespan_s)[(len(timelines) - 1) // 2]


def _ended(timeline: Timeline) -> list[int]:
    return sorted({s.iteration for s in timeline.spans if s.kind == OpKind.STEP_END})


def _cut(timeline: Timeline, iterations: list[int]) -> Timeline:
    spans = [s for s in timeline.spans if s.iteration in iterations]
    origin_s = min((s.start_s for s in spans), default=0.0)
    moved = tuple(replace(s, start_s=s.start_s - origin_s, end_s=s.end_s - origin_s) for s in spans)
    return replace(timeline, spans=moved, memory=())


def draw_memory(workload: Workload, machine: Machine, path: Path) -> None:
    """Draw the device and host memory in use over one profiled iteration, with the training phases shaded."""
    with picture(path, dpi=140, figsize=(9, 4.2)) as (_, ax):
        _draw_memory(ax, workload, machine)


def _draw_memory(ax: Axes, workload: Workload, machine: Machine) -> None:
    curve = workload.memory_curve
    times = [point.t_s * 1e3 for point in curve]
    for start, end, phase in _stretches(curve):
        ax.axvspan(start * 1e3, end * 1e3, color=_PHASE_COLOURS[phase], alpha=0.22, linewidth=0)
        if end - start > 0.04 * (curve[-1].t_s - curve[0].t_s):
            ax.text(
                (start + end) * 500, 0.97, phase, ha="center", va="top", fontsize=9, transform=ax.get_xaxis_transform()
            )
    unified = machine.unified_memory
    series = {"process" if unified else "device": [p.device_bytes for p in curve]}
    if not unified:
        series["host"] = [p.host_bytes for p in curve]
    for (name, values), colour in zip(series.items(), ["#222222", "#8e5ea2"], strict=False):
        if any(values):
            ax.plot(times, [v / 2**20 for v in values], color=colour, label=name, linewidth=1.6)
    ax.set_xlabel("time in the iteration (ms)")
    ax.set_ylabel("memory in use (MiB)")
    ax.margins(x=0, y=0.25)
    ax.legend(frameon=False, loc="lower right")
    ax.set_title(
        f"memory with DeepSpeed alone, from which the plan is made: {machine_label(machine)}", loc="left", fontsize=10
    )


def _stretches(curve: Sequence[MemoryPoint]) -> list[tuple[float, float, str]]:
    result: list[tuple[float, float, str]] = []
    for point, following in pairwise(curve):
        if result and result[-1][2] == point.phase:
            result[-1] = (result[-1][0], following.t_s, point.phase)
        else:
            result.append((point.t_s, following.t_s, point.phase))
    return result


def draw_comparison(bars: Mapping[str, Mapping[str, float]], path: Path, label: str, verdict: str) -> None:
    """Draw one bar for each training run or prediction, stacked from the times of the training phases."""
    with picture(path, dpi=140, figsize=(9, 0.8 * len(bars) + 1.9)) as (_, ax):
        _draw_bars(ax, bars)
        ax.set_title(f"{verdict}\n{label}", loc="left", fontsize=10)


def _draw_bars(ax: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    longest = max(sum(row[phase] for phase in PHASES) for row in bars.values())
    for position, (name, row) in enumerate(bars.items()):
        left = 0.0
        for phase in PHASES:
            _bar(ax, position, left, row[phase], phase, longest, 0.5 if "predicted" in name else 1.0)
            left += row[phase] * 1e3
        ax.text(left, position, f" {row['iteration'] * 1e3:.0f} ms", va="center", fontsize=10)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1e3 * 1.12)
    ax.set_xlabel("median time of each phase, and of the whole iteration (ms)")
    ax.legend(handles=_phase_handles(), frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _bar(ax: Axes, row: int, left: float, seconds: float, phase: str, longest: float, opacity: float) -> None:
    ax.barh(row, seconds * 1e3, left=left, height=0.66, color=_PHASE_COLOURS[phase], alpha=opacity)
    if seconds > 0.06 * longest:
        white = phase in _WHITE_TEXT and opacity == 1.0
        ax.text(
            left + seconds * 500,
            row,
            f"{seconds * 1e3:.0f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if white else "black",
        )


def _phase_handles() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=_PHASE_COLOURS[phase], label=phase) for phase in PHASES]
