"""A measurement, for ``plan="auto"``, of how fast the machine copies, computes and updates. It is made once per
node.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ebbtide.runtime.replan.ranks import alone, gathered_in, ranks_group
from ebbtide.simulator.machine import Machine

DRIVE_BYTES, DRIVE_S = 2**28, 2.0  # at most, of a folder that state is stored in


def measured_machine(drives: Sequence[str] = ()) -> Machine:
    """Measure how fast this machine copies, computes and updates, or read this from the profiler's cache.

    The first rank of each node does this. The other ranks wait, because concurrent measurements would disturb each
    other. This is a collective call.

    Args:
        drives: Folders for optimizer state. Their drives are measured in every call and never read from the cache. All
            ranks must give the same number of folders.

    Raises:
        RuntimeError: One rank could not measure. Raised on every rank.
        OSError: A folder cannot be written to.
    """
    if alone():
        return _with_drives(drives)
    with ranks_group() as group:
        hosts = gathered_in(socket.gethostname(), group)
        first = hosts.index(hosts[dist.get_rank()])
        mine = _measured_or_why_not(drives) if dist.get_rank() == first else None
        every = gathered_in(mine, group)
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(every) if isinstance(found, str)]
    if failed:
        raise RuntimeError(
            f'plan="auto" measures the machine before training, but the measurement failed ({failed[0]}). Fix the '
            'cause, or give a plan file instead of "auto"'
        )
    return Machine.model_validate(every[first])


def _with_drives(drives: Sequence[str]) -> Machine:
    from ebbtide.profiler import measure_machine
    from ebbtide.profiler.rates.storage import measure_drive

    machine = measure_machine()
    found = {name: measure_drive(Path(name), DRIVE_BYTES, DRIVE_S) for name in drives}
    return machine.model_copy(update={"drives": {**machine.drives, **found}})


def _measured_or_why_not(drives: Sequence[str]) -> dict[str, Any] | str:
    try:
        return _with_drives(drives).model_dump(mode="json")
    except Exception as error:  # the others wait: they are told before it is raised
        return f"{type(error).__name__}: {error}"
