"""A measurement, for ``plan="auto"``, of how fast the machine copies, computes and updates. Made once per node."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from ebbtide.runtime.hardware.usable import allowed_cores
from ebbtide.simulator.machine import Machine

T = TypeVar("T")
LONGEST = timedelta(minutes=10)  # time that ranks wait for a rank that measures or plans


def alone() -> bool:
    """Return whether this training process is the only rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


@contextmanager
def ranks_group() -> Iterator[Any]:
    """Create a process group of all ranks for CPU tensors, and destroy it at the end of the ``with`` block.

    This is a collective call.
    """
    group = dist.new_group(backend="gloo", timeout=LONGEST)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def gathered_in(mine: Any, group: Any) -> list[Any]:
    """Return the objects that the ranks of a process group pass in, as a list in the order of ranks."""
    # This is a collective call.
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=group)
    return every


def gathered(mine: T) -> list[T]:
    """Return the objects that all ranks pass in, as a list in the order of ranks. This is a collective call."""
    if alone():
        return [mine]
    with ranks_group() as group:
        return gathered_in(mine, group)


def nodes_and_ranks() -> tuple[int, int]:
    """Return the number of nodes of the training job, and the largest number of ranks on a node."""
    # This is a collective call.
    hosts = gathered(socket.gethostname())
    return len(set(hosts)), max(map(hosts.count, hosts))


def masks_of_this_host() -> list[list[int]]:
    """Return the CPU cores that each rank on this host may use, as one list per rank, in the order of ranks."""
    # This is a collective call.
    host = socket.gethostname()
    every = gathered((host, sorted(allowed_cores())))
    return [cores for there, cores in every if there == host]


class FirstRankError(RuntimeError):
    """The error that every rank raises if a function failed on the rank that called it for the others.

    The message has this rank's number and its error.
    """


def by_the_first(make: Callable[[], T], *, of_each_host: bool = False) -> T:
    """Call a function on one rank, the first of the job or of each host, and return its result on every rank.

    This is a collective call.

    Args:
        of_each_host: True to call the function on the first rank of each host. Every rank gets the result of its host.

    Raises:
        FirstRankError: The function failed on a rank. Raised on every rank.
    """
    if alone():
        return make()
    with ranks_group() as group:
        hosts = gathered_in(socket.gethostname() if of_each_host else "", group)
        first = hosts.index(hosts[dist.get_rank()])
        every = gathered_in(_made_or_why_not(make) if dist.get_rank() == first else (None, ""), group)
    for rank, (_, problem) in enumerate(every):
        if problem:
            raise FirstRankError(f"rank {rank}: {problem}")
    made: T = every[first][0]
    return made


def _made_or_why_not(make: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return make(), ""
    except Exception as error:  # the other ranks wait, so they get the error before it is raised
        return None, f"{type(error).__name__}: {error}"


logger = logging.getLogger("ebbtide")

DRIVE_BYTES, DRIVE_S = 2**28, 2.0  # limits for measuring a folder with stored state


def measured_machine(drives: Sequence[str] = ()) -> Machine:
    """Measure how fast this machine copies, computes and updates, or read this from the profiler's cache.

    This is a collective call. The other ranks of a node wait while its first rank measures, so as not to disturb it.

    Args:
        drives: Folders for optimizer state, measured in every call. All ranks must give the same number of folders.

    Raises:
        RuntimeError: One rank could not measure. Raised on every rank.
        OSError: A folder cannot be written to.
    """
    try:
        return by_the_first(lambda: _with_drives(drives), of_each_host=True)
    except FirstRankError as error:
        raise RuntimeError(
            f"an automatic plan measures the machine before training, but the measurement failed ({error}). Fix the "
            'cause, or give a plan file instead of "automatic"'
        ) from None


def _say(done: int, total: int, stage: str) -> None:
    if done == 0:
        logger.info("measuring this machine's rates, which takes half a minute. They are kept for the next start")
    elif done < total:
        logger.info("measuring this machine's rates: %s (%d of %d)", stage, done + 1, total)


def _with_drives(drives: Sequence[str]) -> Machine:
    from ebbtide.profiler import measure_machine
    from ebbtide.profiler.rates.storage import measure_drive

    machine = measure_machine(progress=_say)
    found = {name: measure_drive(Path(name), DRIVE_BYTES, DRIVE_S) for name in drives}
    return machine.model_copy(update={"drives": {**machine.drives, **found}})
