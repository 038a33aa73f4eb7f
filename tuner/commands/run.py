"""The ``tune run`` command, which starts a training command with ebbtide in every process."""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

import click
from ebbtide.tuner.commands.options import guarded
from ebbtide.tuner.files import BadInputError
from ebbtide.tuner.inputs import program_of
from ebbtide.tuner.lazy_group import Command

NO_ENGINE = "ebbtide: no DeepSpeed engine with an optimizer was started on this node, so no plan was in force.\n"
# Variable with a file that ebbtide creates when DeepSpeed builds an engine, with or without the key "ebbtide".
TOOK = "EBBTIDE_TOOK"


@click.command(
    cls=Command,
    epilog="Example: tune run -- torchrun --nproc-per-node 2 train.py --deepspeed ds_config.json; "
    "tune run -- deepspeed train.py --deepspeed_config ds_config.json",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--no-check", is_flag=True, help="Start even if `tune doctor` finds a problem.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@guarded
def run(no_check: bool, command: tuple[str, ...]) -> None:
    """Run a training command under ebbtide. The script's DeepSpeed config must have the key "ebbtide".

    Use torchrun, deepspeed, accelerate launch or srun as COMMAND, or python for a single process. The command
    replaces the process of ``tune run``, so signals and the exit code are the command's own.
    """
    from ebbtide.runtime.hardware.launcher import only_rank

    program = program_of(command, "run")
    if not no_check:
        _check()
    os.environ["PYTHONPATH"] = os.pathsep.join(_python_path())
    os.environ |= only_rank(os.environ, command)
    _watch_for_engines()
    click.echo(f"ebbtide: starts {shlex.join(command)}", err=True)
    os.execv(program, list(command))  # noqa: S606 - no shell: the words go on as they are


def _watch_for_engines() -> None:
    # A separate process is needed because ``exec`` replaces the current process with the training command.
    folder = tempfile.mkdtemp(prefix="ebbtide-run-")
    os.environ[TOOK] = str(Path(folder, "took"))
    watched, held = os.pipe()
    os.set_inheritable(held, True)
    if os.fork():
        os.close(watched)
        os.wait()
        return
    if os.fork():  # the watcher must not be a child of the command, which may wait for all its children
        os._exit(0)
    os.setsid()
    os.close(held)
    os.read(watched, 1)
    if not Path(os.environ[TOOK]).exists():
        os.write(2, NO_ENGINE.encode())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _check() -> None:
    from ebbtide.tuner.commands.doctor import show
    from ebbtide.tuner.doctor.examination import fast_part

    wrong = [finding for finding in fast_part() if finding.state == "bad"]
    if wrong:
        show(wrong, err=True)
        raise BadInputError("fix the problems above (`tune doctor` says more), or add --no-check")


def _python_path() -> list[str]:
    startup = str(Path(__file__).resolve().parents[2] / "runtime" / "frontdoor" / "startup")
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != startup]
    return [startup, *given]
