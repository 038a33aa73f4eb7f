"""Which cores the host updates run on: near the GPU, and not the training thread's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys")


def update_cores(pci_address: str | None, sysfs: Path = SYSFS) -> list[int]:
    """The cores for one rank's host updates, in order; empty: wherever the system likes.

    Those of the GPU's NUMA node that this process may use, shared among the ranks on that node,
    less one for the rank's training thread. A launcher that has bound the ranks to cores already
    (``deepspeed --bind_cores_to_rank``) has divided them: then they are taken as they are.

    Args:
        pci_address: the GPU's, like ``0000:3b:00.0``; None: any NUMA node.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    near = [core for core in _node_cores(pci_address, sysfs) if core in allowed] or allowed
    if len(allowed) == (os.cpu_count() or 1):
        near = _share(near, len(allowed) // len(near))
    return near[1:] if len(near) > 1 else near


def _share(cores: list[int], nodes: int) -> list[int]:
    """This rank's part of a NUMA node's cores; ranks are dealt to the nodes in order."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1))
    on_node = -(-ranks // max(1, nodes))
    rank = int(os.environ.get("LOCAL_RANK") or 0) % on_node
    count = len(cores) // on_node
    return cores[rank * count : (rank + 1) * count] or cores


def _node_cores(pci_address: str | None, sysfs: Path) -> list[int]:
    if pci_address is None:
        return []
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return []  # one node, or a container that hides them
    return parse_cpulist(listed)


def parse_cpulist(text: str) -> list[int]:
    """``0-3,8`` -> [0, 1, 2, 3, 8]: the kernel's notation."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.extend(range(int(first), int(last or first) + 1))
    return cores


def bind(cores: list[int]) -> None:
    """Binds the calling thread, and the OpenMP threads it will start; an empty list does not."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def bound(cores: list[int]) -> Iterator[None]:
    """The calling thread is on these cores inside the block: memory it touches first is theirs."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
