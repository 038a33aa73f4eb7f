"""What a config that offloads state to a drive stores: what host memory does not hold."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.files import Files
from runtime.execution.stored import free_host_bytes
from runtime.kernels.rule import UpdateRule
from runtime.storage.folder import STEPS, STORE, file_of, read_page
from runtime.storage.pages import StepsPage, StorePage
from runtime.zero.checks import private
from runtime.zero.host_memory import needed_bytes
from simulator.limits import GIB
from simulator.plan import Placement, Plan
from simulator.update.optimizer import ADAM, OPTIMIZERS

logger = logging.getLogger("ebbtide")


def storing_plan(engine: Any, rule: UpdateRule, sizes: tuple[int, ...], folder: Path) -> Plan:
    """The plan of the watched steps: as much state on the host as its memory holds now, the rest
    stored; as an earlier run stored it, where its steps are in the folder.

    Raises:
        StorageError: the folder's pages cannot be read.
    """
    optimizer, before = engine.optimizer, stored_before(folder)
    room = host_room_bytes(optimizer)
    fewest = _most_of_ranks(_fewest(engine, rule, sizes, room))
    stored = before & frozenset(range(len(sizes))) if before else _spaced(len(sizes), fewest)
    logger.info(
        "ebbtide: state of %d of %d subgroups is stored in %s: %s", len(stored), len(sizes), folder,
        "as an earlier run has left it" if before
        else f"this rank's host memory takes {room / GIB:.2f} GiB",
    )  # fmt: skip
    return _plan(engine, sizes, stored).model_copy(update={"storage_dir": str(folder)})


def stored_before(folder: Path) -> frozenset[int]:
    """The subgroups of which this rank's folder holds steps."""
    rank, files = int(os.environ.get("RANK") or 0), Files()
    steps = read_page(file_of(folder, rank, STEPS), StepsPage, files)
    page = read_page(file_of(folder, rank, STORE), StorePage, files)
    if page is None or steps is None or not steps.steps:
        return frozenset()
    return frozenset(subgroup for subgroup, _ in page.sizes)


def host_room_bytes(optimizer: Any) -> int:
    """What is free, and what DeepSpeed's own buffers give back as the plan takes their place."""
    masters = optimizer.fp32_partitioned_groups_flat
    held = sum(m.nbytes + (0 if m.grad is None else m.grad.nbytes) for m in masters)
    gradients = optimizer.grad_partitions_flat_buffer
    held += 0 if gradients is None else gradients.nbytes
    if private.parameter_home(optimizer) == "host":
        held += sum(w.nbytes for w in optimizer.fp16_partitioned_groups_flat if w is not None)
    return free_host_bytes() + int(held)


def _fewest(engine: Any, rule: UpdateRule, sizes: tuple[int, ...], room_bytes: int) -> int:
    """Subgroups that must be stored so that the others fit; all, if even none does."""
    optimizer = engine.optimizer
    kept = OPTIMIZERS.get(rule.name, ADAM)

    def fits(stored: int) -> bool:
        plan = _plan(engine, sizes, _spaced(len(sizes), stored))
        return room_bytes >= needed_bytes(
            plan, optimizer.gradient_accumulation_dtype.itemsize,
            wire_bytes=optimizer.dtype.itemsize, optimizer=kept,
            micro_batches=engine.gradient_accumulation_steps(),
        )  # fmt: skip

    return next((n for n in range(len(sizes)) if fits(n)), len(sizes))


def _most_of_ranks(number: int) -> int:
    """All ranks store the same subgroups. A collective call."""
    import deepspeed.comm as dist

    most = torch.tensor([number], dtype=torch.int64, device=private.training_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def _spaced(count: int, stored: int) -> frozenset[int]:
    """So many, evenly spaced: a drive then has the updates between for itself."""
    return frozenset(i for i in range(count) if (i + 1) * stored // count > i * stored // count)


def _plan(engine: Any, sizes: tuple[int, ...], stored: frozenset[int]) -> Plan:
    placements: list[Placement] = ["stored" if i in stored else "host" for i in range(len(sizes))]
    home = private.parameter_home(engine.optimizer)
    return Plan(
        subgroup_size=max(1, int(engine.zero_sub_group_size())), subgroups=sizes,
        placement=Plan.runs(placements), staging_slots=0, overlap_forward=False,
        parameter_home=Plan.home_runs([home] * len(sizes)),
    )  # fmt: skip
