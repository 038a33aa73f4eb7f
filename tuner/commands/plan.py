"""The ``tune plan`` command: the search for the best plan for a workload on a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ebbtide.tuner.commands.options import (
    DURATION,
    ENDURANCE,
    GPU_MEMORY,
    HOST_MEMORY,
    JSON,
    RATE,
    STORAGE,
    guarded,
    margin_option,
    needs,
)
from ebbtide.tuner.files import BadInputError, check_distinct, check_folder, written
from ebbtide.tuner.garbage import without_garbage_collection
from ebbtide.tuner.inputs import (
    MACHINE,
    Trained,
    check_offloading,
    described,
    read_asked,
    read_trained,
    stored_in,
    take_card,
    tell_notes,
    workload_options,
)
from ebbtide.tuner.lazy_group import Command
from ebbtide.tuner.progress import progress_after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.machine import Machine
    from ebbtide.simulator.plan import Plan
    from ebbtide.simulator.workload import Workload
    from ebbtide.tuner.advice.tried import Faster
    from ebbtide.tuner.placements.division import ImpossibleError


@click.command(
    cls=Command,
    epilog="Example: tune plan --machine machine.json --workload workload.json --mtbf 4h; "
    "tune plan --machine h200 --model config.json --ds-config ds.json --gpu-memory 40GiB",
)
@MACHINE
@described
@workload_options
@click.option("-o", "--output", default="plan.json", show_default=True, help="Plan file to write.")
@click.option("--emit-deepspeed", help="Also write a DeepSpeed config that trains under the plan with `tune run`.")
@GPU_MEMORY
@HOST_MEMORY
@margin_option(
    "Default: computed from how much the memory peak varied between the profiled steps, or 5% without a profile."
)
@click.option(
    "--offload-param/--no-offload-param",
    default=None,
    help="--offload-param: 16-bit parameters may move to host memory if training is faster then. --no-offload-param: "
    "only if the model does not fit otherwise. Default: --offload-param, or --no-offload-param if "
    "offload_param.device in --ds-config is none.",
)
@click.option(
    "--subgroup-size",
    default="auto",
    show_default=True,
    help="Elements per subgroup, e.g. 1e8. auto: choose the fastest size. keep: use the workload's sub_group_size. "
    "pieces: DeepSpeed uses the workload's sub_group_size, and the plan divides each of DeepSpeed's subgroups into "
    "smaller ones, of the fastest size.",
)
@click.option(
    "--robust",
    is_flag=True,
    help="Minimize the upper end of the interval around the predicted time, not the predicted time.",
)
@click.option(
    "--mtbf", type=DURATION, help="Mean time between failures of the job, e.g. 4h. Chooses the checkpoint interval."
)
@click.option(
    "--restart",
    type=DURATION,
    default="60s",
    show_default=True,
    help="Time from a failure to training again, e.g. 60s.",
)
@click.option("--checkpoint-dir", help="Folder to which training under the plan writes its checkpoints.")
@click.option("--checkpoint-rate", type=RATE, help="Write rate of checkpoint storage per node, e.g. 2GB/s.")
@STORAGE
@click.option(
    "--endurance",
    type=ENDURANCE,
    help="Rated endurance of all drives of --storage together in terabytes written, e.g. 600. The "
    "answer then tells how long they last.",
)
@click.option(
    "--quick", is_flag=True, help="Search with a tenth of the evaluations: faster, but the plan may be slower."
)
@click.option("--seed", default=0, show_default=True, help="Random seed of the search.")
@click.option(
    "--faster",
    type=click.IntRange(1, 3),
    help="Plan, and write the files, for this line of the changes with which the same samples train faster. Every "
    "answer ends with these lines.",
)
@click.option("--why", is_flag=True, help="Also estimate the gain from more GPU memory or a faster link.")
@JSON
@guarded
@without_garbage_collection()
def plan(
    machine: str,
    output: str,
    emit_deepspeed: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    memory_margin: float | None,
    offload_param: bool | None,
    subgroup_size: str,
    robust: bool,
    mtbf: float | None,
    restart: float,
    checkpoint_dir: str | None,
    checkpoint_rate: float | None,
    storage: tuple[tuple[str, int], ...],
    endurance: float | None,
    quick: bool,
    seed: int,
    faster: int | None,
    why: bool,
    as_json: bool,
    **source: Any,
) -> None:
    """Search for the best plan for training on a machine, and explain why it is the best."""
    from ebbtide.tuner.placements.decision import QUICK
    from ebbtide.tuner.placements.planning import shadow_prices
    from ebbtide.tuner.placements.storage import with_storage

    needs("with --mtbf", mtbf is not None, "restart", "checkpoint_rate")
    check_folder("--output", output)
    check_folder("--emit-deepspeed", emit_deepspeed)
    _tell_interval(checkpoint_dir, mtbf)
    card = take_card(source)
    measured, limits, notes = read_asked(machine, {**card, "gpu_memory": gpu_memory, "host_memory": host_memory})
    if checkpoint_rate is not None:
        measured = measured.with_rates(storage_write_bytes_per_s=checkpoint_rate)
    trained = read_trained(measured, **source, beside_workload=("ds_config",) if emit_deepspeed else ())
    check_distinct("--emit-deepspeed", emit_deepspeed)
    check_distinct("--output", output)  # after the inputs are read: they may include the default plan.json
    check_offloading(trained)
    _tell_device(trained, emit_deepspeed)
    needs("under ZeRO-2 or 3", trained.workload.zero_stage > 1, "clip_rate")
    work, sizes = _recut(trained.workload, subgroup_size)
    work = work.configured(trained.offload, work.job)  # a profiled workload does not have the config
    options: dict[str, Any] = {
        **limits,
        "seed": seed,
        "robust": robust,
        "subgroup_sizes": sizes,
        "pieces": subgroup_size == "pieces",
        "memory_margin": memory_margin,
        "offload_parameters": not trained.offload.keeps_parameters if offload_param is None else offload_param,
        "storage": stored_in(trained, storage),
        "endurance_bytes": endurance,
        "effort": QUICK if quick else None,
    }
    needs("with --storage", bool(options["storage"]), "endurance")
    needs("without --storage, whose drive is simulated", not options["storage"], "checkpoint_rate")
    failures = {"mtbf_s": mtbf, "restart_s": restart, "checkpoint_dir": checkpoint_dir}
    if faster is not None:
        one = _of_line(faster, work, measured, failures, options)
        work = (trained := _as_changed(trained, one)).workload
        if one.outcome.plan is None:
            _write_alone(one, emit_deepspeed, trained, notes, as_json=as_json)
            return
    result = _searched(work, measured, failures, options, notes)
    others = [] if faster is not None else _faster(work, measured, result, options)
    all_notes = (*notes, *_faster_lines(others, work.job))
    if why:
        all_notes += (*shadow_prices(work, with_storage(work, measured, options["storage"])[1], result),)
    result = result.model_copy(update={"reasons": (*result.reasons, *all_notes)})
    with written("--output", output):
        result.save(output)
    _emit(emit_deepspeed, result, output, trained)
    if as_json:
        click.echo(result.model_dump_json(indent=2))
    else:
        _show(result, trained.workload, output, emit_deepspeed)


def _show(found: Plan, work: Workload, output: str, emit_deepspeed: str | None) -> None:
    from ebbtide.tuner.answer.report import show_plan, wide_console

    console = wide_console()
    show_plan(found, console)
    console.print(f"plan written to {' and '.join(filter(None, [output, emit_deepspeed]))}")
    console.print(_next(emit_deepspeed, work), markup=False, soft_wrap=True)


def _searched(
    work: Workload, machine: Machine, failures: Mapping[str, Any], options: Mapping[str, Any], notes: Sequence[str] = ()
) -> Plan:
    from ebbtide.tuner.placements.division import ImpossibleError
    from ebbtide.tuner.placements.planning import plan as search

    try:
        with progress_after(2.0) as progress:
            return search(work, machine, progress=progress, **failures, **options)
    except ImpossibleError as error:
        tell_notes((*work.notes, *notes))  # which the plan would tell
        raise _with_ways_out(error, work, machine, options) from None


def _faster(work: Workload, machine: Machine, found: Plan, options: Mapping[str, Any]) -> list[Faster]:
    from ebbtide.tuner.advice.tried import asked_of, faster
    from ebbtide.tuner.answer.verdict import role_of

    if work.job is None or found.prediction is None:
        return []
    plain = [p.iteration_s for p in found.alternatives if role_of(p.strategy) == "no offload" and p.fits]
    return faster(work.job, machine, min([found.prediction.iteration_s, *plain]), **asked_of(options))


def _faster_lines(lines: Sequence[Faster], job: Job | None) -> list[str]:
    from ebbtide.simulator.plan import FASTER

    return [f"{FASTER} (--faster {number}): {one.line(job)}" for number, one in enumerate(lines, 1) if job]


def _of_line(
    number: int, work: Workload, machine: Machine, failures: Mapping[str, Any], options: Mapping[str, Any]
) -> Faster:
    from ebbtide.tuner.placements.decision import QUICK

    first = _searched(work, machine, failures, {**options, "effort": QUICK})
    lines = _faster(work, machine, first, options)
    if number > len(lines):
        found = f"only {len(lines)} change{'s' * (len(lines) != 1)}" if lines else "no change"
        raise BadInputError(
            f"--faster must name one of the changes with which the same samples train faster, but got {number}, and "
            f"{found} was found: leave --faster out to see them"
        )
    return lines[number - 1]


def _as_changed(trained: Trained, one: Faster) -> Trained:
    config = {key: value for key, value in one.deepspeed(trained.config).items() if key != "ebbtide"}
    return Trained(one.workload, one.job, config)


def _write_alone(one: Faster, path: str | None, trained: Trained, notes: Sequence[str], *, as_json: bool) -> None:
    from ebbtide.tuner.answer.instructions import write_config

    if path is None:
        raise BadInputError(
            f"--emit-deepspeed must be given with this line of --faster, because it trains without a plan: {one.label}"
        )
    config = dict(trained.config or {})
    with written("--emit-deepspeed", path):
        write_config(config, path)
    if as_json:
        record: dict[str, Any] = {"label": one.label, "iteration_s": one.outcome.iteration_s, "deepspeed": config}
        record["notes"] = [*one.workload.notes, *notes]
        click.echo(json.dumps(record, indent=2))
        return
    tell_notes((*one.workload.notes, *notes))
    click.echo(f"{one.label}: {one.outcome.iteration_s:.3g} s per step without a plan. Config written to {path}")


def _with_ways_out(
    error: ImpossibleError, work: Workload, machine: Machine, options: Mapping[str, Any]
) -> BadInputError:
    if work.job is None:
        return BadInputError(f"{error.fact}. {error.advice}")
    from ebbtide.tuner.advice.tried import asked_of
    from ebbtide.tuner.advice.ways_out import ANOTHER_WAY, another_gpu, flags, ways_out

    # Trying changes takes seconds, so what is missing is printed first.
    click.echo(f"{error.fact}. Trying changes with which the job fits ...", err=True)
    asked = asked_of(options)
    ways = ways_out(work.job, machine, asked["freedom"], **asked["asked"])
    lines = [
        f"  {flags(way, work.job)}: {way.iteration_s:.3g} s per iteration, {way.tokens_per_s or 0:,.0f} tokens/s"
        for way in ways
    ]
    elsewhere = "" if ways else another_gpu(work.job, machine, asked["freedom"], **asked["asked"])
    heading = "These fit, the cheapest first:" if ways else elsewhere or error.advice
    listed = [
        {"flags": flags(way, work.job), "iteration_s": way.iteration_s, "tokens_per_s": way.tokens_per_s}
        for way in ways
    ]
    rule = f"{error.fact}. {elsewhere or error.advice}" if not ways else f"{error.fact}."
    text = "\n".join([f"The job does not fit. {heading}", *lines, f"{ANOTHER_WAY}."])
    return BadInputError(text, rule=rule, ways=listed, another_way=ANOTHER_WAY)


def _emit(path: str | None, found: Plan, plan_file: str, trained: Trained) -> None:
    from ebbtide.tuner.answer.instructions import emitted_config, write_config

    if path is None:
        return
    work = trained.workload
    plan_path = str(Path(plan_file).resolve())  # absolute, because the script may run in any folder
    config = emitted_config(found, plan_path, trained.config, work.wire_dtype, work.zero_stage)
    with written("--emit-deepspeed", path):
        write_config(config, path)


def _next(emitted: str | None, work: Workload) -> str:
    from ebbtide.tuner.answer.instructions import command, trainer

    if emitted is None:
        return "to train with this plan, add --emit-deepspeed ds.json to the command"
    return f"to train with this plan: {command(work, emitted)}\nwith the Hugging Face Trainer: {trainer(work, emitted)}"


def _tell_interval(checkpoint_dir: str | None, mtbf: float | None) -> None:
    if checkpoint_dir is None or mtbf is not None:
        return
    click.echo(
        "note: without --mtbf the plan has no checkpoint interval (interval_steps 0), so nothing is written "
        "to --checkpoint-dir automatically. --mtbf chooses an interval",
        err=True,
    )


def _tell_device(trained: Trained, emit_deepspeed: str | None) -> None:
    if trained.config is None or emit_deepspeed or trained.offload.optimizer in ("cpu", "nvme"):
        return
    click.echo(
        "note: zero_optimization.offload_optimizer.device must be 'cpu' to train under the plan, but is not "
        "in --ds-config. --emit-deepspeed writes a config with this device",
        err=True,
    )


def _recut(work: Workload, given: str) -> tuple[Workload, tuple[int, ...] | None]:
    if given in ("keep", "auto", "pieces"):
        return work, () if given == "keep" else None
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if not (0 < size < float("inf") and size.is_integer()):
        raise BadInputError(
            "--subgroup-size must be keep, auto, pieces or a whole number of elements > 0, such as 1e8, "
            f"but got {given}"
        )
    return work.recut(int(size)), ()
