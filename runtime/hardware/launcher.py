"""Facts about this host for a training job: the number of ranks on it, free ports, and shared memory that earlier
DeepSpeed jobs failed to remove.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Each launcher's variable for the number of ranks on this host: DeepSpeed's, torchrun's, MPI's.
LOCAL_SIZES = (
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
# Each launcher's variables for the number of ranks of the whole job, and for the number of this rank. DeepSpeed asks
# MPI if its own are missing.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
SHARED = Path("/dev/shm")  # noqa: S108 - DeepSpeed chose it
_YOUNG_S = 10.0  # a buffer that was just made may not be mapped yet


def local_ranks() -> int:
    """Return the number of ranks on this host, from environment variables of the launcher. Return 1 without them.

    If torchrun's id of the run is set, torchrun's variable ``LOCAL_WORLD_SIZE`` is read first. If the id is not set,
    ``LOCAL_SIZE`` is read first, because Accelerate sets ``LOCAL_WORLD_SIZE`` even in processes that torchrun did not
    start.
    """
    first = ("LOCAL_WORLD_SIZE",) if "TORCHELASTIC_RUN_ID" in os.environ else ()
    return max(1, _said((*first, *LOCAL_SIZES), 1))


def world_size() -> int:
    """Return the number of ranks of the training job.

    If torch.distributed is initialized, it knows the number, whatever the environment says: a script may have given
    the number to ``init_process_group``. Before that, the number is in the launcher's environment variables. Return 1
    without them.
    """
    distributed = _distributed()
    return max(1, _said(WORLD_SIZES, 1)) if distributed is None else int(distributed.get_world_size())


def rank() -> int:
    """Return the number of this rank of the training job, from the sources that `world_size` reads. Return 0 without
    them.
    """
    distributed = _distributed()
    return _said(RANKS, 0) if distributed is None else int(distributed.get_rank())


def _distributed() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")  # what was never imported is not initialized
    known = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if known else None


def _said(variables: Sequence[str], otherwise: int) -> int:
    return int(next(filter(None, map(os.environ.get, variables)), otherwise))


def one_node() -> bool:
    """Return whether all ranks of the training job run on this host."""
    return world_size() <= local_ranks()


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def remove_shared_buffers(port: int) -> None:
    """Remove the shared memory that the DeepSpeed job with this port of its master rank has left in
    ``/dev/shm``.

    DeepSpeed's CPU collectives allocate 66 MiB per rank there. No rank removes its memory, whether it ends
    normally or is killed: a few hundred runs fill the machine's memory.
    """
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
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            used.update(re.findall(rf"{SHARED}/(deepspeed_\S+)", maps.read_text(encoding="utf-8", errors="replace")))
    return [path for path in found if path.name not in used]


def _is_ours(path: Path) -> bool:
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid == os.getuid() and time.time() - about.st_ctime > _YOUNG_S


def remove_left_buffers() -> int:
    """Remove the shared-memory files that ended DeepSpeed processes have left. Return the number of bytes
    freed.
    """
    freed = 0
    for path in left_shared_buffers():
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed
