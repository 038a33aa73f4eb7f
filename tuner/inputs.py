"""Flags of ``tune`` commands that describe a training job, and readers for the machine and the job."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.shell_completion import CompletionItem
from ebbtide.tuner.files import BadInputError, check_kind, read, read_config
from ebbtide.tuner.lazy_group import Later
from ebbtide.tuner.quantities import chance, flops_per_s, rate_bytes_per_s

if TYPE_CHECKING:
    from ebbtide.simulator.estimates.cards import Card
    from ebbtide.simulator.estimates.job import Job, Setting
    from ebbtide.simulator.estimates.offloading import Offloading
    from ebbtide.simulator.machine import Machine
    from ebbtide.simulator.workload import Workload

Command = Callable[..., Any]


class Text(click.ParamType):  # type: ignore[type-arg]
    """A type of click option: a text that a given function parses. The function raises ValueError for bad text."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def complete_machines(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    from ebbtide.simulator.estimates.presets import preset_names

    names = [CompletionItem(name) for name in preset_names() if name.startswith(begun.lower())]
    return names or [CompletionItem(begun, type="file")]


def complete_models(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the known models that begin with a text, as words without spaces."""
    from ebbtide.simulator.estimates.models.families import HUB, MODELS

    known = (*(name.lower().replace(" ", "-") for name in MODELS), *HUB)
    names = [CompletionItem(name) for name in dict.fromkeys(known) if name.lower().startswith(begun.lower())]
    return names or [CompletionItem(begun, type="file")]


MACHINE = click.option(
    "--machine",
    required=True,
    shell_complete=complete_machines,
    help="Machine file (machine.json of `tune profile`), or a preset such as h200 or rtx4090.",
)
# Flags that describe a card without a preset -> arguments of `ebbtide.simulator.preset`.
_CARD = {"flops": "flops", "gpu_bandwidth": "gpu_bytes_per_s", "link": "link_bytes_per_s"}
CARD_OPTIONS = (
    click.option(
        "--flops",
        type=Text("flop/s", flops_per_s),
        help="Another card than the preset's: dense 16-bit speed by its data sheet, e.g. 125TFLOPS.",
    ),
    click.option(
        "--gpu-bandwidth",
        type=Text("rate", rate_bytes_per_s),
        help="Another card than the preset's: bandwidth of its memory by its data sheet, e.g. 900GB/s.",
    ),
    click.option(
        "--link",
        type=Text("rate", rate_bytes_per_s),
        help="Rate of copies between host memory and the card in each direction, instead of the preset's, e.g. 12GB/s.",
    ),
)
MODEL_FILE = (
    'a Hugging Face config.json, a known name such as "Llama 3 8B", or a JSON file with the keys layers, hidden, '
    "heads and vocabulary"
)
_WORKLOAD_OPTIONS = (
    click.option("--workload", help="Workload file of the training run (workload.json of `tune profile`)."),
    click.option(
        "--model", shell_complete=complete_models, help=f"Model to train, instead of --workload: {MODEL_FILE}."
    ),
    click.option("--ds-config", help='With --model: DeepSpeed config. May contain "auto".'),
)


def described(command: Command) -> Command:
    """Add the options that describe another card than a preset's to a ``tune`` command."""
    return _with(CARD_OPTIONS, command)


def job_options(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of settings of a job, or of all of them, to a ``tune`` command.

    The command gets the values of all options together as `read_trained` and `given` take them.
    """

    def add(command: Command) -> Command:
        vars(command).setdefault("__click_params__", []).append(Later(lambda: options_of(names)))
        return command

    return add


def options_of(names: Sequence[str] = (), job: type[Job] | None = None) -> list[click.Option]:
    """Return the options that follow from the fields of `Job`, or from those with some names."""
    from ebbtide.simulator.estimates.job import Job as Described
    from ebbtide.simulator.estimates.job import settings

    return [_option(one) for one in settings(job or Described) if not names or one.name in names]


def _option(setting: Setting) -> click.Option:
    text = f"With --model: {setting.asked.help}" if setting.asked.profiled else setting.asked.help
    if setting.kind is bool:
        return click.Option([_flag(setting.flag)], is_flag=True, help=text)
    known = get_args(setting.kind)
    kind: Any
    if setting.kind is float:
        kind = Text("share", chance)
    elif known and isinstance(known[0], str):
        kind = click.Choice(known)
    else:
        kind = click.IntRange(min(known, default=1), max(known, default=None))
    return click.Option([_flag(setting.flag)], type=kind, help=text)


def workload_options(command: Command) -> Command:
    """Add the options of a training job to a ``tune`` command, which gets their values as ``**source``."""
    return _with(_WORKLOAD_OPTIONS, job_options()(command))


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    """Add options so that the help shows them in the given order."""
    for option in reversed(options):
        command = option(command)
    return command


def read_machine(given: str) -> Machine:
    """Load a machine from a file. If there is no such file, return the preset of that name."""
    from ebbtide.simulator.estimates.presets import card_named, preset
    from ebbtide.simulator.machine import Machine

    if not Path(given).exists() and not given.endswith(".json"):
        try:
            return preset(given)
        except ValueError as error:
            card, rule = card_named(given), "--machine must be a preset or a machine file."
            flags = f" There is none of the {given}. Describe it by its data sheet: {_flags_of(card)}" if card else ""
            raise BadInputError(f"{rule}{flags or f' {error}'}", "machine") from None
    return read(Machine, given, "--machine")


def read_asked(given: str, about: Mapping[str, Any]) -> tuple[Machine, dict[str, int], tuple[str, ...]]:
    """Load a machine as `read_machine` does, as the flags about its card and its memory describe it.

    Returns:
        The machine, the limits of memory as arguments of `Limits.of`, and sentences about sizes of memory that are not
        taken as given. The caller tells them.
    """
    from ebbtide.simulator.estimates.presets import preset
    from ebbtide.simulator.limits import within

    machine = read_machine(given)
    figures = {name: about[flag] for flag, name in _CARD.items() if about.get(flag) is not None}
    if figures:
        if not machine.is_preset:
            flags = ", ".join(_flag(flag) for flag in _CARD if about.get(flag) is not None)
            raise BadInputError(
                f"{flags} must be given with a preset, whose card they change, but got --machine {given}"
            )
        machine = preset(machine.name, **figures)
        click.echo(f"note: the machine is the preset {machine.name} with another card, as described", err=True)
    return within(machine, about.get("gpu_memory"), about.get("host_memory"))


def take_card(source: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `CARD_OPTIONS` from those of a command's options, and return them for `read_asked`."""
    return {flag: source.pop(flag) for flag in _CARD}


def _flags_of(card: Card) -> str:
    return (
        f"--machine {card.like} --gpu-memory {card.gib:g}GiB --flops {card.tflops:g}TFLOPS "
        f"--gpu-bandwidth {card.gb_per_s:g}GB/s --link {card.link_gb_per_s:g}GB/s"
    )


def model_shape(about: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return a dict of `Job` fields from the values of the flags that accompany ``--model``. Those without a flag are
    left out, except the number of ranks.
    """
    from ebbtide.simulator.estimates.estimate import default_ranks
    from ebbtide.simulator.estimates.job import settings

    for one in settings():
        if about.get(one.asked.unless) and not _absent(about.get(one.flag)):
            flags = f"{_flag(one.asked.unless)} and {_flag(one.flag)}"
            raise BadInputError(f"only one of {flags} may be given, but got both")
    shape = given(about)
    return {**shape, "data_parallel": shape.get("data_parallel") or default_ranks(machine, shape)}


def given(about: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a dict of `Job` fields from the values of flags, or of some of them. Flags that were not given are left
    out.
    """
    from ebbtide.simulator.estimates.job import settings

    return {
        one.name: one.value(about[one.flag], one.flag)
        for one in settings()
        if not _absent(about.get(one.flag)) and (not names or one.name in names)
    }


def _absent(value: Any) -> bool:
    """Return True for the value of a flag that was not given. The number 0 is a given value."""
    return value is None or value is False


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Trained:
    """The training job that the flags of a ``tune`` command describe.

    Attributes:
        workload: Measured workload from a file, or one estimated from a model's config.
        job: Job that the workload was estimated from. None if the workload was measured.
        config: Contents of DeepSpeed's config. None if no flag names one.
    """

    workload: Workload
    job: Job | None = None
    config: Mapping[str, Any] | None = None

    @cached_property
    def offload(self) -> Offloading:
        from ebbtide.simulator.estimates.offloading import offloading

        return offloading(self.config) if self.job is None else self.job.offload


def read_trained(
    machine: Machine, workload: str | None, model: str | None, *, beside_workload: Sequence[str] = (), **about: Any
) -> Trained:
    """Load a measured workload from a file, or estimate a workload from a model's config.

    Args:
        beside_workload: Names of flags for ``--model`` that may also be used with ``--workload``.
        about: Values of the flags for ``--model``.

    Raises:
        BadInputError: Neither or both of workload and model are given, a file cannot be used, or a flag has no effect.
    """
    from ebbtide.simulator.estimates.estimate import estimated
    from ebbtide.simulator.estimates.job import Job, settings, started
    from ebbtide.simulator.workload import Workload

    if (workload is None) == (model is None):
        raise BadInputError(
            f"exactly one of --workload and --model must be given, but got {'both' if workload else 'none'}"
        )
    run = [one.name for one in settings() if not one.asked.profiled]
    beside = (*beside_workload, *run)
    without_effect = [k for k, v in about.items() if not _absent(v) and k not in beside]
    if workload is not None and without_effect:
        flag = _flag(without_effect[0])
        raise BadInputError(
            f"{flag} can be given only with --model, because a workload file already contains this setting, but got "
            f"--workload {workload}. Leave out {flag}, or run `tune profile` again with the other setting"
        )
    config = read_config(about.get("ds_config"))
    if model is not None:
        check_model(model)
    if workload is not None:
        ran = {name: about.get(name) for name in run}
        return Trained(started(read(Workload, workload, "--workload"), **ran), None, config)
    assert model is not None
    shape = model_shape(about, machine)
    if config is not None:
        _check_fields(config, about["ds_config"], shape)
    try:
        job = Job.of_deepspeed(model, config, **shape)
        return Trained(estimated(job, machine), job, config)
    except ValueError as error:
        raise BadInputError(f"--model {model}: {error}") from None


def check_model(path: str) -> None:
    """Refuse a file that is not a model's config, and a model with quantized weights, which cannot be fully trained."""
    from ebbtide.simulator.estimates.models.architecture import quantized
    from ebbtide.simulator.page import MODEL_CONFIG

    if refusal := quantized(check_kind("--model", path, MODEL_CONFIG)):
        raise BadInputError(f"--model {path}: {refusal}")


def _check_fields(config: Mapping[str, Any], path: str, shape: Mapping[str, Any]) -> None:
    from ebbtide.simulator.estimates.deepspeed_config import deepspeed_fields

    beside: dict[str, Any] = {key: shape.get(key) for key in ("micro_batch", "accumulation", "zero_stage")}
    try:
        parallel = {"ranks": shape["data_parallel"], "tensor_parallel": shape.get("tensor_parallel", 1)}
        deepspeed_fields(config, hidden=1, **parallel, **beside)
    except ValueError as error:
        raise BadInputError(f"--ds-config {path}: {error}") from None


def check_offloading(trained: Trained) -> None:
    """Raise BadInputError if no plan that offloads optimizer state can be applied to the training job."""
    from ebbtide.simulator.estimates.offloading import plan_refusal

    if refusal := plan_refusal(trained.config or {}, trained.offload):
        raise BadInputError(refusal)


def stored_in(trained: Trained, given: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the bytes that optimizer state may take, by directory.

    Raises:
        BadInputError: ``--storage`` is given below ZeRO-3, which cannot keep state on a drive.
    """
    from ebbtide.simulator.machine import ANY_BYTES

    storage, stage = dict(given), trained.workload.zero_stage
    if storage and stage < 3:
        raise BadInputError(f"--storage needs ZeRO-3, but got ZeRO-{stage}: leave it out, or take --zero-stage 3")
    named = trained.offload.storage
    return storage or ({named: ANY_BYTES} if named else {})


def tell_notes(notes: Iterable[str]) -> None:
    """Print what was assumed for a training job, and what is not simulated."""
    if text := "; ".join(notes):
        click.echo(f"note: {text}", err=True)


def program_of(command: Sequence[str], name: str) -> str:
    """Return the path of the program that a user's command starts.

    Args:
        command: The words of the command that follow ``tune run --`` or ``tune verify --``.
        name: ``run`` or ``verify``.
    """
    found = shutil.which(command[0])
    if found is None:
        hint = f". Start the script by a launcher or by `python {command[0]}`" if command[0].endswith(".py") else ""
        raise BadInputError(
            f"the command after `tune {name} --` must be a program on PATH, but got {command[0]!r}{hint}"
        )
    return found
