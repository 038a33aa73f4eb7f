"""The checks that ``tune doctor`` runs, and their order."""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.plan import Plan
from ebbtide.tuner.doctor import memory, software
from ebbtide.tuner.doctor.finding import Finding
from ebbtide.tuner.doctor.under_a_plan import refused_by_deepspeed, under_a_plan


def fast_part() -> list[Finding]:
    """Run those checks of ``tune doctor`` that take milliseconds, and return their findings."""
    return [*software.versions(), *software.compiler()]


def whole(plan: Plan | None, ranks: int, folder: str | None, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Run all checks of ``tune doctor``. This takes seconds, to build the CPU update kernel and to import torch.

    Args:
        plan: Plan whose need of host memory is compared with the free memory. None leaves this out.
        ranks: Number of training processes on this machine.
        folder: Folder for checkpoints. If None, it is not checked.
        config: DeepSpeed's config. If None, no config is checked.
    """
    from ebbtide.runtime.hardware.usable import usable
    from ebbtide.tuner.doctor import hardware, storage

    mine = usable()
    valid = config is not None and not refused_by_deepspeed(config)
    return [
        *fast_part(),
        *software.build_locks(),
        *software.kernel(),
        *software.private_names(),
        *(under_a_plan(config) if config is not None else ()),
        *(software.known_results(config) if config is not None and valid else ()),
        hardware.threads(ranks),
        *hardware.queues(),
        hardware.numa(),
        *hardware.links(),
        memory.host_memory(mine.free_bytes, plan, ranks),
        memory.limits(mine),
        *memory.shared_memory(),
        *(storage.checkpoint_folder(folder) if folder is not None else ()),
    ]
