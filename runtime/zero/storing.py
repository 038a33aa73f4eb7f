"""The choice of subgroups whose optimizer state is kept on a drive, if the DeepSpeed config offloads to a drive.

As few subgroups as host memory allows are chosen.
"""

import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.execution.stored import free_host_bytes
from ebbtide.runtime.hardware.launcher import rank
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.storage.folder import STEPS, file_of, read_page
from ebbtide.runtime.storage.pages import StepsPage
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.host_memory import needed_bytes
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.optimizer import ADAM, OPTIMIZERS
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.update.steps import HOST_SLOTS

logger = logging.getLogger("ebbtide")


def storing_plan(engine: Any, rule: UpdateRule, sizes: tuple[int, ...], folder: Path) -> Plan:
    """Return the plan under which the first steps of training are measured. It keeps as much optimizer state in host
    memory as fits, and the rest on a drive.

    If the folder contains optimizer state that an earlier run stored, the plan keeps the same subgroups on the drive as
    that run.

    Raises:
        StorageError: The JSON file that lists the stored optimizer state in the folder cannot be read.
    """
    optimizer, before = engine.optimizer, stored_before(folder)
    room, count = host_room_bytes(optimizer), len(sizes)
    choices = [before & frozenset(range(count))] if before else [spaced(count, n) for n in range(count + 1)]
    number, slots = _first_that_fits(engine, rule, sizes, room, choices)
    chosen, fewer = private.largest_of_ranks([number, -slots]).tolist()
    stored = choices[min(chosen, len(choices) - 1)]
    logger.info(
        "ebbtide: optimizer state of %d of %d subgroups is stored in folder %s, because %s",
        len(stored),
        count,
        folder,
        "an earlier run stored it there" if before else f"host memory has room for {room / GIB:.2f} GiB of this rank",
    )
    made = _plan(engine, sizes, stored, -fewer)
    return made.model_copy(update={"storage_dir": str(folder)})


def stored_before(folder: Path) -> frozenset[int]:
    """Return this rank's subgroups with optimizer state in a folder on a drive, as its newest commit says."""
    steps = read_page(file_of(folder, rank(), STEPS), StepsPage, Files())
    if steps is None or not steps.steps:
        return frozenset()
    return frozenset(extent.subgroup for extent in steps.steps[0].extents)


def host_room_bytes(optimizer: Any) -> int:
    """Return the free bytes of host memory for a plan, including DeepSpeed's buffers that the plan will replace."""
    masters = optimizer.fp32_partitioned_groups_flat
    held = sum(m.nbytes + (0 if m.grad is None else m.grad.nbytes) for m in masters)
    gradients = optimizer.grad_partitions_flat_buffer
    held += 0 if gradients is None else gradients.nbytes
    if private.parameter_location(optimizer) == "host":
        held += sum(w.nbytes for w in optimizer.fp16_partitioned_groups_flat if w is not None)
    return free_host_bytes() + int(held)


def _first_that_fits(
    engine: Any, rule: UpdateRule, sizes: tuple[int, ...], room_bytes: int, choices: Sequence[frozenset[int]]
) -> tuple[int, int]:
    optimizer = engine.optimizer
    kept = OPTIMIZERS.get(rule.name, ADAM)

    def fits(stored: frozenset[int], slots: int) -> bool:
        plan = _plan(engine, sizes, stored, slots)
        return room_bytes >= needed_bytes(
            plan,
            optimizer.gradient_accumulation_dtype.itemsize,
            wire_bytes=optimizer.dtype.itemsize,
            optimizer=kept,
            micro_batches=engine.gradient_accumulation_steps(),
        )

    tried = product(range(len(choices)), range(HOST_SLOTS, 0, -1))
    fitting = ((n, slots) for n, slots in tried if fits(choices[n], slots))
    return next(fitting, (len(choices) - 1, 1))


def spaced(count: int, stored: int) -> frozenset[int]:
    """Choose ``stored`` of ``count`` subgroups, as evenly spaced as possible, for the drive. Return their indices."""
    return frozenset(i for i in range(count) if (i + 1) * stored // count > i * stored // count)


def _plan(engine: Any, sizes: tuple[int, ...], stored: frozenset[int], host_slots: int) -> Plan:
    location = private.parameter_location(engine.optimizer)
    return Plan(
        subgroup_size=max(1, int(engine.zero_sub_group_size())),
        subgroups=sizes,
        ways=tuple(Way("stored" if i in stored else "host", location) for i in range(len(sizes))),
        staging_slots=0,
        overlap_forward=False,
        host_slots=host_slots,
    )
