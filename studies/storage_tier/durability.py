"""The cost of a checkpoint after every step, and of a resume, when optimizer state is on a disk."""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ebbtide.runtime import session_of
from ebbtide.simulator import Machine, Workload, build_schedule, simulate
from ebbtide.simulator.machine import StorageRates
from ebbtide.simulator.plan import Plan


def saved_each_step(
    engine: Any, train: Callable[[Any], object], steps: int, plain_s: float, folder: Path
) -> dict[str, float]:
    """Measure how much a checkpoint after every step slows down training with optimizer state on a disk.

    The caller has just measured steps without checkpoints. This function measures steps with checkpoints, then without,
    and then with checkpoints again. Because of this alternation, a steady change of the disk's speed is not mistaken
    for an effect of the checkpoints.

    Args:
        plain_s: Seconds of a step without a checkpoint, as the caller has measured them.
    """
    saved_s, report, extra_bytes = _saved_s(engine, train, steps, folder)
    begin = time.perf_counter()
    for _ in range(steps):
        train(engine)
    engine.optimizer.wait()
    again_s = (time.perf_counter() - begin) / steps
    saved_again_s, _, _ = _saved_s(engine, train, steps, folder)
    ratios = (2 * saved_s / (plain_s + again_s), (saved_s + saved_again_s) / (2 * again_s))
    return {
        "checkpoint_every_step_slowdown_pct": 100.0 * (math.sqrt(math.prod(ratios)) - 1.0),
        "extra_state_bytes_per_checkpoint": extra_bytes,
        "checkpoint_file_bytes": report.payload_bytes,
    }


def _saved_s(engine: Any, train: Callable[[Any], object], steps: int, folder: Path) -> tuple[float, Any, float]:
    store = session_of(engine)._store
    assert store is not None, "the plan must keep state on the disk"
    before, begin = store.written_bytes, time.perf_counter()
    for _ in range(steps):
        train(engine)
        engine.save_checkpoint(folder / "checkpoints")
    engine.optimizer.wait()
    report = engine.checkpoint_engine.wait()
    seconds = (time.perf_counter() - begin) / steps
    written = (store.written_bytes - before) / steps
    stored = [s for s in session_of(engine).executor.states if s.placement == "stored"]
    state = sum(-(-t.nbytes // 4096) * 4096 for s in stored for t in s.state)
    return seconds, report, written - state


def resumed(engine: Any, folder: Path, read_bytes: Callable[[], int]) -> int:
    """Resume an engine from the newest checkpoint, and return the number of bytes that this reads from the disk.

    Before that, the files with optimizer state are dropped from the page cache. Otherwise they would be read from
    memory.
    """
    for path in folder.glob("*.extents"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = read_bytes()
    engine.load_checkpoint(folder / "checkpoints")
    return read_bytes() - before


def host_bytes(engine: Any) -> dict[str, Any]:
    """Return the host memory that ebbtide's optimizer state, gradients and buffers take, in bytes per parameter.

    The dict has the measured number, and the ratio of the predicted number to the measured one. It also has
    the sizes of all subgroups.
    """
    from ebbtide.simulator.schedules.footprint import footprint
    from ebbtide.simulator.update.steps import PARAMETER_SLOTS
    from ebbtide.simulator.workload import Layer

    session = session_of(engine)
    sizes = session.engine.sizes()
    work = Workload(
        name="sizes",
        layers=tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes),
        subgroups=sizes,
        wire_dtype=session.engine.wire_dtype(),
    )
    told = footprint(work, session.plan)["host"]
    if session.device.unified:  # the kernel writes parameters in place, so there are no slots
        told -= PARAMETER_SLOTS * max(sizes) * work.wire_bytes
    return {
        "subgroups": list(sizes),
        "host_bytes_per_param": session.host_bytes() / sum(sizes),
        "host_bytes_predicted_over_measured": told / session.host_bytes(),
    }


def predicted(
    engine: Any,
    train: Callable[[Any, int], object],
    stored: Plan,
    folder: Path,
    drives: Sequence[StorageRates],
    spare_bytes: float,
    given: Plan | None,
) -> dict[str, Any]:
    """Simulate iterations of a model under two plans with optimizer state on a disk, and return the iteration times.

    The machine and the model are measured in this process. The disk's speeds were measured before, at several times,
    and each plan is simulated once with each of these measurements.

    Args:
        engine: Stock DeepSpeed's engine, with its optimizer state in memory.
        drives: Measurements of the disk's speeds. Each of them moves more bytes than the measurement for a machine's
            profile does, because a short burst is faster than a long transfer.
        spare_bytes: Host memory that the second plan may use in addition to the memory that ``stored`` takes.
        given: Second plan. If None, the tuner makes it, for the first entry of ``drives``.

    Returns:
        A dict. ``iterations_s`` and ``within_limit_s``: iteration times under the first and under the second plan, each
        a list with one time for each entry of ``drives``. ``plan``: the second plan. ``passes_s``: seconds of forward
        and backward. ``share_in_memory``: fraction of the elements with state in memory under the second plan.
    """
    from ebbtide.profiler import measure_machine, profile_engine

    name = str(folder.absolute())
    measured = measure_machine(folder, seconds=20.0, fresh=True)
    machines = [measured.model_copy(update={"drives": {name: drive}}) for drive in drives]
    numbers = itertools.count()
    work = profile_engine(engine, lambda e: train(e, next(numbers)), 3)
    plan = given or _within_limit(work, machines[0], stored, name, spare_bytes)

    storing = [machine.storing_in([name]) for machine in machines]
    kept = [n for n, p in zip(work.subgroups, plan.placements, strict=True) if p != "stored"]
    return {
        "iterations_s": _iterations_s(work, stored, storing),
        "within_limit_s": _iterations_s(work, plan, storing),
        "plan": plan.model_dump(mode="json"),
        "passes_s": work.forward_s + work.backward_s,
        "share_in_memory": sum(kept) / sum(work.subgroups),
    }


def _iterations_s(work: Workload, plan: Plan, machines: Sequence[Machine]) -> list[float]:
    schedule = build_schedule(work, plan)
    return [simulate(schedule, machine).iteration_s for machine in machines]


def _within_limit(work: Workload, machine: Machine, stored: Plan, drive: str, spare_bytes: float) -> Plan:
    from ebbtide.simulator.schedules.footprint import footprint
    from ebbtide.tuner.placements.planning import plan

    taken = footprint(work, stored)
    room = taken["host"] + (taken["device"] if machine.unified_memory else 0) + spare_bytes
    storage = {drive: 2 * taken["storage"]}
    return plan(work, machine, host_memory_bytes=int(room) * work.ranks_per_node, memory_margin=0.0, storage=storage)
