"""The ``tune run`` command, which starts a training command with ebbtide in every process."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from ebbtide.tuner.commands.options import guarded
from ebbtide.tuner.files import BadInputError
from ebbtide.tuner.inputs import program_of
from ebbtide.tuner.lazy_group import Command

NO_ENGINE = (
    'ebbtide: no engine started on this node from a DeepSpeed config with the key "ebbtide". If anything trained, it '
    "was DeepSpeed alone.\n"
)
# Variable with a file that `ebbtide.runtime.frontdoor.initialize` creates when it builds an engine with the key
# "ebbtide".
TOOK = "EBBTIDE_TOOK"
ALONE = "EBBTIDE_ALONE"  # variable that `ebbtide.runtime.frontdoor.hook` reads


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
    program = program_of(command, "run")
    if not no_check:
        _check()
    os.environ["PYTHONPATH"] = os.pathsep.join(_python_path())
    if starts_alone(command, os.environ):
        os.environ |= only_rank(os.environ)
    _watch_for_engines()
    os.execv(program, list(command))  # noqa: S606 - no shell: the words go on as they are


_LAUNCHERS = ("torch.distributed", "deepspeed", "accelerate", "lightning", "horovod")


def starts_alone(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if a command is plain ``python script.py``, not started by a launcher that sets a rank."""
    from ebbtide.runtime.hardware.launcher import VARIABLES

    if not re.fullmatch(r"python[\d.]*", Path(command[0]).name) or not VARIABLES.isdisjoint(environment):
        return False
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    return not module.startswith(_LAUNCHERS)


def only_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a launcher would set for a single training process, such as the
    rank and a free port.

    Without these variables DeepSpeed asks MPI for its rank, and fails if mpi4py is missing. The variable
    `ALONE` tells ebbtide's startup hook which variables to remove if the script starts ranks itself.
    """
    from ebbtide.runtime.hardware.launcher import free_port

    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1")}
    return own | address | {"MASTER_PORT": environment.get("MASTER_PORT", str(free_port())), ALONE: ",".join(own)}


def _watch_for_engines() -> None:
    """Start a process that prints a message after training if no DeepSpeed config had the key "ebbtide".

    A separate process is needed because ``exec`` replaces the current process with the training command. The separate
    process reads from a pipe. The training command holds the other end of the pipe open, so the read returns when the
    training command has ended.
    """
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
