"""The ``tune simulate`` command, which predicts the time and memory of one training iteration."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from ebbtide.simulator.page import write_whole
from ebbtide.tuner.commands.options import GPU_MEMORY, HOST_MEMORY, JSON, guarded, margin_option, needs
from ebbtide.tuner.files import BadInputError, check_distinct, read_plan, written
from ebbtide.tuner.inputs import (
    MACHINE,
    Trained,
    check_offloading,
    described,
    read_asked,
    read_trained,
    take_card,
    tell_notes,
    workload_options,
)
from ebbtide.tuner.lazy_group import Command
from ebbtide.tuner.progress import progress_after

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ebbtide.simulator.limits import Limits
    from ebbtide.simulator.machine import Machine
    from ebbtide.simulator.plan import Plan
    from ebbtide.simulator.schedule import Schedule
    from ebbtide.simulator.timeline import Timeline
    from ebbtide.simulator.workload import Workload


_SECONDS = ("iteration_s", "iteration_low_s", "iteration_high_s")
_EARLY = ("clip_rate", "unclipped_s")  # of a plan with early updates


def _strategies(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    from ebbtide.simulator.schedules.strategies import STRATEGIES

    return [CompletionItem(name) for name in STRATEGIES if name.startswith(begun)]


@click.command(cls=Command, epilog="Example: tune simulate --machine m.json --workload w.json --strategy twin_flow")
@MACHINE
@described
@workload_options
@click.option("--plan", "plan_file", help="Plan file to simulate. Without it, --strategy is simulated.")
@click.option(
    "--strategy",
    shell_complete=_strategies,
    help="Offload strategy to simulate, e.g. twin_flow. Default: DeepSpeed alone, with the offload settings of "
    "--ds-config. Without --ds-config, DeepSpeed alone with optimizer state in host memory.",
)
@GPU_MEMORY
@HOST_MEMORY
@margin_option(
    "Default: if the plan of --plan was made for this machine and model, and no other limit is given, the limits that "
    "the plan was made with. Otherwise as in `tune plan`."
)
@click.option("--trace", help="Trace file to write, for ui.perfetto.dev.")
@click.option("--plot", help="PNG file to draw the timeline to.")
@JSON
@guarded
def simulate(
    machine: str,
    plan_file: str | None,
    strategy: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    memory_margin: float | None,
    trace: str | None,
    plot: str | None,
    as_json: bool,
    **source: Any,
) -> None:
    """Predict one training iteration under a plan or a named strategy.

    Exit code 1 if training does not fit into memory. As in `tune plan`, some memory is left free.
    """
    if plan_file is not None and strategy is not None:
        raise BadInputError(f"only one of --plan and --strategy may be given, but got {plan_file} and {strategy}")
    needs("with --plan", plan_file is not None, "clip_rate")
    from ebbtide.tuner.answer.verdict import about

    check_distinct("--plot", plot)
    check_distinct("--trace", trace)
    card = take_card(source)
    measured, memory, memory_notes = read_asked(machine, {**card, "gpu_memory": gpu_memory, "host_memory": host_memory})
    trained = read_trained(measured, **source)
    work, name, options = _stock(strategy, trained) if plan_file is None else _planned(plan_file, trained)
    asked = {**memory, "margin": memory_margin}
    limits = _limits(work, measured, options.get("plan"), asked)
    about_job, notes = about(work, measured), (*memory_notes, *work.notes)
    timeline, figures = _simulated(work, measured, name, options, limits)
    _draw(timeline, trace, plot)
    missing = limits.shortfall(timeline)
    if as_json:
        fields = {"about": about_job, **figures, "fits": not missing, "missing": missing, "notes": notes}
        click.echo(json.dumps(fields, indent=2))
    else:
        tell_notes(notes)
        click.echo(about_job)
        for key, value in _printed(figures, limits, missing):
            click.echo(f"{key:12} {value}")
    if missing:
        sys.exit(1)


def _limits(work: Workload, machine: Machine, plan: Plan | None, asked: Mapping[str, Any]) -> Limits:
    from ebbtide.simulator.limits import Limits

    if plan is not None and all(value is None for value in asked.values()):
        return plan.limits_on(work, machine)
    return Limits.of(work, machine, **asked)


def _simulated(
    work: Workload, machine: Machine, name: str, options: Mapping[str, Any], limits: Limits
) -> tuple[Timeline, dict[str, Any]]:
    from ebbtide.simulator.engines.reference import simulate as run
    from ebbtide.simulator.schedules.strategies import build_strategy
    from ebbtide.tuner.calibrate.interval import workload_interval_s
    from ebbtide.tuner.placements.planning import predict

    def build(of: Workload) -> Schedule:
        return build_strategy(name, of, **options)

    with progress_after(2.0) as progress:
        progress(0.0, "simulating one iteration")
        timeline = run(build(work), machine)
        progress(0.4, "what the rates' spread makes of it")
        if "plan" in options:
            prediction = predict(work, machine, options["plan"], limits)
            seconds = prediction.model_dump(include={*_SECONDS, *(_EARLY if prediction.clip_rate is not None else ())})
        else:
            low_s, high_s = workload_interval_s(build, work, machine)
            seconds = dict(zip(_SECONDS, (timeline.iteration_s, low_s, high_s), strict=True))
    peaks = {name: getattr(timeline, name) for name in ("device_peak_bytes", "host_peak_bytes")}
    tokens = (work.tokens_per_iteration or 0) / seconds["iteration_s"]
    return timeline, {"strategy": timeline.strategy, **seconds, "tokens_per_s": tokens, **timeline.phases(), **peaks}


def _printed(figures: Mapping[str, Any], limits: Limits, missing: str) -> Iterator[tuple[str, str]]:
    from ebbtide.simulator.limits import size
    from ebbtide.tuner.quantities import seconds_text

    low, high = seconds_text(figures["iteration_low_s"]), seconds_text(figures["iteration_high_s"])
    yield "strategy", figures["strategy"]
    yield "iteration", f"{seconds_text(figures['iteration_s'])} (nine runs in ten: {low} to {high})"
    if figures["tokens_per_s"]:
        yield "tokens/s", f"{figures['tokens_per_s']:,.0f}"
    if "clip_rate" in figures:
        yield ("", f"{seconds_text(figures['unclipped_s'])} if no step clips ({figures['clip_rate']:.0%} of steps do)")
    for phase in ("forward", "backward", "step", "update", "loop"):
        if seconds := figures.get(f"{phase}_s"):
            yield phase, seconds_text(seconds)
    usable = "for both memories, which are one" if limits.unified else "usable"
    if not limits.unified:
        yield "GPU memory", f"{size(figures['device_peak_bytes'])} of {size(limits.device_bytes)} {usable}"
    taken = figures["host_peak_bytes"] + (figures["device_peak_bytes"] if limits.unified else 0)
    yield "host memory", f"{size(taken)} of {size(limits.host_bytes)} {usable}"
    yield "fits", f"no: it {missing}" if missing else "yes"


def _draw(timeline: Timeline, trace: str | None, plot: str | None) -> None:
    if trace:
        with written("--trace", trace):
            timeline.to_perfetto(trace)
    if plot:
        with written("--plot", plot):
            write_whole(plot, _picture(timeline, Path(plot).suffix[1:]))


def _picture(timeline: Timeline, kind: str) -> bytes:
    drawn = BytesIO()
    figure = timeline.plot().figure
    figure.savefig(drawn, format=kind or "png", dpi=130, bbox_inches="tight")  # type: ignore[union-attr]
    return drawn.getvalue()


def _planned(plan_file: str, trained: Trained) -> tuple[Workload, str, dict[str, Any]]:
    check_offloading(trained)
    plan, work = read_plan(plan_file, "--plan"), trained.workload
    if plan.subgroups and plan.subgroups != work.subgroups and work.parameters:
        work = work.cut_by(plan)  # with the subgroups that training under the plan would have
    return work, "ebbtide", {"plan": plan}


def _stock(strategy: str | None, trained: Trained) -> tuple[Workload, str, dict[str, Any]]:
    moved, work = trained.offload, trained.workload
    name, options = moved.strategy(work.zero_stage)
    if strategy in (None, name):
        return work, name, options
    if moved.beyond_state:
        raise BadInputError(
            f"--strategy must be {name} or left out, because only {name} can simulate {moved.beyond_state} in "
            f"--ds-config, but got {strategy}. Remove the key from the config, or leave out --strategy"
        )
    if trained.config is not None:
        given = "".join(f", {key} {value}" for key, value in options.items())
        click.echo(f"note: simulates {strategy}, although --ds-config asks for {name}{given}", err=True)
    assert strategy is not None
    return work, strategy, {}
