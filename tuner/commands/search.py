"""The ``tune search`` command: the search for the training configuration that is fastest on a machine."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ebbtide.tuner.commands.options import (
    DURATION,
    GPU_MEMORY,
    HOST_MEMORY,
    JSON,
    STORAGE,
    guarded,
    margin_option,
    needs,
)
from ebbtide.tuner.files import BadInputError, check_distinct, check_folder, read_config, written
from ebbtide.tuner.inputs import (
    MACHINE,
    MODEL_FILE,
    check_model,
    complete_models,
    described,
    given,
    job_options,
    program_of,
    read_asked,
    tell_notes,
)
from ebbtide.tuner.lazy_group import Command
from ebbtide.tuner.progress import progress_after

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ebbtide.simulator.machine import Machine
    from ebbtide.tuner.configurations.evaluation import SearchQuestion
    from ebbtide.tuner.configurations.search_answer import SearchAnswer
    from ebbtide.tuner.configurations.space import Space

_FREE = (
    "micro_batch,accumulation,zero_stage,recompute,recompute_share,offload,sub_group_size,fused_loss,kernels,"
    "flash_attention,gpus"
)
_SETTINGS = ("recompute_share", "kernels", "fused_loss", "flash_attention", "flash_version", "launcher", "omp_threads")


@click.command(
    cls=Command,
    epilog="Example: tune search --machine h100-node --model config.json --global-batch 256 "
    "--free micro_batch,accumulation,recompute,offload; "
    "tune search --machine machine.json --model config.json --global-batch 32 --measure 3 -- "
    "torchrun train.py --deepspeed ds.json --batch {micro_batch} --accumulation {accumulation}",
)
@MACHINE
@described
@click.option("--model", required=True, shell_complete=complete_models, help=f"Model to train: {MODEL_FILE}.")
@click.option("--ds-config", help='DeepSpeed config, which fixes everything that is not searched. May contain "auto".')
@click.option(
    "--sequence", type=click.IntRange(min=1), default=2048, show_default=True, help="Number of tokens per sample."
)
@click.option(
    "--free", help=f"Settings to search, of {_FREE} (default: all that neither a flag nor the DeepSpeed config fixes)."
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    help="Number of samples per optimizer step (default: train_batch_size in --ds-config). If neither gives a number, "
    "the search may change the batch size (accumulation up to 16), which changes what the model learns.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Largest number of GPUs to use (default: one node).")
@click.option(
    "--micro-batch",
    type=click.IntRange(min=1),
    help="Micro-batch size (default: the size in --ds-config). If neither gives a size, the search tries several "
    "sizes, or uses size 1 if --free is given and does not list micro_batch.",
)
@click.option(
    "--accumulation",
    type=click.IntRange(min=1),
    help="Number of micro-batches per step (default: the number in --ds-config). If neither gives a number, the search "
    "tries several numbers, or uses 1 if --free is given and does not list accumulation.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="ZeRO stage (default: the stage in --ds-config). If neither gives a stage, the search tries all "
    "stages, or uses ZeRO-3 if --free is given and does not list zero_stage.",
)
@click.option("--keep-activations", is_flag=True, help="Do not recompute activations.")
@click.option("--no-offload", is_flag=True, help="Do not offload.")
@job_options(*_SETTINGS)
@GPU_MEMORY
@HOST_MEMORY
@margin_option()
@STORAGE
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Most configurations for which a plan is searched. The ones with the highest bound of the speed come first.",
)
@click.option(
    "--study",
    help="Database that keeps the search as an Optuna study, such as sqlite:///search.db. The same search goes on from "
    "it, and optuna-dashboard shows it.",
)
@click.option(
    "--measure",
    type=click.IntRange(min=1),
    help="Train in so many of the fastest configurations for 12 steps each, on this machine, by the command after --. "
    "The answer is the fastest measured. The configuration is set in the script's DeepSpeed config, and {micro_batch}, "
    "{accumulation}, {gpus}, {recompute} and the other names of --free in the command stand for its values.",
)
@click.option(
    "--measure-timeout",
    type=DURATION,
    default="30m",
    show_default=True,
    help="Time after which a measured run of the command is ended, e.g. 10m.",
)
@click.option(
    "-o",
    "--output",
    help="File to write all simulated and measured configurations to, as JSON. `tune calibrate --runs` reads what was "
    "measured.",
)
@click.option(
    "--emit-deepspeed",
    help="DeepSpeed config to write for training in the fastest configuration: the one that the command names, or that "
    "of --ds-config, changed. Its plan, if it has one, is written beside it.",
)
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@guarded
def search(
    machine: str,
    free: str | None,
    global_batch: int | None,
    trials: int,
    study: str | None,
    measure: int | None,
    measure_timeout: float,
    command: tuple[str, ...],
    output: str | None,
    emit_deepspeed: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Search for the fastest training configuration. Configurations are simulated, so the search takes seconds.

    With --measure, a training COMMAND is then run in the best ones for some steps each.
    """
    from ebbtide.tuner.answer.instructions import write_config
    from ebbtide.tuner.answer.report import wide_console
    from ebbtide.tuner.answer.verdict import about
    from ebbtide.tuner.configurations import report
    from ebbtide.tuner.configurations.deciding import explore, measure_best

    check_folder("--output", output)
    needs("without --keep-activations", not asked["keep_activations"], "recompute_share")
    check_distinct("--output", output)
    check_folder("--emit-deepspeed", emit_deepspeed)
    check_distinct("--emit-deepspeed", emit_deepspeed)
    needs("with --measure", measure is not None, "measure_timeout")
    passed = _passed(measure, command)
    on, limits, notes = read_asked(machine, asked)
    question = _question(on, limits, asked)
    space = _space(question, asked, free, global_batch, passed)
    with progress_after(2.0) as tell:
        answer = explore(
            question,
            space,
            trials=trials,
            best=measure or 1,
            study=study,
            progress=lambda done, most: tell(done / most if most else 1.0, f"{done} configurations simulated"),
        )
    if measure is not None:
        with _interrupted_by_sigterm():
            answer = measure_best(question, answer, command, measure, measure_timeout, partial(click.echo, err=True))
    workload = None if answer.best is None else question.workload(answer.best.configuration)
    notes = (*notes, *(() if workload is None else workload.notes))
    record = {**report.as_json(answer), "notes": notes}
    if measure is not None:
        model = Path(asked["model"])
        named = str(model.resolve()) if model.is_file() else asked["model"]
        record["job"] = {"model": named, "sequence": asked["sequence"], "shape": dict(question.shape)}
    if output is not None:
        with written("--output", output):
            write_config(record, output)
    _emit(emit_deepspeed, question, answer, command)
    right = bool(answer.fastest_measured if measure else answer.fitting)
    if as_json:
        click.echo(json.dumps(record, indent=1))
        sys.exit(0 if right else BadInputError.exit_code)
    tell_notes(notes)
    if workload is None:
        raise BadInputError(answer.remarks()[0])
    click.echo(about(workload, question.machine))
    report.show(answer, wide_console())
    if not right:
        raise BadInputError(_why_nothing(answer))


