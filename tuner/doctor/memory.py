"""Host memory and cores: what the machine has, what this process may use, what a plan needs."""

import os
from pathlib import Path

from ebbtide.simulator.limits import GIB
from ebbtide.simulator.plan import Plan
from ebbtide.tuner.doctor.finding import Finding, bad, ok, slow


def free_memory(limit_bytes: int | None, used_bytes: int) -> int:
    """Free host memory, less what a cgroup's limit takes away."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return available if limit_bytes is None else max(0, min(available, limit_bytes - used_bytes))


def host_memory(free_bytes: int, plan: Plan | None, ranks: int) -> Finding:
    """Free memory against what the plan takes for all ranks of this machine."""
    free = f"{free_bytes / GIB:.1f} GiB free"
    if plan is None:
        return ok("host memory", f"{free} (--plan compares it with a plan)")
    from ebbtide.runtime.zero.host_memory import needed_bytes

    needed = needed_bytes(plan, gradient_bytes=2) * ranks
    detail = f"{free}, the plan takes {needed / GIB:.1f} GiB for {ranks} rank(s)"
    if needed > free_bytes:
        return bad(
            "host memory",
            detail,
            "plan again with a larger --gpu-memory (more residents) or a smaller --host-memory, or free memory",
        )
    return ok("host memory", detail)


def cgroup_memory(root: Path = Path("/")) -> tuple[int | None, int]:
    """This process's memory limit in bytes and what it uses of it; (None, 0) without a limit.

    The smallest limit of its control group and all above it, versions 2 and 1.
    """
    limits = []
    for folder, limit, usage in _memory_folders(root):
        bytes_ = _number(folder / limit)
        if bytes_ is not None and bytes_ < 2**60:  # version 1 writes a huge number for "none"
            limits.append((bytes_, _number(folder / usage) or 0))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _memory_folders(root: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    result = []
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top, names = base, ("memory.max", "memory.current")
        if "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers:
            continue
        folder = top / path.lstrip("/")
        inside = [folder, *folder.parents]
        result += [(f, *names) for f in inside if f == top or f.is_relative_to(top)]
    return result


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def limits(limit_bytes: int | None, root: Path = Path("/")) -> Finding:
    """Control group limits, which hide from programs that ask the machine."""
    import psutil

    total, cores = int(psutil.virtual_memory().total), os.cpu_count() or 1
    quota, usable = _cpu_quota(root), len(os.sched_getaffinity(0))
    memory = "no memory limit" if limit_bytes is None else f"{limit_bytes / GIB:.1f} GiB of memory"
    detail = f"{memory}, {usable} of {cores} cores" + (f", quota of {quota:.1f}" if quota else "")
    if quota is not None and quota < usable:
        fix = (
            f"give the container {usable} CPUs, or bind it to {quota:.0f} cores (docker run "
            "--cpuset-cpus): throttled threads stall all others"
        )
        return slow("cgroup", detail, fix)
    if limit_bytes is not None and limit_bytes < total // 2:
        fix = "raise the container's memory limit (docker run --memory)"
        return slow("cgroup", f"{detail}, where the machine has {total / GIB:.1f} GiB", fix)
    return ok("cgroup", detail)


def _cpu_quota(root: Path) -> float | None:
    """CPUs that this control group may use; None: as many as there are."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line.split(":", 2)[2] for line in lines if line.startswith("0::"))
        quota, period = (root / "sys/fs/cgroup" / path.lstrip("/") / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, StopIteration):
        return None
