"""The checks in ``tune doctor`` of host memory, a container's limits, and shared memory."""

import os
from typing import TYPE_CHECKING

from ebbtide.simulator.limits import GIB, MIB
from ebbtide.simulator.plan import Plan
from ebbtide.tuner.doctor.finding import Finding, bad, ok, slow

if TYPE_CHECKING:
    from ebbtide.runtime.hardware.usable import Usable

LEAST_SHARED_BYTES = 256 * MIB  # DeepSpeed's buffers of one rank on CPUs take 69 MB


def host_memory(free_bytes: int, plan: Plan | None, ranks: int) -> Finding:
    """Report, as a finding of ``tune doctor``, if the free host memory is enough for a plan on all ranks of
    this machine.
    """
    free = f"{free_bytes / GIB:.1f} GiB free"
    if plan is None:
        return ok("host memory", f"{free} (--plan compares it with a plan)")
    from ebbtide.runtime.zero.host_memory import needed_bytes

    prediction = plan.prediction
    needed = (prediction.host_peak_bytes if prediction else needed_bytes(plan, gradient_bytes=2)) * ranks
    detail = f"{free}, the plan needs {needed / GIB:.1f} GiB for {ranks} rank(s)"
    if needed > free_bytes:
        return bad(
            "host memory", detail, "plan again with a larger --gpu-memory or a smaller --host-memory, or free memory"
        )
    return ok("host memory", detail)


def limits(mine: "Usable") -> Finding:
    """Report the limits on memory and CPU that a container sets for this process, compared with the whole machine.

    Programs often do not see such limits.
    """
    memory = "no memory limit" if mine.limit_bytes is None else f"{mine.limit_bytes / GIB:.1f} GiB of memory"
    usable = mine.allowed_cores
    detail = f"{memory}, {usable} of {mine.machine_cores} cores" + (
        f", quota of {mine.quota:.1f}" if mine.quota else ""
    )
    if mine.quota is not None and mine.quota < usable:
        fix = (
            f"give the container {usable} CPUs, or bind it to {mine.quota:.0f} cores (docker run "
            "--cpuset-cpus): throttled threads stall all others"
        )
        return slow("cgroup", detail, fix)
    if mine.limit_bytes is not None and mine.limit_bytes < mine.machine_bytes // 2:
        fix = "raise the container's memory limit (docker run --memory)"
        return slow("cgroup", f"{detail}, but the machine has {mine.machine_bytes / GIB:.1f} GiB", fix)
    return ok("cgroup", detail)


def shared_memory() -> list[Finding]:
    """Return findings of ``tune doctor`` if this machine's shared memory is too small for training, or if
    killed training processes have left buffers there.
    """
    from ebbtide.runtime.hardware.launcher import SHARED

    try:
        held = os.statvfs(SHARED)
    except OSError:
        return []
    return [*_small(held.f_blocks * held.f_frsize), *_left()]


def _small(size: int) -> list[Finding]:
    if size >= LEAST_SHARED_BYTES:
        return []
    detail = (
        f"shared memory has {size // MIB} MiB, as containers have by default. Ranks, NCCL and the workers of a "
        "DataLoader share tensors through it, and end with a bus error if it is full"
    )
    return [slow("shared memory", detail, "start the container with --shm-size=8g or --ipc=host")]


def _left() -> list[Finding]:
    from ebbtide.runtime.hardware.launcher import left_shared_buffers

    left = left_shared_buffers()
    size = sum(path.stat().st_size for path in left if path.exists())
    if not left:
        return []
    detail = f"{size / GIB:.2f} GiB in {len(left)} buffers of training processes that ended: {left[0]}"
    shown = " ".join(map(str, left[:4])) + (" ..." if len(left) > 4 else "")
    return [slow("shared memory", detail, f"rm {shown}")]
