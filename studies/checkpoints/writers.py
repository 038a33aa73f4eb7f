"""Checkpoint writers to compare in timed real training: DeepSpeed's, torch DCP and ebbtide."""

import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.simulator.plan import BLOCK_BYTES

from studies.bench.host_peak import host_peak_bytes

WARM_STEPS = 3
RAW_THREADS = 2  # threads that measure the disk's own rate
IN_TURN = 15  # number of checkpoints whose rate is compared with the disk's


@dataclass(frozen=True)
class TimedJob:
    """A training job with which checkpoint writers are timed: model, sequence length, and number of timed steps."""

    model: str
    sequence: int
    steps: int

    @property
    def checkpoint_bytes(self) -> int:
        from studies.bench.byte_gpt import SIZES

        return 12 * SIZES[self.model].with_sequence(self.sequence).params


class Writer(ABC):
    """A checkpoint writer under test, which saves and restores the state of a DeepSpeed engine.

    Attributes:
        waited_s: Seconds for which training has waited for the writer, outside of `save`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.waited_s = 0.0

    @classmethod
    def config(cls) -> dict[str, Any]:
        """Return the keys of DeepSpeed's config that select this checkpoint writer."""
        return {}

    @abstractmethod
    def save(self, folder: Path, tag: str) -> None: ...

    def wait(self) -> None:
        """Wait until this checkpoint writer has finished its work on the last checkpoint.

        Not every writer flushes its files to the disk (fsync) as a part of this work.
        """

    def load(self, folder: Path, tag: str) -> None:
        self.engine.load_checkpoint(str(folder), tag=tag)


class Nothing(Writer):
    def save(self, folder: Path, tag: str) -> None:
        pass

    def load(self, folder: Path, tag: str) -> None:
        pass


class TorchWriter(Writer):
    """DeepSpeed's default checkpoint writer, which calls torch.save. Training waits, and nothing is fsynced."""

    def save(self, folder: Path, tag: str) -> None:
        self.engine.save_checkpoint(str(folder), tag=tag)


class FastPersist(TorchWriter):
    """DeepSpeed's FastPersist checkpoint writer, selected by the config key ``checkpoint.writer``."""

    decoupled = False

    @classmethod
    def config(cls) -> dict[str, Any]:
        writer = {"type": "fast", "decoupled": cls.decoupled, "data_parallel": "replica"}
        return {"checkpoint": {"checkpoint_serialization": False, "writer": writer}}


class DecoupledFastPersist(FastPersist):
    """DeepSpeed's FastPersist checkpoint writer in a separate process.

    A save returns before the checkpoint is committed. Training waits for the commit in the next optimizer step.
    """

    decoupled = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        commit = engine._commit_decoupled_checkpoint

        def timed() -> None:
            begin = time.perf_counter()
            commit()
            self.waited_s += time.perf_counter() - begin

        engine._commit_decoupled_checkpoint = timed

    def wait(self) -> None:
        self.engine._commit_decoupled_checkpoint()


