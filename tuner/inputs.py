"""Flags of ``tune`` commands that describe a training job, and readers for the machine and the job."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from ebbtide.tuner.files import BadInputError, check_kind, read, read_config
from ebbtide.tuner.quantities import chance, flops_per_s, rate_bytes_per_s

if TYPE_CHECKING:
    from ebbtide.simulator.estimates.hardware.cards import Card
    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.estimates.offloading import Offloading
    from ebbtide.simulator.machine import Machine
    from ebbtide.simulator.workload import Workload

SEQUENCE = 2048  # default number of tokens per sample
Command = Callable[..., Any]
_STARTED = ("launcher", "omp_threads")
_RUN = (*_STARTED, "clip_rate")  # options that a profiled workload does not contain either
# `KERNELS` and `LAUNCHERS` of `ebbtide.simulator.estimates`, which are not imported, so that `--help` is fast.
_KERNELS = ("fused", "eager")
_LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "srun", "python")
_EXCLUDE = (("keep_activations", "recompute_share"), ("no_flash_attention", "flash_version"))


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
LAUNCHER_OPTIONS = (
    click.option(
        "--launcher",
        type=click.Choice(_LAUNCHERS),
        help="Launcher of the ranks (default: deepspeed, with which CPU Adam uses all cores). With several ranks "
        "on a node, torchrun and accelerate limit DeepSpeed's own CPU Adam to one thread per rank.",
    ),
    click.option(
        "--omp-threads",
        type=click.IntRange(min=1),
        help="Value of OMP_NUM_THREADS in each rank. DeepSpeed's own CPU Adam uses this number of threads per rank "
        "(default: depends on --launcher).",
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
    click.option(
        "--sequence", type=click.IntRange(min=1), help="With --model: number of tokens per sample (default: 2048)."
    ),
    click.option(
        "--micro-batch", type=click.IntRange(min=1), help="With --model: number of samples per GPU and forward pass."
    ),
    click.option(
        "--accumulation", type=click.IntRange(min=1), help="With --model: number of micro-batches per optimizer step."
    ),
    click.option(
        "--zero-stage",
        type=click.IntRange(1, 3),
        help="With --model: ZeRO stage 1, 2 or 3 (default: the DeepSpeed config's, or 3).",
    ),
    click.option(
        "--data-parallel",
        type=click.IntRange(min=1),
        help="With --model: number of data-parallel ranks (default: 1, or all cards of a preset such as rtx4090-x2).",
    ),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(min=1),
        help="With --model: degree of tensor parallelism, the number of ranks that split each layer (default: 1).",
    ),
    click.option(
        "--pipeline-parallel",
        type=click.IntRange(min=1),
        help="With --model: number of pipeline stages, with ZeRO-1 only (default: 1).",
    ),
    click.option(
        "--keep-activations", is_flag=True, help="With --model: keep activations, without gradient checkpointing."
    ),
    click.option(
        "--recompute-share",
        type=Text("share", chance),
        help="With --model: share of the layers whose activations are recomputed, e.g. 50% (default: all).",
    ),
    click.option(
        "--kernels",
        type=click.Choice(_KERNELS),
        help="With --model: kernels of norms, activations and rotary embedding. fused: fused or compiled "
        "kernels (torch.compile, Liger, Megatron-LM). eager: PyTorch's own, as in plain transformers "
        "(default: fused).",
    ),
    click.option(
        "--fused-loss",
        is_flag=True,
        help="With --model: the loss is computed without storing all logits, in one kernel or in chunks.",
    ),
    click.option(
        "--no-flash-attention",
        is_flag=True,
        help="With --model: attention scores are stored in memory (attn_implementation eager).",
    ),
    click.option(
        "--flash-version",
        type=click.IntRange(1, 4),
        help="With --model: major version of FlashAttention, e.g. 3 on H100 (default: 2, as in PyTorch).",
    ),
    *LAUNCHER_OPTIONS,
    click.option(
        "--clip-rate",
        type=Text("share", chance),
        help="Fraction of steps that clip gradients or overflow, e.g. 5% (default: 10%). In these steps, updates that "
        "started before the gradient norm was known are rolled back.",
    ),
)


def described(command: Command) -> Command:
    """Add the options that describe another card than a preset's to a ``tune`` command."""
    return _with(CARD_OPTIONS, command)


def launched(command: Command) -> Command:
    """Add the options on how training is launched (``--launcher`` and ``--omp-threads``) to a ``tune`` command."""
    return _with(LAUNCHER_OPTIONS, command)


