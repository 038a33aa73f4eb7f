"""The checks of the doctor, and their order."""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.plan import Plan
from ebbtide.tuner.doctor import memory, software
from ebbtide.tuner.doctor.finding import Finding
from ebbtide.tuner.doctor.under_a_plan import under_a_plan


def fast_part() -> list[Finding]:
    """Run the checks that take milliseconds and load nothing. `tune run` begins with them."""
    return [*software.versions(), *software.compiler()]


def whole(plan: Plan | None, ranks: int, folder: str | None, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Everything; a few seconds, since the update kernel is built and torch loaded.

    Args:
        plan: compared with the free host memory.
        ranks: processes on this machine.
        folder: where checkpoints will go; None: not looked at.
        config: DeepSpeed's; None: nobody asks whether and how it would train.
    """
    import torch
    from ebbtide.runtime.hardware.usable import usable
    from ebbtide.tuner.doctor import hardware, storage

    mine = usable()
    return [
        *fast_part(),
        *software.build_locks(),
        *software.kernel(),
        *software.private_names(),
        *(under_a_plan(config) if config is not None else ()),
        *(software.known_results(config) if config is not None else ()),
        hardware.memlock(torch.cuda.is_available(), mine.machine_bytes),
        hardware.threads(ranks),
        *hardware.queues(),
        hardware.numa(),
        *hardware.links(),
        memory.host_memory(mine.free_bytes, plan, ranks),
        memory.limits(mine),
        *memory.shared_memory(),
        *(storage.checkpoint_folder(folder) if folder is not None else ()),
    ]
