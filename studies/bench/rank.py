"""Makes a study that nobody launched with torchrun the only rank of its own job."""

from __future__ import annotations

import atexit
import os
import socket
from pathlib import Path


def become_only_rank() -> None:
    """Sets what torch.distributed reads from the environment, unless a launcher has set it.

    One rank on a port that is free now, so that several studies can run at once.
    """
    if "RANK" in os.environ:
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    atexit.register(remove_shared_buffers, int(os.environ["MASTER_PORT"]))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def remove_shared_buffers(port: int) -> None:
    """Removes what DeepSpeed leaves behind in shared memory for the job on this port.

    Its collectives on the host keep 66 MiB per rank there, and neither a killed rank nor one that
    ends in good order takes them away: some hundred runs fill the machine's memory.
    """
    for buffer in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        buffer.unlink(missing_ok=True)
