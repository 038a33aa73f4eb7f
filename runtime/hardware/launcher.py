"""Traces of launchers and DeepSpeed jobs on a host: ranks, ports, shared memory."""

import os
import socket
from pathlib import Path

# Each launcher's variable for the number of ranks on this host: DeepSpeed's, torchrun's, MPI's.
LOCAL_SIZES = (
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def local_ranks() -> int:
    """Ranks on this host, as their launcher says; 1 where none does.

    Accelerate writes torchrun's variable in processes that torchrun did not start, so it counts
    before another launcher's only where torchrun's run has a name.
    """
    first = ("LOCAL_WORLD_SIZE",) if "TORCHELASTIC_RUN_ID" in os.environ else ()
    said = (os.environ.get(variable) for variable in (*first, *LOCAL_SIZES))
    return max(1, int(next(filter(None, said), 1)))


def one_node() -> bool:
    """Return whether all ranks of the job run on this host."""
    return int(os.environ.get("WORLD_SIZE") or 1) <= local_ranks()


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def remove_shared_buffers(port: int) -> None:
    """Remove the shared memory that DeepSpeed leaves for the job on this port.

    Its collectives on the host keep 66 MiB per rank there. Neither a killed rank nor one that
    ends normally removes them: some hundred runs fill the machine's memory.
    """
    for buffer in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):  # noqa: S108 - it is there
        buffer.unlink(missing_ok=True)
