"""Optimizer state on drives: the store that holds it and the host buffers through which it is read and written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.trainers.limits import TrainersLimit, trainers_limit
from ebbtide.runtime.execution.subgroup_state import StagingSlot
from ebbtide.runtime.hardware.launcher import local_ranks, rank, world_size
from ebbtide.runtime.hardware.usable import usable
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.folder import STEPS, STORE, Drive, file_of, read_page
from ebbtide.runtime.storage.pages import StepsPage, StorePage
from ebbtide.runtime.storage.store import DEADLINE_S, ExtentStore
from ebbtide.runtime.storage.training import checkpoint_of, stands
from ebbtide.runtime.storage.view import page_aligned
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.update.holding import kept_steps, slot_elements
from ebbtide.simulator.update.recipes import RECIPES

logger = logging.getLogger("ebbtide")


def free_host_bytes() -> int:
    """Return the bytes of host memory that each rank on this host may still allocate, less a safety margin."""
    mine = usable()
    return max(0, int(mine.free_bytes - UNKNOWN_MARGIN * mine.memory_bytes)) // local_ranks()


def stored_sizes(plan: Plan, sizes: tuple[int, ...]) -> dict[int, int]:
    """Return the number of elements of each subgroup whose state a plan keeps on drives, as a dict by subgroup."""
    return {
        subgroup: sizes[subgroup]
        for subgroup, placement in enumerate(plan.placements)
        if RECIPES[placement].state == "storage"
    }


def open_store(plan: Plan, stored: Mapping[int, int], tensors: int) -> ExtentStore | None:
    """Open this rank's store of optimizer state in the plan's folders. Return None if the plan keeps no state on
    drives.

    Raises:
        StorageError: A folder belongs to another run, or has no room.
        PlanError: transformers' Trainer is set to load its best checkpoint at the end of training, but the drives keep
            the state of only one checkpoint. The best one's state may then be overwritten before the end.
    """
    if not stored:
        return None
    assert plan.drives  # checked by `check_plan`
    limit = trainers_limit()
    sizes = {subgroup: [FP32_BYTES * n] * tensors for subgroup, n in stored.items()}
    drives = [Drive(Path(folder), weight) for folder, weight in plan.drives.items()]
    return ExtentStore(
        drives,
        sizes,
        rank=rank(),
        world_size=world_size(),
        keep=_kept_on_drives(plan, limit),
        stands=stands,
        protects=lambda record: limit is not None and limit.is_best(checkpoint_of(record)),
        verify_reads=plan.checkpoint.verify_reads,
        deadline_s=min(DEADLINE_S, plan.checkpoint.deadline_s),
    )


def _kept_on_drives(plan: Plan, limit: TrainersLimit | None) -> int:
    keep, best = plan.checkpoint.keep, limit is not None and limit.loads_best
    held = keep or _held_before(Path(next(iter(plan.drives))))
    number = held or kept_steps(limit.most if limit is not None and limit.most else 1 + best)
    if best and number < 2:
        raise PlanError(
            "The Trainer loads its best checkpoint at the end of training. "
            + ("checkpoint.keep is 1" if keep else "The folder in plan.storage_dir has room for one checkpoint only")
            + ", so the stored state of the best checkpoint may be overwritten before the end. "
            + "Set checkpoint.keep to 2 or more"
            + ("." if keep else ", and plan.storage_dir to an empty folder.")
        )
    most = None if limit is None else limit.most
    # Without a trainer, only `keep` decides which checkpoints remain.
    covered = bool(keep) if limit is None else most is not None and most <= number
    if not covered and rank() == 0:
        logger.warning(
            "ebbtide: %s, but the drives hold the optimizer state of only %d checkpoint%s%s. "
            "Older checkpoints cannot be loaded any more. To keep more, start training with a larger checkpoint.keep "
            "and an empty storage folder (plan.storage_dir or nvme_path). Or copy each checkpoint with `tune "
            "checkpoint export` before the next save.",
            f"the trainer keeps {most or 'all'} checkpoints" if limit is not None else "checkpoint.keep is 0",
            number,
            "s" * (number > 1),
            ", the newest and the best" if best and number == 2 else "",
        )
    return number


def _held_before(folder: Path) -> int:
    files = Files()
    steps = read_page(file_of(folder, rank(), STEPS), StepsPage, files)
    page = read_page(file_of(folder, rank(), STORE), StorePage, files)
    return 0 if steps is None or not steps.steps or page is None else page.extents - 1


def grown_store(store: ExtentStore | None, plan: Plan, stored: Mapping[int, int], tensors: int) -> ExtentStore | None:
    """Enlarge the store of a running training, so that it has room for the state that another plan keeps on drives.

    Return the store, or None if neither plan keeps state on drives. No state moves.

    Raises:
        StorageError: There is no room, or a folder that is new to this run belongs to another run or has
            checkpoints that would be overwritten.
    """
    if store is not None:
        store.grow({subgroup: [FP32_BYTES * n] * tensors for subgroup, n in stored.items()})
        return store
    opened = open_store(plan, stored, tensors)
    if opened is not None and opened.unclaimed:
        opened.close()
        raise StorageError(
            f"plan.storage_dir must hold no checkpoints of another run, but {', '.join(map(str, plan.drives))} holds "
            f"the optimizer state of checkpoints of steps {', '.join(map(str, opened.unclaimed))}. This run would "
            "overwrite these checkpoints, because its new plan stores optimizer state on drives. Set another "
            "plan.storage_dir"
        )
    return opened


def host_slots(count: int, stored: Mapping[int, int], tensors: int) -> list[StagingSlot]:
    """Allocate up to ``count`` host buffers through which optimizer state on drives is read and written.

    Each buffer is as large as the largest subgroup on a drive and is aligned for direct I/O.
    """
    if not stored:
        return []
    each = slot_elements(max(stored.values()))
    return [StagingSlot(tuple(page_aligned(each) for _ in range(tensors))) for _ in range(min(count, len(stored)))]
