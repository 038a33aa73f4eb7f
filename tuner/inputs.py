"""What the commands read: machines, workloads, plans, from files, presets and model configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from simulator.machine import Machine
    from simulator.plan import Plan
    from simulator.workload import Workload

T = TypeVar("T")
SEQUENCE = 2048  # tokens per sample, where nobody says
Command = Callable[..., Any]


class BadInputError(click.ClickException):
    """Exit code 2 with the rule, the value and the flag to change."""

    exit_code = 2


MACHINE = click.option(
    "--machine", required=True,
    help="machine.json, made by `tune profile`, or a preset such as h200 or rtx4090.",
)  # fmt: skip
_WORKLOAD_OPTIONS = (
    click.option("--workload", help="workload.json of the training run."),
    click.option("--model", help="Instead: a Hugging Face config.json, or a plain description."),
    click.option("--ds-config", help="With --model: DeepSpeed's config; may hold \"auto\"."),
    click.option("--sequence", type=click.IntRange(min=1),
                 help="With --model: tokens per sample; default: 2048."),
    click.option("--micro-batch", type=click.IntRange(min=1), help="With --model: samples."),
    click.option("--accumulation", type=click.IntRange(min=1), help="With --model: micro-batches."),
    click.option("--zero-stage", type=click.IntRange(1, 3),
                 help="With --model: 1, 2 or 3; default: the DeepSpeed config's, else 3."),
    click.option("--data-parallel", type=click.IntRange(min=1),
                 help="With --model: ranks of ZeRO; default: 1."),
    click.option("--tensor-parallel", type=click.IntRange(min=1),
                 help="With --model: ranks that share each layer; default: 1."),
    click.option("--pipeline-parallel", type=click.IntRange(min=1),
                 help="With --model: parts of the layers, with ZeRO-1; default: 1."),
    click.option("--keep-activations", is_flag=True, help="With --model: no checkpointing of "
                 "activations."),
)  # fmt: skip


def workload_options(command: Command) -> Command:
    """Adds the flags that say what is trained; the command gets them as ``**source``."""
    for option in reversed(_WORKLOAD_OPTIONS):
        command = option(command)
    return command


def read_machine(given: str) -> Machine:
    """A machine file, or a preset where no such file exists."""
    from simulator.estimates.presets import PRESETS, preset
    from simulator.machine import Machine

    if not Path(given).exists():
        if given in PRESETS:
            return preset(given)
        if not given.endswith(".json"):
            raise BadInputError(
                f"--machine must be a machine file or one of {', '.join(PRESETS)}, but got {given}"
            )
    return _read(Machine, given, "--machine")


def model_shape(about: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `workload_from_model` from the flags that go with ``--model``."""
    return {
        "sequence": about["sequence"] or SEQUENCE,
        "micro_batch": about["micro_batch"],
        "gradient_accumulation_steps": about["accumulation"],
        "zero_stage": about["zero_stage"],
        "data_parallel": about["data_parallel"] or 1,
        "tensor_parallel": about["tensor_parallel"] or 1,
        "pipeline_parallel": about["pipeline_parallel"] or 1,
        "activation_checkpointing": "none" if about["keep_activations"] else "full",
    }


def read_workload(
    machine: Machine,
    workload: str | None,
    model: str | None,
    *,
    beside_workload: Sequence[str] = (),
    **about: Any,
) -> Workload:
    """A workload file, or an estimate from a model's config.

    Args:
        beside_workload: those of the flags for ``--model`` that the command needs anyway.

    Raises:
        BadInputError: neither or both are given, one that cannot be used, or a flag that would
            change nothing.
    """
    from simulator.workload import Workload

    if (workload is None) == (model is None):
        raise BadInputError(
            "exactly one of --workload and --model must be given, but got "
            f"{'both' if workload else 'none'}"
        )
    without_effect = [k for k, v in about.items() if v and k not in beside_workload]
    if workload is not None and without_effect:
        flag = "--" + without_effect[0].replace("_", "-")
        raise BadInputError(
            f"{flag} goes with --model, since a profiled workload has its own, but got --workload "
            f"{workload}: leave {flag} out, or profile again"
        )
    if workload is not None:
        return _read(Workload, workload, "--workload")
    from simulator.estimates.deepspeed_keys import loaded
    from simulator.estimates.workload import workload_from_model

    assert model is not None
    try:
        loaded(about["ds_config"])
    except ValueError as error:
        raise BadInputError(f"--ds-config {about['ds_config']}: {error}") from None
    try:
        return workload_from_model(model, machine, about["ds_config"], **model_shape(about))
    except ValueError as error:
        raise BadInputError(f"--model {model}: {error}") from None


