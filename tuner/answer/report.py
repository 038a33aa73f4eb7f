"""The text output of the ``tune`` commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, get_args

from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import RATES
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.schedule import KINDS, Memory
from ebbtide.tuner.answer.verdict import BY_KIND, headline, role_of
from ebbtide.tuner.quantities import least_text, seconds_text
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ebbtide.simulator.machine import Machine
    from ebbtide.simulator.plan import Plan, Prediction
    from ebbtide.simulator.workload import Workload

MEMORIES: tuple[Memory, ...] = get_args(Memory)
LONG_S = 1.0  # a table shows seconds if its first iteration takes at least this long, otherwise milliseconds
UNITS = {"bytes": "GB/s", "params": "G params/s"}  # in billions per second


def wide_console() -> Console:
    """Return a console as wide as the terminal or COLUMNS says, and otherwise 120 columns wide."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def show_machine(machine: Machine, console: Console) -> None:
    """Print the rates of a machine (such as bandwidths) with their quartiles and sources, and then the
    machine's warnings.
    """
    nodes = f" on {machine.numa_nodes} NUMA nodes" if machine.numa_nodes > 1 else ""
    table = Table(title=f"{machine.name}: {machine.device_name}, {machine.cpu_cores} cores{nodes}")
    for column in ("rate", "median", "quartiles", "unit", "stable", "source"):
        table.add_column(column, justify="right" if column in ("median", "quartiles") else "left")
    for field, known in RATES.items():
        if known.label:
            q, unit = getattr(machine, field), UNITS[field.split("_")[-3]]
            spread = f"{q.q1 / 1e9:.2f} to {q.q3 / 1e9:.2f}"
            stable = "yes" if q.stable else "no"
            table.add_row(known.label, f"{q.median / 1e9:.2f}", spread, unit, stable, q.source)
    console.print(table)
    for ranks, shares in machine.rank_shares.items():
        shares_text = ", ".join(f"{name} {q.median:.2f}" for name, q in shares.items())
        console.print(
            f"bandwidth of each rank while {ranks} ranks run at the same time, divided by the bandwidth of a rank that "
            f"runs alone: {shares_text}"
        )
    for directory, drive in machine.drives.items():
        console.print(
            f"the drive of {directory} reads {drive.read_bytes_per_s.median / 1e9:.2f} GB/s and writes "
            f"{drive.write_bytes_per_s.median / 1e9:.2f} GB/s. While it reads and writes at once, it reaches "
            f"{drive.duplex_factor.median:.0%} of each rate",
            highlight=False,
        )
    beside = [f"{name} {q.median:.2f}" for name, q in machine.contention.items()]
    facts = [f"{name} {text}" for name, text in (machine.facts | machine.versions).items()]
    for title, parts in (("speed at the same time as other work, relative to alone", beside), ("facts", facts)):
        if parts:
            console.print(f"{title}: {', '.join(parts)}", highlight=False)
    if machine.measured_with:
        console.print(f"measured with {machine.measured_with}", highlight=False)
    for warning in machine.warnings:
        console.print(f"warning: {warning}", style="yellow")


def show_workload(workload: Workload, console: Console) -> None:
    """Print the workload of a training run: seconds of its phases with quartiles, times and memory of its
    layers, and its warnings.
    """
    w = workload
    shape = f"{w.params / 1e9:.4g} billion parameters in {len(w.subgroups)} subgroups on this rank"
    clips = "not known" if w.clip_rate is None else f"{w.clip_rate:.1%}"
    console.print(
        f"{w.name}: {shape}, ranks: {w.ranks_per_node * w.nodes}, work of an iteration: {_amount(w)}, "
        f"steps that clip: {clips}"
    )
    phases = Table(title="seconds per iteration")
    for column in ("phase", "median", "quartiles", "steps"):
        phases.add_column(column, justify="left" if column == "phase" else "right")
    for name, q in w.phase_times.items():
        phases.add_row(name, f"{q.median:.4f}", f"{q.q1:.4f} to {q.q3:.4f}", str(q.n))
    console.print(phases)
    layers = Table(title="layers, in one micro-batch")
    for column in ("layer", "parameters", "forward", "backward", "activations"):
        layers.add_column(column, justify="left" if column == "layer" else "right")
    for layer in w.layers:
        times = [f"{s * 1e3:.2f} ms" for s in (layer.forward_s, layer.backward_s)]
        mib = f"{layer.activation_bytes / 2**20:.2f} MiB"
        layers.add_row(layer.name, str(layer.params), *times, mib)
    console.print(layers)
    if w.memory_curve:
        console.print(
            "GPU memory in use during an iteration: "
            f"at most {max(p.device_bytes for p in w.memory_curve) / GIB:.2f} GiB, "
            f"at least {min(p.device_bytes for p in w.memory_curve) / GIB:.2f} GiB"
        )
    if w.provenance:
        console.print(f"from: {w.provenance}", highlight=False)
    for warning in w.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _amount(workload: Workload) -> str:
    if workload.tokens_per_iteration is not None:
        return f"{workload.tokens_per_iteration} tokens"
    return f"{workload.samples_per_iteration} samples (tokens not known)"


