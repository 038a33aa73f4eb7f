"""The tables that the demo prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from simulator import Machine, Placement, Plan, Quantity, Workload
from studies.bench.phase_clock import PHASES
from studies.demo.crash import Crash

_FILES = {
    "machine.json": "what this machine can do, with spreads",
    "workload.json": "the profiled iteration: layers, subgroups, memory curve",
    "plan.json": "the plan, its prediction, and the alternatives it beat",
    "trace.json": "predicted and measured timeline; open it in ui.perfetto.dev",
    "timeline.png": "the same as a picture",
    "memory.png": "memory over one iteration",
    "stock_vs_plan.png": "measured and predicted phase times",
    "summary.json": "the table above as JSON, with versions",
}


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def machine(measured: Machine) -> Table:
    """Rates as median and interquartile range."""
    table = _table("", "median", "interquartile range", "unit")
    both = (measured.h2d_bytes_per_s.median + measured.d2h_bytes_per_s.median) / 1e9
    device = "device" if measured.device_kind == "cuda" else f"{measured.device_kind} device"
    rows: list[tuple[str, Quantity | None, float, str]] = [
        (f"copy host to {device}", measured.h2d_bytes_per_s, 1e9, "GB/s"),
        (f"copy {device} to host", measured.d2h_bytes_per_s, 1e9, "GB/s"),
        ("copy both ways at once", measured.duplex_factor, 1 / both, "GB/s"),
        ("host memory (triad)", measured.dram_bytes_per_s, 1e9, "GB/s"),
        ("host Adam, ebbtide", measured.host_adam_params_per_s, 1e9, "G params/s"),
        ("host Adam, stock", measured.stock_host_adam_params_per_s, 1e9, "G params/s"),
        (f"{device} Adam", measured.device_adam_params_per_s, 1e9, "G params/s"),
        ("storage write with fsync", measured.storage_write_bytes_per_s, 1e9, "GB/s"),
    ]
    for name, quantity, unit, unit_name in rows:
        if quantity is not None:
            spread = f"{quantity.q1 / unit:.2f} to {quantity.q3 / unit:.2f}"
            table.add_row(name, f"{quantity.median / unit:.2f}", spread, unit_name)
    return table


def doubts(measured: Machine, path: Path) -> str:
    """One line for all warnings of the measurement; empty if there are none."""
    if not measured.warnings:
        return ""
    return (
        f"{len(measured.warnings)} of these figures were unsteady while they were measured (a busy "
        f"machine?); {path} says which"
    )


def workload(profiled: Workload) -> Table:
    """Size, phase times and the memory peak of each phase."""
    table = _table("", "time", "memory peak")
    peaks: dict[str, int] = {}
    for point in profiled.memory_curve:
        used = max(point.device_bytes, point.host_bytes)
        peaks[point.phase] = max(peaks.get(point.phase, 0), used)
    times = {"forward": profiled.forward_s, "backward": profiled.backward_s}
    for phase in PHASES:
        taken = f"{times[phase] * 1e3:.0f} ms" if phase in times else ""
        peak = f"{peaks[phase] / 2**20:.0f} MiB" if phase in peaks else ""
        table.add_row(phase, taken, peak)
    table.caption = (
        f"{profiled.params / 1e6:.1f} M parameters in {len(profiled.layers)} layers and "
        f"{len(profiled.subgroups)} subgroups"
    )
    table.caption_justify = "left"
    return table


def plan(chosen: Plan) -> Table:
    """The plan's prediction above those of the alternatives."""
    table = _table("strategy", "predicted iteration", "forward", "backward", "step")
    predictions = ([chosen.prediction] if chosen.prediction else []) + sorted(
        chosen.alternatives, key=lambda p: p.iteration_s
    )
    for number, p in enumerate(predictions):
        name = f"[bold]{p.strategy} (chosen)[/bold]" if number == 0 else p.strategy
        cells = [p.iteration_s, p.forward_s, p.backward_s, p.step_s]
        table.add_row(name, *(f"{seconds * 1e3:.0f} ms" for seconds in cells))
    kinds: tuple[Placement, ...] = ("host", "device", "resident")
    counts = [f"{chosen.count(kind)} {kind}" for kind in kinds if chosen.count(kind)]
    table.caption = "subgroups: " + ", ".join(counts)
    table.caption_justify = "left"
    return table


def times(columns: Mapping[str, Mapping[str, float]], label: str) -> Table:
    """Phases as rows, runs and predictions as columns."""
    table = _table("median per iteration", *columns, "speed-up")
    for phase in (*PHASES, "iteration"):
        cells = [f"{row[phase] * 1e3:.0f} ms" for row in columns.values()]
        ratio = columns["stock"][phase] / columns["plan"][phase]
        table.add_row(phase, *cells, f"{ratio:.2f}x", style="bold" if phase == "iteration" else "")
    table.caption = label
    table.caption_justify = "left"
    return table


def crash(hit: Crash) -> str:
    """What was killed where."""
    share = hit.written_bytes / hit.checkpoint_bytes
    return (
        f"killed with {share:.0%} of the next checkpoint on disk ({hit.written_bytes / 2**20:.0f} "
        f"of {hit.checkpoint_bytes / 2**20:.0f} MiB); committed and still named by latest: "
        f"{hit.committed}"
    )


def files(folder: Path) -> Table:
    """The folder's files and what each is for."""
    table = _table("file", "what it is")
    table.columns[1].justify = "left"
    for name, purpose in _FILES.items():
        if (folder / name).exists():
            table.add_row(str(folder / name), purpose)
    return table


def what_next(folder: Path) -> str:
    """Where to look now."""
    return (
        "\nNext: [bold]make serve[/bold] opens a page with this machine, plan and run: move a "
        "slider, see what it would change.\n"
        f"      tune report {folder}/plan.json --run {folder}/trace.json -o report.html\n"
        '      your own training: "Three ways to use it" in README.md'
    )