def check_offloading(ds_config: str | Mapping[str, Any] | None) -> None:
    """Refuses what no plan can be applied to: what training under one refuses, and what a plan is
    not simulated with.
    """
    from simulator.estimates.deepspeed_keys import loaded
    from simulator.estimates.offloading import offloading, plan_obstacle

    config = loaded(ds_config)
    obstacle = plan_obstacle(config)
    if obstacle:
        raise BadInputError(obstacle)
    moved = offloading(config)
    if moved.beyond_plans:
        why = "which moves optimizer state between host and device memory only"
        if moved.optimizer != "nvme" and moved.parameters == "none":
            why = ("whose times and memory are not simulated with activations that move too "
                   "(training under a plan takes the key as it is)")  # fmt: skip
        raise BadInputError(
            f"{moved.beyond_plans} must be absent for a plan, {why}: remove it, or simulate stock "
            "DeepSpeed with it (tune simulate or tune search with the same --ds-config)"
        )


def check_distinct(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Refuses an output that would overwrite another one, or what is read.

    Args:
        outputs, inputs: paths by their flags.
    """
    taken = {Path(path).resolve(): flag for flag, path in inputs.items() if path}
    for flag, path in outputs.items():
        other = taken.setdefault(Path(path).resolve(), flag) if path else flag
        if other != flag:
            raise BadInputError(
                f"{flag} must be another file than {other}, but got {path} for both"
            )


def tell_unread(work: Workload, ds_config: str | None) -> None:
    """One quiet line about what was taken for DeepSpeed's keys, and which of them do not count."""
    notes = work.provenance.partition("; ")[2]
    if ds_config is not None and notes:
        click.echo(f"note: {notes}", err=True)


def read_ds_config(path: str) -> dict[str, Any]:
    """DeepSpeed's config as it stands in a file, comments and all.

    Raises:
        BadInputError: no such file, or no JSON object.
    """
    import hjson

    try:
        config = hjson.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadInputError(f"--ds-config must be a JSON file, but got {path}: {error}") from None
    if not isinstance(config, dict):
        raise BadInputError(f"--ds-config must hold a JSON object, but got {path}")
    return config


def read_plan(path: str) -> Plan:
    """A plan file."""
    from simulator.plan import Plan

    try:
        return Plan.load(path)
    except UnicodeDecodeError as error:
        raise BadInputError(f"a plan must be a JSON file, but got {path}: {error}") from None


def _read(kind: type[T], path: str, flag: str) -> T:
    from pydantic import ValidationError

    from simulator.plan import explain

    try:
        return kind.load(path)  # type: ignore[attr-defined, no-any-return]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{flag} must be a readable file, but got {path}: {error}") from None
    except ValidationError as error:
        name = kind.__name__.lower()
        raise BadInputError(
            f"{flag} must be a {name} file, but got {path}: {explain(error)}"
        ) from None


@contextmanager
def written(flag: str, path: str) -> Iterator[None]:
    """An error in writing the file names its flag."""
    try:
        yield
    except (OSError, ValueError) as error:  # matplotlib: an unknown format
        raise BadInputError(f"{flag} must be a file that can be written, but got {path}: {error}"
                            ) from None  # fmt: skip