class DcpAsync(Writer):
    """A checkpoint writer that passes the optimizer state to torch's ``distributed.checkpoint.async_save``."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._future: Any = None

    def _state(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        return {
            "fp32": dict(enumerate(t.detach() for t in optimizer.fp32_partitioned_groups_flat)),
            "state": {i: dict(s) for i, s in enumerate(optimizer.optimizer.state.values())},
            "steps": self.engine.global_steps,
        }

    def save(self, folder: Path, tag: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()  # this writer writes one checkpoint at a time
        self._future = async_save(self._state(), checkpoint_id=str(folder / tag))

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, folder: Path, tag: str) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self._state(), checkpoint_id=str(folder / tag))


class Ebbtide(TorchWriter):
    """ebbtide's checkpoint writer used with DeepSpeed's own optimizer. State is copied while training goes on.

    ``waited_s`` counts the seconds for which an update waited until its state had been copied.
    """

    def __init__(self, engine: Any) -> None:
        from ebbtide.runtime.checkpoint import install
        from ebbtide.simulator import CheckpointPlan

        super().__init__(engine)
        self.lazy = install(engine, CheckpointPlan())
        before_update = self.lazy._live.before_update

        def timed(subgroup: int) -> None:
            begin = time.perf_counter()
            before_update(subgroup)
            self.waited_s += time.perf_counter() - begin

        self.lazy._live.before_update = timed  # type: ignore[method-assign]

    def wait(self) -> None:
        self.lazy.wait()


WRITERS: dict[str, type[Writer]] = {
    "none": Nothing,
    "torch": TorchWriter,
    "fastpersist": FastPersist,
    "fastpersist decoupled": DecoupledFastPersist,
    "dcp async": DcpAsync,
    "ebbtide": Ebbtide,
}


def run_writer(name: str, workload: TimedJob, folder: Path) -> dict[str, Any]:
    """Train and save checkpoints with one of the compared checkpoint writers. Return a dict of median times and rates.

    Training and saving run in this process.

    Args:
        name: Key of `WRITERS`, such as ``ebbtide``. ``none`` saves nothing.
    """
    engine, batches = _engine(workload, WRITERS[name].config())
    writer = WRITERS[name](engine)
    folder.mkdir(parents=True, exist_ok=True)
    session = _SavingRun(engine, batches, writer, folder)
    session.train(WARM_STEPS, every=0)
    if name != "none":
        session.train(2, every=1)  # warms up files, buffers and processes
        writer.wait()
    result = {
        "every_1": session.train(workload.steps, every=1),
        "every_10": session.train(max(10, workload.steps), every=10),
        "write_bytes_per_s": None if name == "none" else _write_rate(session, folder),
        "restore_s": _restore(writer, folder, session.last_tag) if name != "none" else 0.0,
        "host_peak_bytes": host_peak_bytes(),
    }
    if isinstance(writer, Ebbtide):
        result["in_turn"] = rates_in_turn(session, writer, workload)
        result["last"] = writer.lazy.last.__dict__
    engine.destroy()
    return result


def _engine(workload: TimedJob, config: dict[str, Any]) -> tuple[Any, Any]:
    from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine
    from studies.bench.deepspeed_ops import build_host_ops
    from studies.bench.rank import become_only_rank

    become_only_rank()
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1", LOCAL_SIZE="1")  # FastPersist reads these
    build_host_ops()
    size = SIZES[workload.model].with_sequence(workload.sequence)
    engine = stock_engine(ByteGPT(size), {**ds_config(1, 5_000_000), **config})
    return engine, Batches(1, workload.sequence)


class _SavingRun:
    """A training run that saves a checkpoint every few steps with one of the compared checkpoint writers, such as
    ebbtide's.
    """

    def __init__(self, engine: Any, batches: Any, writer: Writer, folder: Path) -> None:
        self.engine, self.batches, self.writer, self.folder = engine, batches, writer, folder
        self.step = 0
        self.last_tag = ""

    def train(self, steps: int, every: int) -> dict[str, Any]:
        # A stall is the time of the save itself and of later waits of training for this checkpoint. With a checkpoint
        # in every step the values are medians, otherwise means.
        from studies.bench.byte_gpt import train_step

        stalls, iterations = list[float](), list[float]()
        self.writer.waited_s, begin_all = 0.0, time.perf_counter()
        for number in range(1, steps + 1):
            begin, waited = time.perf_counter(), self.writer.waited_s
            train_step(self.engine, self.batches.at(self.step, self.engine.device))
            self.step += 1
            late = self.writer.waited_s - waited  # for the checkpoint of the previous step
            saved = self._save() if every and number % every == 0 else 0.0
            stalls.append(late + saved)
            iterations.append(time.perf_counter() - begin)
        length_s = time.perf_counter() - begin_all
        saves = max(1, steps // (every or 1))
        self.writer.wait()
        return {
            "stall_s": median(stalls) if every == 1 else sum(stalls) / saves,
            "stall_mean_s": sum(stalls) / saves,
            "iteration_s": median(iterations) if every == 1 else length_s / steps,
            "checkpoints": steps // every if every else 0,
        }

    def _save(self) -> float:
        begin = time.perf_counter()
        self.last_tag = f"step{self.step}"
        self.writer.save(self.folder, self.last_tag)
        stall = time.perf_counter() - begin
        for old in self.folder.iterdir():  # delete all but the last two, as retention does
            hidden = old.name.startswith(".")  # a checkpoint that is being written
            if old.is_dir() and not hidden and old.name not in (self.last_tag, f"step{self.step - 1}"):
                shutil.rmtree(old)
        return stall


def _write_rate(session: _SavingRun, folder: Path) -> float:
    rates = []
    for number in range(3):
        begin = time.perf_counter()
        session.writer.save(folder, f"rate{number}")
        session.writer.wait()
        length_s = time.perf_counter() - begin
        files = [p for p in (folder / f"rate{number}").rglob("*") if p.is_file()]
        rates.append(sum(p.stat().st_size for p in files) / length_s)
        session.last_tag = f"rate{number}"
    return median(rates)


def rates_in_turn(session: _SavingRun, writer: Ebbtide, workload: TimedJob) -> dict[str, Any]:
    """Measure the bytes per second that ebbtide's checkpoint writer and plain O_DIRECT writes reach on one disk.

    A time runs from the first block until the bytes are on the disk. All writers run in each of several rounds,
    because a disk's speed changes. Their order varies, because a disk can be slower after one writer than after
    another. Only speeds of the same round are compared.

    Returns:
        The bytes per second of each round, and two ratios, each the median over the rounds. ``checkpoint_rate``:
        speed of ebbtide's writer divided by the speed of plain writes from a memory buffer of a checkpoint's size.
        ``checkpoint_rate_over_cached``: speed of ebbtide's writer divided by the speed of plain writes that write the
        same few blocks of memory repeatedly. On an emulated disk, the second ratio may be lower than the first,
        because these few blocks are read from the processor's cache.
    """
    measured: dict[str, Callable[[], float]] = {
        "raw_bytes_per_s": lambda: raw_write_bytes_per_s(session.folder, workload),
        "cached_bytes_per_s": lambda: raw_write_bytes_per_s(session.folder, workload, cached=True),
        "writers_bytes_per_s": lambda: _saved_alone(session, writer),
    }
    rates: dict[str, list[float]] = {name: [] for name in measured}
    names = list(measured)
    for turn in range(IN_TURN):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            rates[name].append(measured[name]())
    raw, cached, ours = rates.values()
    return {
        **rates,
        "checkpoint_rate": _median_ratio(ours, raw),
        "checkpoint_rate_over_cached": _median_ratio(ours, cached),
    }


def _saved_alone(session: _SavingRun, writer: Ebbtide) -> float:
    old, session.last_tag = session.last_tag, f"{session.last_tag}t"
    writer.save(session.folder, session.last_tag)
    told = writer.lazy.wait()
    assert told is not None
    shutil.rmtree(session.folder / old, ignore_errors=True)
    os.sync()  # as after a plain writer
    return told.payload_bytes / told.persist_s


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def _restore(writer: Writer, folder: Path, tag: str) -> float:
    for path in (folder / tag).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    begin = time.perf_counter()
    writer.load(folder, tag)
    return time.perf_counter() - begin


def raw_write_bytes_per_s(folder: Path, workload: TimedJob, *, cached: bool = False) -> float:
    """Return the bytes per second at which threads write a file of a checkpoint's size with O_DIRECT.

    They write aligned blocks, and the time includes the final fsync.

    Args:
        cached: Let each thread write one block of memory repeatedly, instead of a checkpoint's many blocks.
    """
    size = max(BLOCK_BYTES, workload.checkpoint_bytes // BLOCK_BYTES * BLOCK_BYTES)
    path = folder / "raw"
    memory = mmap.mmap(-1, RAW_THREADS * BLOCK_BYTES if cached else size)
    pattern = os.urandom(1 << 16)
    for _ in range(0, len(memory), len(pattern)):
        memory.write(pattern)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(_stripe(descriptor, memory, size), range(RAW_THREADS)))
        os.fsync(descriptor)
        return size / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        path.unlink()
        os.sync()  # file systems discard deleted files at their next commit, which must not slow down the next writer


def _stripe(descriptor: int, memory: mmap.mmap, size: int) -> Callable[[int], None]:
    def write(number: int) -> None:
        with memoryview(memory) as view:
            for offset in range(number * BLOCK_BYTES, size, RAW_THREADS * BLOCK_BYTES):
                at = offset if len(view) == size else number * BLOCK_BYTES
                os.pwrite(descriptor, view[at : at + BLOCK_BYTES], offset)

    return write