def _question(machine: Machine, limits: Mapping[str, int], asked: Mapping[str, Any]) -> SearchQuestion:
    from ebbtide.tuner.configurations.evaluation import SearchQuestion

    config = read_config(asked["ds_config"])
    check_model(asked["model"])
    return SearchQuestion(
        asked["model"],
        machine,
        dict(config or {}),
        asked["sequence"],
        **limits,
        margin=asked["memory_margin"],
        shape=given(asked, *_SETTINGS),
        storage=dict(asked["storage"]),
    )


def _emit(path: str | None, question: SearchQuestion, answer: SearchAnswer, command: tuple[str, ...]) -> None:
    from ebbtide.tuner.answer.instructions import write_config
    from ebbtide.tuner.configurations.measuring import config_of

    if path is None or answer.best is None:
        return
    plan_file = Path(path).resolve().with_suffix(".plan.json")
    with written("--emit-deepspeed", path):
        write_config(config_of(question, answer.best, plan_file, command), path)
    and_plan = f" and its plan to {plan_file}" if answer.best.plan is not None else ""
    click.echo(f"DeepSpeed config of {answer.best.configuration.text()} written to {path}{and_plan}", err=True)


def _passed(measure: int | None, command: tuple[str, ...]) -> set[str] | None:
    """Return the settings of the script that a command to measure has places for. None if nothing is measured."""
    from ebbtide.tuner.configurations.measuring import places

    if measure is None and command:
        raise BadInputError(f"a command has an effect only with --measure N, but got {' '.join(command)}")
    if measure is None:
        return None
    if not command:
        raise BadInputError(
            "--measure must be followed by the training command, such as --measure 3 -- torchrun train.py, but got none"
        )
    program_of(command, f"search --measure {measure}")
    return places(command)


def _why_nothing(answer: SearchAnswer) -> str:
    last = answer.measured[-1]
    output = f":\n{last.output}" if last.output else ""
    return (
        f"at least one of the {len(answer.measured)} configurations must be measured, but all failed. The last one "
        f"{last.why_not}{output}"
    )


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let a terminated search end the command that it measures, as an interrupted one does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _space(
    question: SearchQuestion,
    asked: Mapping[str, Any],
    free: str | None,
    global_batch: int | None,
    passed: set[str] | None,
) -> Space:
    from ebbtide.tuner.configurations.fixed_settings import fixed_knobs
    from ebbtide.tuner.configurations.space import OF_SCRIPT, Configuration, Space

    fixed = fixed_knobs(asked, question.ds_config, global_batch)
    usual = Configuration(
        gpus=asked["gpus"] or question.machine.gpus_per_node,
        offload="optimizer" if asked["ds_config"] is None else "none",  # a config without offload keys does not offload
    )
    named = fixed.free(free)
    held = [] if passed is None else [knob for knob in named if knob in OF_SCRIPT and knob not in passed]
    if held and free is not None:
        raise BadInputError(
            f"--free may name a setting of the script with --measure only if the command has a place for it, but "
            f"got {held[0]}: write {{{held[0]}}} in the command where its value belongs, or leave it out of --free"
        )
    if held:
        kept = usual.changed(**fixed.values)
        settings = ", ".join(f"{knob} {getattr(kept, knob)} ({{{knob}}})" for knob in held)
        click.echo(f"note: not varied, because the command has no place for them: {settings}", err=True)
    varied = tuple(knob for knob in named if knob not in held)
    space = Space.of(usual.changed(**fixed.values), varied, fixed.global_batch, fixed=fixed.values)
    if passed is None or "offload" not in space.choices:
        return space
    without = tuple(value for value in space.choices["offload"] if value != "nvme")  # no flag names its folder
    return replace(space, choices={**space.choices, "offload": without})
