"""Facts about this host for a training job: the number of ranks on it, free ports, and shared memory that earlier
DeepSpeed jobs failed to remove.
"""

import contextlib
import os
import re
import socket
import time
from pathlib import Path

# Each launcher's variable for the number of ranks on this host: DeepSpeed's, torchrun's, MPI's.
LOCAL_SIZES = (
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
SHARED = Path("/dev/shm")  # noqa: S108 - DeepSpeed chose it
_YOUNG_S = 10.0  # a buffer that was just made may not be mapped yet


def local_ranks() -> int:
    """Return the number of ranks on this host, from environment variables of the launcher. Return 1 without them.

    If torchrun's id of the run is set, torchrun's variable ``LOCAL_WORLD_SIZE`` is read first. If the id is not set,
    ``LOCAL_SIZE`` is read first, because Accelerate sets ``LOCAL_WORLD_SIZE`` even in processes that torchrun did not
    start.
    """
    first = ("LOCAL_WORLD_SIZE",) if "TORCHELASTIC_RUN_ID" in os.environ else ()
    said = (os.environ.get(variable) for variable in (*first, *LOCAL_SIZES))
    return max(1, int(next(filter(None, said), 1)))


def one_node() -> bool:
    """Return whether all ranks of the training job run on this host."""
    return int(os.environ.get("WORLD_SIZE") or 1) <= local_ranks()


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