def workload_options(command: Command) -> Command:
    """Add the options that describe the training job to a ``tune`` command.

    The command gets their values as keyword arguments ``**source``.
    """
    return _with(_WORKLOAD_OPTIONS, command)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    """Add options to a ``tune`` command. Its help shows them in the given order."""
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

    Sizes of memory that are not taken as given are told.

    Returns:
        The machine, the limits of memory as arguments of `Limits.of`, and the sentences that were told.
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
    machine, limits, notes = within(machine, about.get("gpu_memory"), about.get("host_memory"))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return machine, limits, notes


def take_card(source: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `CARD_OPTIONS` from those of a command's options, and return them for `read_asked`."""
    return {flag: source.pop(flag) for flag in _CARD}


def _flags_of(card: Card) -> str:
    return (
        f"--machine {card.like} --gpu-memory {card.gib:g}GiB --flops {card.tflops:g}TFLOPS "
        f"--gpu-bandwidth {card.gb_per_s:g}GB/s --link {card.link_gb_per_s:g}GB/s"
    )


def model_shape(about: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return a dict of `Job` fields, such as the sequence length and the number of ranks, from the values of
    the command-line flags that accompany ``--model``.
    """
    for one, other in _EXCLUDE:
        if about.get(one) and about.get(other) is not None:
            raise BadInputError(f"only one of {_flag(one)} and {_flag(other)} may be given, but got both")
    from ebbtide.simulator.estimates.estimate import default_ranks

    return {
        "sequence": about["sequence"] or SEQUENCE,
        **{name: about[name] for name in ("micro_batch", "accumulation", "zero_stage")},
        "data_parallel": about["data_parallel"] or default_ranks(machine, about),
        **{name: about[name] or 1 for name in ("tensor_parallel", "pipeline_parallel")},
        **started_by(about),
        "recompute": not about["keep_activations"],
        **computed_by(about),
        "clip_rate": about.get("clip_rate"),
    }


def _absent(value: Any) -> bool:
    """Return True for the value of a flag that was not given. The number 0 is a given value."""
    return value is None or value is False


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def computed_by(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of `Job` fields on kernels and recomputation, from the values of the command-line flags
    that set them. Flags that were not given are left out.
    """
    names = ("recompute_share", "kernels", "flash_version", "fused_loss")
    given: dict[str, Any] = {name: about[name] for name in names if not _absent(about.get(name))}
    return given | ({"flash_attention": False} if about.get("no_flash_attention") else {})


def started_by(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of `Job` fields on the launcher and its threads, from the values of the command-line flags
    in `LAUNCHER_OPTIONS`. Flags that were not given are left out.
    """
    return {name: about[name] for name in _STARTED if about[name] is not None}


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
    from ebbtide.simulator.estimates.launchers import started
    from ebbtide.simulator.workload import Workload

    if (workload is None) == (model is None):
        raise BadInputError(
            f"exactly one of --workload and --model must be given, but got {'both' if workload else 'none'}"
        )
    beside = (*beside_workload, *_RUN)
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
        ran = {name: about.get(name) for name in _RUN}
        return Trained(started(read(Workload, workload, "--workload"), **ran), None, config)
    from ebbtide.simulator.estimates.estimate import estimated
    from ebbtide.simulator.estimates.job import Job

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

    beside = {key: shape[key] for key in ("micro_batch", "accumulation", "zero_stage")}
    try:
        parallel = {"ranks": shape["data_parallel"], "tensor_parallel": shape["tensor_parallel"]}
        deepspeed_fields(config, hidden=1, **parallel, **beside)
    except ValueError as error:
        raise BadInputError(f"--ds-config {path}: {error}") from None


def check_offloading(trained: Trained) -> None:
    """Raise BadInputError if no plan that offloads optimizer state can be applied to the training job which
    the command-line flags describe.
    """
    from ebbtide.simulator.estimates.offloading import plan_refusal

    if refusal := plan_refusal(trained.config or {}, trained.offload):
        raise BadInputError(refusal)


def stored_in(trained: Trained, given: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return a dict from directory to bytes: the storage that may hold optimizer state.

    The directories come from ``--storage``, or otherwise from DeepSpeed's config.

    Raises:
        BadInputError: ``--storage`` is given with ZeRO-1 or ZeRO-2, which cannot keep state on a drive.
    """
    from ebbtide.simulator.storage import ANY_BYTES

    storage, stage = dict(given), trained.workload.zero_stage
    if storage and stage < 3:
        raise BadInputError(f"--storage needs ZeRO-3, but got ZeRO-{stage}: leave it out, or take --zero-stage 3")
    named = trained.offload.storage
    return storage or ({named: ANY_BYTES} if named else {})


def tell_notes(workload: Workload) -> None:
    """Print what was assumed for a training job, and what is not simulated."""
    if notes := workload.notes:
        click.echo(f"note: {'; '.join(notes)}", err=True)


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
