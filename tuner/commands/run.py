"""``tune run``: a launcher and an unchanged script, with the front door open in every process."""

import os
import shutil
from pathlib import Path

import click
from ebbtide.tuner.commands.options import guarded
from ebbtide.tuner.inputs import BadInputError


@click.command(
    epilog="Example: tune run -- torchrun --nproc-per-node 2 train.py --deepspeed ds_config.json; "
    "tune run -- deepspeed train.py --deepspeed_config ds_config.json",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--no-check", is_flag=True, help="Start although `tune doctor` finds a fault.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@guarded
def run(no_check: bool, command: tuple[str, ...]) -> None:
    """Runs a training command whose DeepSpeed config has the key "ebbtide"; nothing else changes.

     The command is torchrun, deepspeed, accelerate launch, python or whatever ends in one of them.
    It takes this process's place, so that signals and the exit code are its own.
    """
    program = shutil.which(command[0])
    if program is None:
        raise BadInputError(f"what follows `tune run --` must be a program on PATH, but got {command[0]!r}")
    if not no_check:
        _check()
    os.environ["PYTHONPATH"] = os.pathsep.join(_python_path())
    os.execv(program, list(command))  # noqa: S606 - no shell: the words go on as they are


def _check() -> None:
    """The part of `tune doctor` that takes milliseconds."""
    from ebbtide.tuner.commands.doctor import show
    from ebbtide.tuner.doctor.examination import fast_part

    wrong = [finding for finding in fast_part() if finding.state == "bad"]
    if wrong:
        show(wrong, err=True)
        raise BadInputError("fix what is above (`tune doctor` says more), or add --no-check")


def _python_path() -> list[str]:
    """The folder of our sitecustomize first, then what the user has set."""
    startup = str(Path(__file__).resolve().parents[2] / "runtime" / "frontdoor" / "startup")
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != startup]
    return [startup, *given]
