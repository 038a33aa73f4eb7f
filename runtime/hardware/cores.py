"""The choice of CPU cores for one rank's optimizer updates: near its GPU, and apart from the training thread's core."""

import contextlib
import os
import platform
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from ebbtide.runtime.hardware.launcher import local_rank, local_ranks
from ebbtide.runtime.hardware.usable import cpu_quota

SYSFS = Path("/sys")


def update_cores(
    pci_address: str | None, sysfs: Path = SYSFS, gpus: Sequence[str | None] = (), masks: Sequence[Collection[int]] = ()
) -> list[int]:
    """Return a rank's CPU cores for optimizer updates, by physical core. Empty if the system has no CPU affinity.

    These are the allowed cores of the GPU's NUMA node, less one physical core for the rank's training thread, and at
    most a container's CPU quota. Ranks with the same allowed cores, as in a container, divide these among themselves.
    A launcher that binds each rank to cores of its own (``deepspeed --bind_cores_to_rank``) has divided them already.

    Args:
        pci_address: PCI address of the GPU, like ``0000:3b:00.0``. None selects any NUMA node.
        gpus: PCI addresses of the GPUs of all ranks on this host, in order. If empty, ranks are assumed to be spread
            evenly over NUMA nodes.
        masks: Allowed cores of all ranks on this host, in order. If empty, a process that may use all cores is assumed
            to share them with the other ranks. One that may use fewer is assumed to be bound to them by a launcher.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    whole = _own(pci_address, sysfs, gpus, masks)
    spared = whole[1:] if len(whole) > 1 else [whole[0][1:]]
    cores = [core for together in spared for core in together] or whole[0]
    return cores[: _most(cpu_quota())]


def spared_cores(
    pci_address: str | None, sysfs: Path = SYSFS, gpus: Sequence[str | None] = (), masks: Sequence[Collection[int]] = ()
) -> list[int]:
    """Return the cores that `update_cores` leaves to a rank's training thread: one physical core, or one thread of the
    only one. Empty if it leaves none.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    whole = _own(pci_address, sysfs, gpus, masks)
    return whole[0] if len(whole) > 1 else whole[0][:1] if whole[0][1:] else []


def _own(
    pci_address: str | None, sysfs: Path, gpus: Sequence[str | None], masks: Sequence[Collection[int]]
) -> list[list[int]]:
    allowed, near = os.sched_getaffinity(0), near_cores(pci_address, sysfs)
    rank, same = local_rank(), [r for r, mask in enumerate(masks) if set(mask) == allowed]
    whole = _physical(near, sysfs)
    if len(same) == len(masks) if masks else len(allowed) == (os.cpu_count() or 1):
        return _share(whole, _neighbours(pci_address, sysfs, gpus, len(allowed) // len(near)))
    return _share(whole, (len(same), same.index(rank))) if rank in same else whole


def threads_of_updates(cores: int, sysfs: Path = SYSFS) -> int:
    """Return ``cores`` less those of one training thread: a physical core, or one core of a container's quota."""
    spared = len(_physical(near_cores(None, sysfs), sysfs)[0]) if cpu_quota() is None else 1
    return max(1, cores - spared)


def _most(quota: float | None) -> int | None:
    return None if quota is None else max(1, int(quota / local_ranks()) - 1)


def _physical(cores: Sequence[int], sysfs: Path) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in cores:
        groups.setdefault(_siblings(core, sysfs), []).append(core)
    return list(groups.values())


def _siblings(core: int, sysfs: Path) -> tuple[int, ...]:
    try:
        listed = (sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text(encoding="utf-8")
        return tuple(parse_cpulist(listed)) or (core,)
    except OSError:
        return (core,)


def near_cores(pci_address: str | None, sysfs: Path = SYSFS) -> list[int]:
    """Return the CPU cores of the GPU's NUMA node that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    return [core for core in _node_cores(pci_address, sysfs) if core in allowed] or allowed


def _neighbours(pci_address: str | None, sysfs: Path, gpus: Sequence[str | None], nodes: int) -> tuple[int, int]:
    ranks, rank = local_ranks(), local_rank()
    node = _node_of(pci_address, sysfs)
    if node is None or len(gpus) < ranks:
        on_node = -(-ranks // max(1, nodes))
        return on_node, rank % on_node
    there = [r for r, address in enumerate(gpus[:ranks]) if _node_of(address, sysfs) == node]
    return max(1, len(there)), there.index(rank) if rank in there else 0


def _share(whole: list[list[int]], neighbours: tuple[int, int]) -> list[list[int]]:
    on_node, number = neighbours
    if len(whole) < on_node:
        whole = [[core] for together in whole for core in together]
    count = len(whole) // on_node
    return whole[number * count : (number + 1) * count] or whole


def _node_of(pci_address: str | None, sysfs: Path) -> int | None:
    if pci_address is None:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a container may hide the file
    return node if node >= 0 else None  # -1 means a machine with one node


def _node_cores(pci_address: str | None, sysfs: Path) -> list[int]:
    node = _node_of(pci_address, sysfs)
    try:
        return parse_cpulist((sysfs / f"devices/system/node/node{node}/cpulist").read_text(encoding="utf-8"))
    except OSError:
        return []


def parse_cpulist(text: str) -> list[int]:
    """Parse a list of cores in the Linux kernel's notation: ``0-3,8`` gives [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.extend(range(int(first), int(last or first) + 1))
    return cores


class BackwardThreads:
    """The threads on which autograd runs backward, bound to the cores that updates leave free (`spared_cores`).

    For tensors on a GPU, autograd runs backward on threads of its own, which bound the speed of a fast GPU and which
    the scheduler may put on a core that updates use. The script's thread, which makes this object, is not bound: the
    processes and threads that it starts, such as those that load data, would all inherit this one core.

    Args:
        cores: The cores. If there are none, no thread is bound.
    """

    def __init__(self, cores: Sequence[int] = ()) -> None:
        self.cores = cores
        self._trainer = threading.get_ident()
        self._seen = set[int]()
        self._before: dict[int, set[int]] = {}  # allowed cores of each bound thread, by its native id

    def steps(self) -> None:
        """Note that the calling thread is the script's, which calls step() and backward."""
        self._trainer = threading.get_ident()

    def runs(self) -> None:
        """Bind the calling thread, which runs backward, unless it is the script's own."""
        thread = threading.get_ident()
        if not self.cores or thread == self._trainer or thread in self._seen:
            return
        self._seen.add(thread)
        self._before[threading.get_native_id()] = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)

    def let_go(self) -> None:
        """Let all bound threads run again where they could before."""
        while self._before:
            thread, cores = self._before.popitem()
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(thread, cores)
        self._seen.clear()


def bind(cores: list[int]) -> None:
    """Bind the calling thread, and OpenMP threads that it starts later, to CPU cores (none if the list is empty)."""
    if cores:
        os.sched_setaffinity(0, cores)


def cpu_name() -> str:
    """Return the model name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