def show_plan(plan: Plan, console: Console) -> None:
    """Print a training plan: the advice in one sentence, the placements, a table of ways to train with their predicted
    times, and the reasons for the plan.
    """
    if plan.about:
        console.print(plan.about, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(headline(plan), style="bold")
    if plan.prediction is not None and plan.prediction.tokens_per_s:
        prediction = plan.prediction
        console.print(
            f"this plan: {seconds_text(prediction.iteration_s)} per iteration, {prediction.tokens_per_s:,.0f} tokens/s"
        )
    console.print(placed_in_words(plan))
    if plan.trained_as is not None:
        console.print(f"the plan assumes {plan.trained_as.in_words}", markup=False)
    if plan.checkpoint.interval_steps:
        console.print(f"a checkpoint every {plan.checkpoint.interval_steps} steps")
    if plan.prediction is not None:
        console.print(strategies([plan.prediction, *plan.alternatives]))
        if plan.prediction.memory:
            console.print(memory(plan))
        low, high = map(seconds_text, (plan.prediction.iteration_low_s, plan.prediction.iteration_high_s))
        console.print(f"nine runs in ten are expected between {low} and {high}")
        bound = plan.prediction.lower_bound_s
        if bound:
            console.print(f"no plan within these memory limits can take less than {least_text(bound)} per iteration")
    for reason in plan.reasons:
        console.print(f"- {reason}")


_PLACED: Mapping[Placement, str] = {
    "resident": "kept and updated on the GPU",
    "device": "staged to the GPU for the update",
    "host": "updated by the CPU",
    "stored": "stored on a drive",
}


def placed_in_words(plan: Plan) -> str:
    """Return sentences for the user about a plan.

    They say in which memory the subgroups keep their optimizer state, how many subgroups are updated before the
    gradient norm is known, and how many accumulate gradients on the GPU. They give the numbers of buffers. If updates
    do not overlap with the next forward, a sentence says so.
    """
    counts = [(p, plan.count(p)) for p in get_args(Placement) if plan.count(p)]
    early, summed = sum(plan.updated_early), sum(plan.summed_on_device)
    sentences = [f"{plan.subgroup_count} subgroups: " + ", ".join(f"{n} {_PLACED[p]}" for p, n in counts)]
    if early:
        sentences.append(f"{early} are updated early (before the gradient norm is known)")
    if summed:
        sentences.append(f"{summed} accumulate gradients on the GPU")
    if plan.staging_slots:
        sentences.append(f"{plan.staging_slots} staging buffers on the GPU, {plan.prefetch} of them filled in backward")
    if plan.stores:
        sentences.append(f"{plan.host_slots} buffers in host memory for stored state")
    if not plan.overlap_forward:
        sentences.append("Each step waits for its updates")
    return ". ".join(sentences) + "."


def memory(plan: Plan) -> Table:
    """Return a table of the predicted peak memory of a rank in GiB, with a row for each kind of data.

    The table has columns for GPU and host memory, under the plan and under each baseline, such as DeepSpeed
    without a plan.
    """
    assert plan.prediction is not None
    others = {role_of(p.strategy): p for p in plan.alternatives if p.memory}
    by_role = {"plan": plan.prediction, **others}
    columns = [(m, role) for m in MEMORIES for role in BY_KIND if role in by_role and by_role[role].memory.get(m)]
    table = Table(title="peak memory, GiB per rank", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("")
    for m, role in columns:
        table.add_column(f"{'GPU' if m == 'device' else m}\n{role}", justify="right")

    def row(name: str, sizes: Iterable[float | None]) -> None:
        table.add_row(name, *("" if n is None else f"{n / GIB:.2f}" for n in sizes))

    for kind in KINDS:
        sizes = [by_role[role].memory[m].get(kind) for m, role in columns]
        if any(sizes):
            row(kind, sizes)
    table.add_section()
    row("total", (sum(by_role[role].memory[m].values()) for m, role in columns))
    row("limit", (plan.prediction.limits.get(m) for m, _ in columns))
    return table


def strategies(predictions: Iterable[Prediction]) -> Table:
    """Build a table with one row per predicted strategy (the plan or another way to train).

    Strategies that fit into memory come first. A note below the table says which memory is too small for the other
    strategies. If no strategy takes time between iterations, the table has no column for this time. If no strategy
    keeps state on drives, the table has no column for drives.
    """
    rows = sorted(predictions, key=lambda p: (not p.fits, p.iteration_s))
    unit, scale = ("s", 1.0) if rows[0].iteration_s >= LONG_S else ("ms", 1e3)
    table = Table(
        title=f"predicted time ({unit} per iteration) and peak memory (GiB per rank)",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        caption_justify="left",
        caption_style="",
    )
    phases = ["iteration", "forward", "backward", "step"]
    phases += ["loop"] if any(p.loop_s for p in rows) else []
    memories = ["GPU", "host"] + (["drive"] if any(p.storage_bytes for p in rows) else [])
    table.add_column("strategy", overflow="fold")
    for column in (*phases, *memories):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits")
    for p in rows:
        times = [f"{getattr(p, f'{phase}_s') * scale:.{2 if unit == 's' else 1}f}" for phase in phases]
        taken = (p.device_peak_bytes, p.host_peak_bytes, p.storage_bytes)[: len(memories)]
        memory = [f"{b / GIB:.1f}" for b in taken]
        table.add_row(p.strategy, *times, *memory, "yes" if p.fits else "no")
    lacking = [f"{p.strategy} {p.note}" for p in rows if not p.fits]
    table.caption = "\n".join(lacking) or None
    return table
