"""The tables and texts that ebbtide's demo prints."""

from collections.abc import Mapping
from pathlib import Path

from ebbtide.simulator import Machine, Placement, Plan, Quantity, Workload
from ebbtide.tuner.answer.verdict import role_of
from rich.table import Table

from studies.bench.phase_clock import PHASES
from studies.demo.crash import Crash
from studies.demo.results import DemoRun

_FILES = {
    "machine.json": "what this machine can do, every rate with its spread",
    "workload.json": "the profiled iteration: layers, subgroups, memory",
    "plan.json": "the plan, its prediction, and every alternative that it beat",
    "toggled.json": "the same plan with early updates where it has none, or without them",
    "trace.json": "predicted and measured timeline, for ui.perfetto.dev; timeline.png: a picture",
    "stock_vs_plan.png": "measured and predicted phase times; memory.png: over one iteration",
    "summary.json": "the table of step 4 as JSON, with versions",
}
SHOWN_ALTERNATIVES = 4  # plan.json has all alternatives


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def machine(measured: Machine) -> Table:
    """Return a table of the most important bandwidths and update speeds of a machine, as the demo has measured them.

    The file machine.json has all measured values, with their spreads.
    """
    table = _table("", "measured")
    device = "device" if measured.device_kind == "cuda" else f"{measured.device_kind} device"
    ways = (measured.h2d_bytes_per_s, measured.d2h_bytes_per_s)
    adam = (measured.host_adam_params_per_s, measured.stock_host_adam_params_per_s)
    rows: list[tuple[str, tuple[Quantity, ...], str]] = [
        (f"copies to the {device}, and back", ways, "GB/s"),
        ("host memory, reads and writes", (measured.dram_bytes_per_s,), "GB/s"),
        ("Adam on the host: ebbtide's, stock's", adam, "G params/s"),
        (f"Adam on the {device}", (measured.device_adam_params_per_s,), "G params/s"),
        ("storage, made durable", (measured.storage_write_bytes_per_s,), "GB/s"),
    ]
    for name, quantities, unit in rows:
        table.add_row(name, ", ".join(f"{q.median / 1e9:.2f}" for q in quantities) + f" {unit}")
    return table


def doubts(measured: Machine, path: Path) -> str:
    """Return one line that tells how many of the machine's measured bandwidths and compute speeds were unsteady, or ""
    if none was.
    """
    if not measured.warnings:
        return ""
    count = len(measured.warnings)
    were = "was" if count == 1 else "were"
    return f"{count} of these {were} unsteady (a busy machine?): {path} says which"


def workload(profiled: Workload) -> str:
    """Return one line with the size of the demo's model, its measured phase times and its peak of memory."""
    peak = max((max(p.device_bytes, p.host_bytes) for p in profiled.memory_curve), default=0)
    memory = f", memory peak {peak / 2**20:.0f} MiB" if peak else ""
    return (
        f"{profiled.params / 1e6:.1f} M parameters in {len(profiled.layers)} layers and "
        f"{len(profiled.subgroups)} subgroups: forward {profiled.forward_s * 1e3:.0f} ms, backward "
        f"{profiled.backward_s * 1e3:.0f} ms{memory}"
    )


def plan(chosen: Plan) -> Table:
    """Return a table of predicted iteration times: of the demo's plan, of other strategies, and of stock DeepSpeed."""
    table = _table("strategy", "predicted iteration", "forward", "backward", "step")
    ordered = sorted(chosen.alternatives, key=lambda p: p.iteration_s)
    stock = [p for p in ordered if role_of(p.strategy) == "stock"]
    others = [p for p in ordered if p not in stock][: SHOWN_ALTERNATIVES - len(stock)]
    shown = sorted(others + stock, key=lambda p: p.iteration_s)
    predictions = ([chosen.prediction] if chosen.prediction else []) + shown
    for number, p in enumerate(predictions):
        name = f"[bold]{p.strategy} (chosen)[/bold]" if number == 0 else p.strategy
        cells = [p.iteration_s, p.forward_s, p.backward_s, p.step_s]
        table.add_row(name, *(f"{seconds * 1e3:.0f} ms" for seconds in cells))
    kinds: tuple[Placement, ...] = ("host", "device", "resident")
    counts = [f"{chosen.count(kind)} {kind}" for kind in kinds if chosen.count(kind)]
    table.caption = "subgroups: " + ", ".join(counts)
    if len(ordered) > len(shown):
        table.caption += f"; {len(ordered) - len(shown)} slower or lesser ones are in plan.json"
    table.caption_justify = "left"
    return table


def times(columns: Mapping[str, Mapping[str, float]], label: str) -> Table:
    """Return a table of training times, with a row per training phase and a column per run or prediction.

    The last column is the speed-up of the plan over stock DeepSpeed.
    """
    table = _table("per iteration", *columns, "speed-up")
    for phase in (*PHASES, "iteration"):
        cells = [f"{row[phase] * 1e3:.0f} ms" for row in columns.values()]
        ratio = columns["stock"][phase] / columns["plan"][phase]
        table.add_row(phase, *cells, f"{ratio:.2f}x", style="bold" if phase == "iteration" else "")
    table.caption = label
    table.caption_justify = "left"
    return table


def early_updates(plan: Plan, times: Mapping[str, float], without: Mapping[str, float], run: DemoRun) -> str:
    """Return one line on how early updates change the time of an iteration, measured and predicted."""
    if not any(plan.updated_early):
        return "early updates: none are possible under this plan"
    shown = [f"{times[k] * 1e3:.0f} ms {k} with them, {without[k] * 1e3:.0f} ms without" for k in times]
    total = run.first_step + len(run.losses)
    return (
        f"early updates (before the gradient norm is known): {sum(plan.updated_early)} of {len(plan.ways)} subgroups. "
        f"Iteration: {'; '.join(shown)}. {run.clipped} of {total} steps clipped: their early updates "
        "were redone, or had paused."
    )


def predictions(times: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line that says what the demo's predictions are based on.

    The line also repeats the iteration times that were predicted before the runs.
    """
    shown = [
        f"{name.partition(',')[0]} {row['iteration'] * 1e3:.0f} ms" for name, row in before.items() if name in times
    ]
    return (
        "medians; predictions rest on the machine's rates and on steps of stock that were profiled "
        f"in between (before the runs: {', '.join(shown)})"
    )


def crash(hit: Crash) -> str:
    """Return one line on the killed training run: how much of a checkpoint was on disk, and what was committed."""
    share = hit.written_bytes / hit.checkpoint_bytes
    return (
        f"killed with {share:.0%} of the next checkpoint on disk ({hit.written_bytes / 2**20:.0f} "
        f"of {hit.checkpoint_bytes / 2**20:.0f} MiB); committed and still named by latest: "
        f"{hit.committed}"
    )


def files(folder: Path) -> Table:
    """Return a table of the files in the demo's folder, with the purpose of each file."""
    table = _table("file", "what it is")
    table.columns[1].justify = "left"
    for name, purpose in _FILES.items():
        if (folder / name).exists():
            table.add_row(name, purpose)
    return table


def what_next(folder: Path) -> str:
    """Return the text with which the demo suggests next steps to the user."""
    return (
        "\nNext: [bold]make serve[/bold] opens a page with this machine, plan and run: move a "
        "slider, see what it would change.\n"
        f"      tune report {folder}/plan.json --run {folder}/trace.json -o report.html\n"
        "      your own training: docs/quickstart.md"
    )
