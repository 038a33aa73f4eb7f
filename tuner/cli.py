"""The ``tune`` command: profile, plan, show, simulate, and look after checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.inputs import (
    MACHINE,
    BadInputError,
    read_machine,
    read_plan,
    read_workload,
    workload_options,
    written,
)
from tuner.quantities import duration_s, rate_bytes_per_s, share, size_bytes

if TYPE_CHECKING:
    from simulator.workload import Workload

T = TypeVar("T")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")


class _Text(click.ParamType):  # type: ignore[type-arg]
    """A flag whose text is parsed by a function that raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE, DURATION = _Text("size", size_bytes), _Text("duration", duration_s)
RATE, SHARE = _Text("rate", rate_bytes_per_s), _Text("share", share)


def _guarded(command: Callable[..., T]) -> Callable[..., T]:
    """Bad input ends with one line, never with a traceback."""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, RuntimeError) as error:
            raise BadInputError(str(error)) from None

    return wrapper


@click.group(
    epilog="Example: tune plan --machine machine.json --workload workload.json -o plan.json"
)
@click.version_option(package_name="ebbtide")
def main() -> None:
    """Plans training with CPU-offloaded optimizer state: same bits, less time."""


@main.command(
    epilog="Example: tune profile -o machine.json --storage-dir /checkpoints; "
    "tune profile --train-script train.py --launcher deepspeed --ranks 4 -- --epochs 1",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-o", "--output", help="Where it goes: machine.json, with a script workload.json.")
@click.option("--storage-dir", help="The folder that checkpoints will go to.")
@click.option("--seconds", default=30.0, show_default=True, help="Time to spend, at most 60.")
@click.option("--fresh", is_flag=True, help="Measure although the result is cached.")
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    help="Also measure with so many ranks at once; with a script, ranks to start.",
)
@click.option("--train-script", help="Take the workload from this script; its arguments follow.")
@click.option(
    "--launcher",
    type=click.Choice(["none", "torchrun", "deepspeed"]),
    default="torchrun",
    show_default=True,
    help="What starts the script.",
)
@click.option("--iterations", default=3, show_default=True, help="Optimizer steps of the script.")
@click.option("--continue", "go_on", is_flag=True, help="Let the script run to its end.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@JSON
@_guarded
def profile(
    output: str | None,
    train_script: str | None,
    arguments: tuple[str, ...],
    ranks: int,
    launcher: Any,
    iterations: int,
    go_on: bool,
    storage_dir: str | None,
    seconds: float,
    fresh: bool,
    as_json: bool,
) -> None:
    """Measures this machine; with --train-script, what a training script asks of it."""
    from tuner.profiling import machine_profile, script_profile

    if train_script is not None:
        script_profile(
            output or "workload.json", train_script, arguments, launcher=launcher, ranks=ranks,
            iterations=iterations, go_on=go_on, as_json=as_json,
        )  # fmt: skip
        return
    if arguments or go_on:
        raise BadInputError(
            "--train-script SCRIPT must be given before the script's arguments and for --continue, "
            f"but got only {' '.join(arguments) or '--continue'}"
        )
    machine_profile(output or "machine.json", storage_dir, seconds, ranks, fresh, as_json)


@main.command(
    epilog="Example: tune plan --machine machine.json --workload workload.json --mtbf 4h; "
    "tune plan --machine h200 --model config.json --ds-config ds.json --gpu-memory 40GiB"
)
@MACHINE
@workload_options
@click.option("-o", "--output", default="plan.json", show_default=True, help="Where it goes.")
@click.option("--gpu-memory", type=SIZE, help="Device memory per rank, e.g. 24GiB.")
@click.option("--host-memory", type=SIZE, help="Host memory per rank, e.g. 100GiB.")
@click.option(
    "--memory-margin",
    type=SHARE,
    help="Of both, what stays free, e.g. 5%; without it, from the spread of the profiled peaks.",
)
@click.option(
    "--subgroup-size",
    help="keep the workload's (default), auto to search the best one (default with --model), or a "
    "number of elements.",
)
@click.option("--robust", is_flag=True, help="Minimise the 90th percentile, not the median.")
@click.option("--mtbf", type=DURATION, help="Mean time between failures, e.g. 4h.")
@click.option("--restart", type=DURATION, default="60s", show_default=True)
@click.option("--checkpoint-dir", help="Where the planned checkpoints go.")
@click.option("--storage", type=RATE, help="What it takes from this node, e.g. 2GB/s.")
@click.option("--study-storage", help="optuna storage, e.g. sqlite:///study.db.")
@click.option("--seed", default=0, show_default=True)
@click.option("--why", is_flag=True, help="Also what more memory or bandwidth would bring.")
@JSON
@_guarded
def plan(
    machine: str,
    output: str,
    gpu_memory: int | None,
    host_memory: int | None,
    memory_margin: float | None,
    subgroup_size: str | None,
    robust: bool,
    mtbf: float | None,
    restart: float,
    checkpoint_dir: str | None,
    storage: float | None,
    study_storage: str | None,
    seed: int,
    why: bool,
    as_json: bool,
    **source: Any,
) -> None:
    """Searches the best plan and says why it is the best."""
    from tuner.planning import plan as search
    from tuner.report import show_plan, wide_console

    have = read_machine(machine)
    if storage is not None:
        have = have.with_rates(storage_write_bytes_per_s=storage)
    automatic = "auto" if source["model"] else "keep"
    work, sizes = _recut(read_workload(have, **source), subgroup_size or automatic)
    options: dict[str, Any] = {
        "device_memory_bytes": gpu_memory, "host_memory_bytes": host_memory, "seed": seed,
        "robust": robust, "subgroup_sizes": sizes, "memory_margin": memory_margin,
    }  # fmt: skip
    found = search(
        work, have, mtbf_s=mtbf, restart_s=restart, checkpoint_dir=checkpoint_dir,
        study_storage=study_storage, **options,
    )  # fmt: skip
    if why:
        from tuner.shadow import shadow_prices

        extra = tuple(shadow_prices(work, have, found, options))
        found = found.model_copy(update={"reasons": (*found.reasons, *extra)})
    with written("--output", output):
        found.save(output)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        return
    console = wide_console()
    show_plan(found, console)
    console.print(f"written to {output}")


def _recut(work: Workload, given: str) -> tuple[Workload, tuple[int, ...] | None]:
    """The workload to plan for, and the subgroup sizes that the search may choose from."""
    from tuner.subgroup_size import SIZES

    if given in ("keep", "auto"):
        return work, SIZES if given == "auto" else None
    if not given.isdecimal() or not int(given):
        raise BadInputError(
            f"--subgroup-size must be keep, auto or a number of elements > 0, but got {given}"
        )
    return work.recut(int(given)), None


@main.command(epilog="Example: tune show plan.json")
@click.argument("plan_file", metavar="PLAN")
@JSON
@_guarded
def show(plan_file: str, as_json: bool) -> None:
    """Shows a plan: placement, prediction, what it beat, and why."""
    from tuner.report import show_plan, wide_console

    found = read_plan(plan_file)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        show_plan(found, wide_console())


@main.command(
    epilog="Example: tune simulate --machine m.json --workload w.json --strategy twin_flow"
)
@MACHINE
@workload_options
@click.option("--plan", "plan_file", help="A plan; without one, --strategy.")
@click.option("--strategy", help="By name; zero3_offload if neither is given.")
@click.option("--trace", help="Write a trace for ui.perfetto.dev.")
@click.option("--plot", help="Draw the timeline as PNG.")
@JSON
@_guarded
def simulate(
    machine: str,
    plan_file: str | None,
    strategy: str | None,
    trace: str | None,
    plot: str | None,
    as_json: bool,
    **source: Any,
) -> None:
    """Predicts one iteration under a plan or a named strategy."""
    from simulator.engines.reference import simulate as run
    from simulator.schedules.strategies import build_strategy

    if plan_file is not None and strategy is not None:
        raise BadInputError(
            f"only one of --plan and --strategy may be given, but got {plan_file} and {strategy}"
        )
    have = read_machine(machine)
    work = read_workload(have, **source)
    if plan_file is not None:
        schedule = build_strategy("ebbtide", work, plan=read_plan(plan_file))
    else:
        schedule = build_strategy(strategy or "zero3_offload", work)
    timeline = run(schedule, have)
    if trace:
        with written("--trace", trace):
            timeline.to_perfetto(trace)
    if plot:
        with written("--plot", plot):
            timeline.plot().figure.savefig(plot, dpi=130, bbox_inches="tight")  # type: ignore[union-attr]
    figures = {
        "strategy": timeline.strategy, "iteration_s": timeline.iteration_s, **timeline.phases(),
        "device_peak_bytes": timeline.device_peak_bytes,
        "host_peak_bytes": timeline.host_peak_bytes,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        click.echo(f"{name:18} {value}")


@main.group(epilog="Example: tune checkpoint list checkpoints/")
def checkpoint() -> None:
    """Lists, verifies and prunes checkpoint folders."""


FOLDERS = click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)


@checkpoint.command("list", epilog="Example: tune checkpoint list checkpoints/")
@FOLDERS
@JSON
@_guarded
def list_(folders: tuple[str, ...], as_json: bool) -> None:
    """The committed checkpoints of a folder, newest first; give every tier's folder to see all."""
    from runtime.checkpoint.inspect import list_checkpoints

    rows = [
        {**tier, **_row(item)}
        for root, tier in _tiers(folders)
        for item in list_checkpoints(root)
    ]  # fmt: skip
    _print_rows(rows, as_json)


@checkpoint.command(epilog="Example: tune checkpoint verify checkpoints/ --tag global_step100")
@FOLDERS
@click.option("--tag", help="One checkpoint; without it, all of them.")
@JSON
@_guarded
def verify(folders: tuple[str, ...], tag: str | None, as_json: bool) -> None:
    """Reads every byte and compares it with the manifest; exit code 2 if something is damaged."""
    from runtime.checkpoint.inspect import list_checkpoints
    from runtime.checkpoint.inspect import verify as check

    rows = []
    tiers = _tiers(folders)
    if tag and len(tiers) > 1:  # one tier may not have it yet, or not any more
        tiers = [(root, tier) for root, tier in tiers if (root / tag).is_dir()] or tiers[:1]
    for root, tier in tiers:
        tags = [tag] if tag else [str(item.tag) for item in list_checkpoints(root)]
        for name in tags:
            told = "; ".join(str(problem) for problem in check(root, name))
            rows.append({**tier, "tag": name, "state": f"damaged: {told}" if told else "whole"})
    _print_rows(rows, as_json)
    if any(row["state"] != "whole" for row in rows):
        sys.exit(2)


@checkpoint.command(epilog="Example: tune checkpoint prune checkpoints/ --keep 3")
@FOLDERS
@click.option("--keep", required=True, type=click.IntRange(min=1), help="Newest ones to leave.")
@JSON
@_guarded
def prune(folders: tuple[str, ...], keep: int, as_json: bool) -> None:
    """Deletes all but the newest committed checkpoints, in each folder that is given."""
    from runtime.checkpoint.inspect import prune as delete

    rows = [
        {**tier, "removed": str(item)}
        for root, tier in _tiers(folders)
        for item in delete(root, keep)
    ]  # fmt: skip
    _print_rows(rows, as_json)


def _tiers(folders: tuple[str, ...]) -> list[tuple[Path, dict[str, str]]]:
    """Each folder with the column that tells it from the others; all are checked first."""
    roots = [_folder(path) for path in folders]
    return [(root, {"folder": str(root)} if len(roots) > 1 else {}) for root in roots]


def _folder(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise BadInputError(f"FOLDER must be a folder of checkpoints, but got {path}")
    return folder


def _row(item: Any) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    fields = asdict(item) if is_dataclass(item) and not isinstance(item, type) else vars(item)
    return {name: value if isinstance(value, (int, float)) else str(value)
            for name, value in fields.items()}  # fmt: skip


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo("  ".join(f"{name}={value}" for name, value in row.items()))


@main.command(
    "profile-script",
    hidden=True,  # of old; `tune profile --train-script --launcher none` does the same
    context_settings={"ignore_unknown_options": True},
)
@click.option("-o", "--output", default="workload.json", show_default=True)
@click.option("--iterations", default=5, show_default=True, help="Optimizer steps to profile.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True)
@_guarded
def profile_script(output: str, iterations: int, script: tuple[str, ...]) -> None:
    """Runs a training script until its first steps are profiled; the script stays unchanged."""
    from tuner.profiling import script_profile

    script_profile(output, script[0], script[1:], launcher="none", iterations=iterations)


if __name__ == "__main__":
    main()
