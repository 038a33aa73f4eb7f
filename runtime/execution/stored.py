"""State that lives on storage: the store that holds it, and the host memory it passes through."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from ebbtide.runtime.execution.subgroup_state import StagingSlot
from ebbtide.runtime.hardware.launcher import local_ranks
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import DEADLINE_S, ExtentStore
from ebbtide.runtime.storage.training import stands
from ebbtide.runtime.storage.view import page_aligned
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.update.footprint import kept_steps, slot_elements
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.update.recipes import RECIPES


def free_host_bytes() -> int:
    """What each rank here may still take of the machine's memory, less a margin."""
    memory = psutil.virtual_memory()
    return max(0, int(memory.available - UNKNOWN_MARGIN * memory.total)) // local_ranks()


def stored_sizes(plan: Plan, sizes: tuple[int, ...]) -> dict[int, int]:
    """Elements of each subgroup whose state the plan keeps on storage."""
    return {
        subgroup: sizes[subgroup]
        for subgroup, placement in enumerate(plan.placements)
        if RECIPES[placement].state == "storage"
    }


def open_store(plan: Plan, stored: Mapping[int, int], tensors: int) -> ExtentStore | None:
    """This rank's store in the plan's folders; None: the plan stores nothing.

    Args:
        tensors: of a subgroup's state.

    Raises:
        StorageError: a folder is another run's, or has no room.
        PlanError: checkpoints are to be drained to another folder.
    """
    if not stored:
        return None
    assert plan.drives  # `check_plan` has seen to it
    if plan.checkpoint.drain_dir is not None:
        raise PlanError(
            "checkpoint.drain_dir must not be set where state is stored, whose checkpoints lie "
            f"beside it and have no second place, but got {plan.checkpoint.drain_dir!r}: remove "
            "it, and copy with `tune checkpoint export`"
        )
    sizes = {subgroup: [FP32_BYTES * n] * tensors for subgroup, n in stored.items()}
    drives = [Drive(Path(folder), weight) for folder, weight in plan.drives.items()]
    return ExtentStore.open(
        drives,
        sizes,
        rank=int(os.environ.get("RANK") or 0),
        world_size=int(os.environ.get("WORLD_SIZE") or 1),
        keep=kept_steps(plan.checkpoint.keep),
        stands=stands,
        verify_reads=plan.checkpoint.verify_reads,
        deadline_s=min(DEADLINE_S, plan.checkpoint.deadline_s),
    )


def grown_store(store: ExtentStore | None, plan: Plan, stored: Mapping[int, int], tensors: int) -> ExtentStore | None:
    """The store of a running training with room for what another plan stores; nothing is moved.

    Raises:
        StorageError: there is no room; a folder that is new to this run is another's, or has
            checkpoints that would be written over.
    """
    if store is not None:
        store.grow({subgroup: [FP32_BYTES * n] * tensors for subgroup, n in stored.items()})
        return store
    opened = open_store(plan, stored, tensors)
    if opened is not None and opened.unclaimed:
        opened.close()
        raise StorageError(
            "a folder that state is moved to while training runs must hold no other run's "
            f"checkpoints, but {plan.drives} have those of steps {opened.unclaimed}: set another "
            "plan.storage_dir"
        )
    return opened


def host_slots(count: int, stored: Mapping[int, int], tensors: int) -> list[StagingSlot]:
    """Host memory for the state of up to so many stored subgroups on its way, each slot as large as
    the largest of them; direct I/O takes it as it is.
    """
    if not stored:
        return []
    each = slot_elements(max(stored.values()))
    return [
        StagingSlot(tuple(page_aligned(each, torch.float32) for _ in range(tensors)))
        for _ in range(min(count, len(stored)))
    ]
