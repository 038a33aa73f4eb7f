"""The memory and CPU cores that this process may use: those of the machine, reduced by a container's limits.

Ordinary queries, such as the number of CPUs, report the whole machine. They ignore a control group's memory
limit and CPU quota.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
_NO_LIMIT = 2**60  # control groups version 1 write a huge number for "no limit"


@dataclass(frozen=True)
class Usable:
    """The memory and CPU cores that this process may use, shared by all ranks of the container.

    Attributes:
        memory_bytes: Host memory in NUMA nodes that have cores, at most the container's limit.
        free_bytes: The part of this memory that is free, or that the kernel can free.
        cores: Number of threads that can run at a time: `allowed_cores`, at most the CPU quota.
        limit_bytes: The container's memory limit. None if there is none.
        quota: CPUs per second of wall time that the container may use. None if there is no quota.
    """

    memory_bytes: int
    free_bytes: int
    cores: int
    allowed_cores: int
    machine_bytes: int
    machine_cores: int
    limit_bytes: int | None = None
    quota: float | None = None


def usable(root: Path | None = None) -> Usable:
    """Return the host memory and CPU cores that this process may use now, as the machine and its container allow."""
    root = root or ROOT
    limit_bytes, used_bytes = memory_limit(root)
    total, free = _of_host_nodes(root)
    quota, allowed = cpu_quota(root), len(allowed_cores())
    return Usable(
        memory_bytes=total if limit_bytes is None else min(total, limit_bytes),
        free_bytes=max(0, free if limit_bytes is None else min(free, limit_bytes - used_bytes)),
        cores=allowed if quota is None else max(1, min(allowed, int(quota))),
        allowed_cores=allowed,
        machine_bytes=total,
        machine_cores=os.cpu_count() or 1,
        limit_bytes=limit_bytes,
        quota=quota,
    )


def allowed_cores() -> set[int]:
    """Return the CPU cores to which the scheduler confines this process."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return set(range(os.cpu_count() or 1))


def _of_host_nodes(root: Path) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    total, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), int(memory.available)
    for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        if _text(node / "cpulist") == "":
            total -= _meminfo(node, "MemTotal")
            free -= _meminfo(node, "MemFree")
    return total, max(0, free)


def _meminfo(node: Path, name: str) -> int:
    for line in (_text(node / "meminfo") or "").splitlines():
        if f" {name}:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def memory_limit(root: Path | None = None) -> tuple[int | None, int]:
    """Return a pair: the limit on this process's host memory, and the used part of the limit, both in bytes.

    The pair is (None, 0) without a limit. The limit is the tightest one of the process's control group and
    of its parents, in version 2 or 1. Page cache that the kernel can drop does not count as used.
    """
    limits = []
    for folder, first in _groups(root or ROOT, "memory"):
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if first else ("max", "current", "")
        limit, usage, prefix = names
        bytes_ = _number(folder / f"memory.{limit}")
        if bytes_ is not None and bytes_ < _NO_LIMIT:
            cache = _cache_bytes(folder / "memory.stat", prefix)
            limits.append((bytes_, max(0, (_number(folder / f"memory.{usage}") or 0) - cache)))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _cache_bytes(path: Path, prefix: str) -> int:
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in names)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        first = controller in controllers.split(",")
        if controllers and not first:
            continue
        top = root / "sys/fs/cgroup" / (controller if first else "")
        folder = top / path.lstrip("/")
        yield from ((f, first) for f in (folder, *folder.parents) if f == top or f.is_relative_to(top))


def cpu_quota(root: Path | None = None) -> float | None:
    """Return how many CPUs this process's control group and its parents allow at a time. None without a quota."""
    quotas = (_quota_of(folder) for folder, _ in _groups(root or ROOT, "cpu"))
    return min((q for q in quotas if q is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    words = (_text(folder / "cpu.max") or "").split()  # the file holds "max 100000" without a quota
    if not words:
        words = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:  # the file holds "max"
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
