"""The machine that ``plan="auto"`` plans for: measured once per node."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from simulator.machine import Machine

LONGEST = timedelta(minutes=10)  # that others wait for: 30 s, and kernels to compile before


def measured_machine() -> Machine:
    """Measured, or read from the profiler's cache, by the first rank of this node while the others
    wait: at the same time they would measure each other. A collective call.

    Raises:
        RuntimeError: on every rank, if one could not measure.
    """
    from profiler import measure_machine

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return measure_machine()
    group = dist.new_group(backend="gloo", timeout=LONGEST)
    try:
        hosts = _gathered(socket.gethostname(), group)
        first = hosts.index(hosts[dist.get_rank()])
        mine = _measured_or_why_not() if dist.get_rank() == first else None
        every = _gathered(mine, group)
    finally:
        dist.destroy_process_group(group)
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(every) if isinstance(found, str)]
    if failed:
        raise RuntimeError(f'plan="auto" measures the machine first, which failed on {failed[0]}')
    return Machine.model_validate(every[first])


def _measured_or_why_not() -> dict[str, Any] | str:
    from profiler import measure_machine

    try:
        return measure_machine().model_dump(mode="json")
    except Exception as error:  # noqa: BLE001 - the others wait: they are told before it is raised
        return f"{type(error).__name__}: {error}"


def _gathered(mine: Any, group: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=group)
    return every
