"""What a checkpoint of every step costs where state is stored, and what a resume reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulator.plan import Plan
from simulator.storage import StorageRates


def saved_each_step(
    engine: Any, train: Callable[[Any, int], object], steps: range, plain_s: float, folder: Path
) -> dict[str, float]:
    """Trains on, with a checkpoint behind every step.

    Args:
        plain_s: of a step without one.
    """
    store = engine.optimizer._ebbtide._store
    before, begin = store.written_bytes, time.perf_counter()
    for number in steps:
        train(engine, number)
        engine.save_checkpoint(folder / "checkpoints")
    engine.optimizer.wait()
    report = engine.checkpoint_engine.wait()
    seconds = (time.perf_counter() - begin) / len(steps)
    written = (store.written_bytes - before) / len(steps)
    stored = [s for s in engine.optimizer._ebbtide.executor.states if s.placement == "stored"]
    state = sum(-(-t.nbytes // 4096) * 4096 for s in stored for t in s.state)
    return {
        "checkpoint_every_step_slowdown_pct": 100.0 * (seconds / plain_s - 1.0),
        "extra_state_bytes_per_checkpoint": written - state,
        "checkpoint_file_bytes": report.payload_bytes,
    }


def resumed(engine: Any, folder: Path, read_bytes: Callable[[], int]) -> int:
    """Bytes that a load from the newest checkpoint reads from the device, the page cache empty."""
    for path in folder.glob("*.extents"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = read_bytes()
    engine.load_checkpoint(folder / "checkpoints")
    return read_bytes() - before


def host_bytes(engine: Any) -> dict[str, Any]:
    """Host memory of state, gradients and slots per parameter: as it is, and as it was told; the
    parameters of each subgroup.
    """
    from simulator import Workload
    from simulator.update.footprint import footprint
    from simulator.update.recipes import PARAMETER_SLOTS
    from simulator.workload import Layer

    session = engine.optimizer._ebbtide
    sizes = session.engine.sizes()
    work = Workload(
        name="sizes", layers=tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes),
        subgroups=sizes, wire_dtype=session.engine.wire_dtype(),
    )  # fmt: skip
    told = footprint(work, session.plan)["host"]
    if session.device.unified:  # the kernel writes parameters where they are: no slots
        told -= PARAMETER_SLOTS * max(sizes) * work.wire_bytes
    return {
        "subgroups": list(sizes),
        "host_bytes_per_param": session.host_bytes() / sum(sizes),
        "host_bytes_predicted_over_measured": told / session.host_bytes(),
    }


def predicted(
    engine: Any, train: Callable[[Any, int], object], plan: Plan, folder: Path,
    drive: StorageRates, spare_bytes: float,
) -> dict[str, Any]:  # fmt: skip
    """What the simulator says of an iteration under a plan, and what the tuner makes of more
    memory; machine and model as measured here.

    Args:
        engine: stock's, with its state in memory.
        plan: all stored.
        drive: the disk, measured with more bytes than a profile's share of time allows: what it
            writes and reads in a burst is not what it does all along.
        spare_bytes: of host memory beside what the plan takes.
    """
    import itertools

    from profiler import measure_machine, profile_engine
    from simulator import build_schedule, simulate
    from simulator.update.footprint import footprint
    from tuner.placements.planning import plan as planned

    name = str(folder.absolute())
    machine = measure_machine(folder, seconds=20.0, fresh=True)
    machine = machine.model_copy(update={"drives": {name: drive}})
    numbers = itertools.count()
    work = profile_engine(engine, lambda e: train(e, next(numbers)), 3)
    taken = footprint(work, plan)
    room = taken["host"] + (taken["device"] if machine.unified_memory else 0) + spare_bytes
    better = planned(
        work, machine, host_memory_bytes=int(room), memory_margin=0.0,
        storage={name: 2 * taken["storage"]},
    )  # fmt: skip
    stored = sum(n for n, p in zip(work.subgroups, better.placements, strict=True) if p == "stored")
    assert better.prediction is not None
    return {
        "iteration_s": simulate(build_schedule(work, plan), machine.storing_in([name])).iteration_s,
        "plan": better.model_dump(mode="json"),
        "within_limit_s": better.prediction.iteration_s,
        "passes_s": sum(layer.forward_s + layer.backward_s for layer in work.layers),
        "share_in_memory": 1 - stored / sum(work.subgroups),
    }
