"""Facts about this host for a training job: the number of ranks on it, free ports, and shared memory that earlier
DeepSpeed jobs failed to remove.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Launcher(NamedTuple):
    """The environment variables of a launcher that tell each rank its place."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str


LAUNCHERS = (
    # The deepspeed launcher. Without these, DeepSpeed asks MPI.
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun and Accelerate
    Launcher(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),  # Open MPI
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    Launcher(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),  # MVAPICH
    # srun sets these for its steps. In a batch script, SLURM_NTASKS and SLURM_TASKS_PER_NODE describe the allocation,
    # not running ranks.
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
# Variables that show that a launcher started this process. PMIX_RANK is only a sign of it, because PMIx sets no number
# of ranks.
VARIABLES = frozenset(name for launcher in LAUNCHERS for name in launcher) | {"PMIX_RANK"}
ALONE = "EBBTIDE_ALONE"  # variable that `ebbtide.runtime.frontdoor.hook` reads
_LAUNCHING = ("torch.distributed", "deepspeed", "accelerate", "lightning", "horovod")  # modules that start ranks
SHARED = Path("/dev/shm")  # noqa: S108 - DeepSpeed chose it
_YOUNG_S = 10.0  # a buffer that was just made may not be memory-mapped yet


def local_ranks() -> int:
    """Return the number of ranks on this host, from environment variables of the launcher. Return 1 without them."""
    # If torchrun's id of the run is set, torchrun's variable ``LOCAL_WORLD_SIZE`` is read first. If the id is not set,
    # ``LOCAL_SIZE`` is read first, because Accelerate sets ``LOCAL_WORLD_SIZE`` even in processes that torchrun did not
    # start.
    by_torchrun = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    said = by_torchrun or _said("local_size") or "1"
    return max(1, int(said) if said.isdecimal() else _tasks_of_this_node(said))


def _tasks_of_this_node(listed: str) -> int:
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed) for _ in range(int(times or 1))
    ]
    node = int(os.environ.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else 1


def local_rank() -> int:
    """Return the number of this rank among the ranks on this host, from environment variables of the launcher."""
    return int(_said("local_rank") or 0)


def world_size() -> int:
    """Return the number of ranks of the training job."""
    # If torch.distributed is initialized, it knows the number, whatever the environment says: a script may have given
    # the number to ``init_process_group``. Before that, the number is in the launcher's environment variables.
    distributed = _distributed()
    return max(1, int(_said("world_size") or 1)) if distributed is None else int(distributed.get_world_size())


def rank() -> int:
    """Return the number of this rank of the training job, from the sources that `world_size` reads."""
    distributed = _distributed()
    return int(_said("rank") or 0) if distributed is None else int(distributed.get_rank())


def _distributed() -> Any:
    # If the module was never imported, torch.distributed is not initialized.
    distributed: Any = sys.modules.get("torch.distributed")
    known = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if known else None


def _said(field: str) -> str | None:
    return next(filter(None, (os.environ.get(getattr(launcher, field)) for launcher in LAUNCHERS)), None)


def one_node() -> bool:
    """Return whether all ranks of the training job run on this host."""
    return world_size() <= local_ranks()


def only_rank(environment: Mapping[str, str], command: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that a launcher would set for one process. Without them DeepSpeed needs mpi4py.

    Return nothing if a launcher has started this process, or if ``command`` is not ``python`` with a script that may
    train. `ALONE` tells ebbtide's startup hook which variables to remove if the script starts ranks itself.
    """
    if not VARIABLES.isdisjoint(environment) or (command and not _starts_alone(command)):
        return {}
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1")}
    return own | address | {"MASTER_PORT": environment.get("MASTER_PORT", str(free_port())), ALONE: ",".join(own)}


def _starts_alone(command: Sequence[str]) -> bool:
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    return re.fullmatch(r"python[\d.]*", Path(command[0]).name) is not None and not module.startswith(_LAUNCHING)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    A connection to it has just been closed. For a minute the kernel therefore gives it only to programs that ask for
    this port and set ``SO_REUSEADDR``, as PyTorch and uvicorn do.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:  # create_server sets SO_REUSEADDR
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the side that closes first leaves the port in TIME_WAIT
        return port


def remove_shared_buffers(port: int) -> None:
    """Remove the shared memory that the DeepSpeed job with this port of its master rank has left in ``/dev/shm``."""
    # DeepSpeed's CPU collectives allocate 66 MiB per rank there.
    for buffer in SHARED.glob(f"deepspeed_*_{port}_*"):
        buffer.unlink(missing_ok=True)


def left_shared_buffers() -> list[Path]:
    """Return the paths of this user's shared-memory files of DeepSpeed that no process uses any more.

    A killed rank leaves a file of 66 MiB. The file's name contains the job's port but no process id, so the
    memory maps of all processes are searched for the file.
    """
    found = [path for path in sorted(SHARED.glob("deepspeed_*")) if _is_ours(path)]
    if not found:
        return []
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
            used.update(re.findall(rf"{SHARED}/(deepspeed_\S+)", maps.read_text(encoding="utf-8", errors="replace")))
    return [path for path in found if path.name not in used]


def _is_ours(path: Path) -> bool:
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid == os.getuid() and time.time() - about.st_ctime > _YOUNG_S
