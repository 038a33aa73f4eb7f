"""Measurements by several ranks of a node at the same time, which show how they share the hardware.

The result is the fraction of a rate (such as copy bandwidth) that each rank keeps when all ranks use it.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from ebbtide.profiler.rates import copies, storage
from ebbtide.profiler.rates.adam import AdamBuffers
from ebbtide.profiler.rates.copies import TRIAD_BYTES_PER_ELEMENT
from ebbtide.profiler.rates.sampling import LEAST_REPEATS, MOST_REPEATS, doubts, noise, repeat_s, timed_s
from ebbtide.runtime.hardware.cores import threads_of_updates
from ebbtide.runtime.kernels import host
from ebbtide.simulator.machine import ShareName
from ebbtide.simulator.quantity import Quantity, Source

STAGES = ("h2d", "d2h", "link", "triad", "host_adam", "storage")
COLLECTIVES = ("gather", "reduce")
COLLECTED = 8  # collectives that are timed together: as many on every rank, as each waits for all
LEAST_ELEMENTS = 1_000_000
HOST_ADAM_BYTES = 28  # DRAM traffic per parameter
PATIENCE_S = 60.0  # time to wait at a barrier for a late rank
UNEVEN = 0.8  # speed of the slowest rank divided by that of the fastest
MORE_THAN_ALONE = 1.25  # speed of all ranks divided by that of one rank that has all cores

_SAID = {"gather": "all-gather of 16-bit values", "reduce": "reduce-scatter of 16-bit values"}
Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class RankMeasurement:
    """The settings of a measurement that several ranks run at the same time. Every rank process receives a copy.

    Attributes:
        spared: Threads that each rank leaves to its training thread.
    """

    ranks: int
    cores: int
    cuda: bool
    elements: int
    folder: str
    budget_s: float
    spared: int = 0

    @property
    def own_elements(self) -> int:
        return max(self.elements // self.ranks, min(self.elements, LEAST_ELEMENTS))

    @property
    def own_threads(self) -> int:
        return max(1, self.cores // self.ranks - self.spared)

    @property
    def threads_alone(self) -> int:
        return max(1, self.cores - self.spared)


@dataclass(frozen=True)
class StageSamples:
    """Measured rates of one activity, such as copies: with rank 0 alone, and with all ranks at the same time."""

    alone: list[float]
    together: list[list[float]]

    def share(self, source: Source, unit: str) -> Quantity:
        """Return an activity's speed on a rank while all ranks run it, divided by its speed on a rank that runs alone.

        The result has the median and the quartiles over all ranks and repeats.
        """
        alone = statistics.median(self.alone)
        each = [statistics.median(rates) for rates in self.together]
        detail = (
            f"{len(each)} ranks at once: {sum(each):.3g} {unit} in total, {min(each):.3g} to "
            f"{max(each):.3g} each. One rank alone: {alone:.3g}"
        )
        pooled = [rate / alone for rates in self.together for rate in rates]
        return Quantity.from_samples(pooled, source, detail)


def measure_ranks(
    ranks: int, cores: int, cuda: bool, elements: int, folder: Path | None, budget_s: float
) -> tuple[dict[ShareName, Quantity], dict[str, Quantity], list[str]]:
    """Measure the fraction of each hardware rate that a rank keeps while all ranks of a node run.

    Each rank is a process with its own GPU (on CUDA) and its part of the cores. All ranks start together, and
    none stops before all have enough samples. `Machine.rank_shares` stores the result.

    Returns:
        Fractions for ``h2d``, ``d2h``, ``link``, ``dram`` and ``storage``, the rates of collectives among the ranks by
        field of `Machine`, and sentences that name unstable measurements.

    Raises:
        ValueError: There are fewer than 2 ranks, or more than there are cores or GPUs.
        RuntimeError: A rank died.
    """
    check_ranks(ranks, cores, cuda)
    with _scratch(folder) as path:
        spared = cores - threads_of_updates(cores) if cuda else 0
        job = RankMeasurement(ranks, cores, cuda, elements, str(path), budget_s / (2 * len(STAGES)), spared)
        samples, collected = _run(job)
    shares, notes = _shares(samples, cuda)
    source: Source = "measured" if cuda else "emulated"
    backend = "NCCL" if cuda else "gloo"
    rates = {
        f"{name}_bytes_per_s": Quantity.from_samples(found, source, f"{backend}, {ranks} ranks, {_SAID[name]}")
        for name, found in collected.items()
    }
    return shares, rates, notes


def check_ranks(ranks: int, cores: int, cuda: bool) -> None:
    """Raise ValueError if fewer than 2 ranks are requested, or more than this machine has cores (or GPUs, on CUDA)."""
    most = min(cores, torch.cuda.device_count()) if cuda else cores
    if not 2 <= ranks <= most:
        of = "the number of cores or of GPUs, whichever is smaller" if cuda else "the number of cores"
        raise ValueError(
            f"--ranks, the number of ranks that measure at the same time, must be at least 2 and at most {most} "
            f"({of}), but got {ranks}"
        )


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ebbtide-ranks-", dir=folder) as made:
        yield Path(made)


def _shares(samples: dict[str, StageSamples], cuda: bool) -> tuple[dict[ShareName, Quantity], list[str]]:
    copied: Source = "measured" if cuda else "emulated"
    links: tuple[ShareName, ...] = ("h2d", "d2h", "link")
    result = {name: samples[name].share(copied, "bytes/s") for name in links}
    result["dram"] = _dram(samples).share("measured", "bytes/s")
    result["storage"] = samples["storage"].share("measured", "bytes/s")
    notes: list[str] = []
    for name, stage in samples.items():
        spreads = [Quantity.from_samples(rates).relative_iqr for rates in stage.together]
        rank = spreads.index(max(spreads))
        durations = [1 / rate for rate in stage.together[rank]]
        notes += doubts(f"{name} of rank {rank} at the same time as the others", durations)
        notes += doubts(f"{name} of one rank alone", [1 / rate for rate in stage.alone])
        notes += _uneven(name, stage)
    together = result["dram"].median * len(samples["triad"].together)
    if together > MORE_THAN_ALONE:
        notes.append(
            f"all ranks together reach {together:.0%} of the DRAM rate of one process with all "
            "cores: the measurement of that process was disturbed. Measure again"
        )
    return result, notes


def _dram(samples: dict[str, StageSamples]) -> StageSamples:
    adam = samples["host_adam"]
    update = StageSamples(
        [rate * HOST_ADAM_BYTES for rate in adam.alone],
        [[rate * HOST_ADAM_BYTES for rate in rates] for rates in adam.together],
    )
    triad = samples["triad"]
    alone = max((triad.alone, update.alone), key=statistics.median)
    together = max(
        (triad.together, update.together), key=lambda ranks: sum(statistics.median(rates) for rates in ranks)
    )
    return StageSamples(alone, together)


def _uneven(name: str, stage: StageSamples) -> list[str]:
    each = [statistics.median(rates) for rates in stage.together]
    slow, fast = min(each), max(each)
    if slow >= UNEVEN * fast:
        return []
    return [
        f"{name}: rank {each.index(slow)} reaches {slow / fast:.0%} of rank {each.index(fast)} at "
        "the same time: check its link, its NUMA node, and other processes that use them"
    ]


# -- the processes


def _run(job: RankMeasurement) -> tuple[dict[str, StageSamples], dict[str, list[float]]]:
    spawn = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    barrier = spawn.Barrier(job.ranks)
    enough = spawn.Array("i", len(STAGES))
    ends = [spawn.Pipe(duplex=False) for _ in range(job.ranks)]
    processes = [
        spawn.Process(target=_measure, args=(job, rank, barrier, enough, end[1]), daemon=True)
        for rank, end in enumerate(ends)
    ]
    try:
        for process in processes:
            process.start()
        result = _collect([receiver for receiver, _ in ends], processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
    samples = {stage: StageSamples(result[0][n][0], [rank[n][1] for rank in result]) for n, stage in enumerate(STAGES)}
    # A collective is as slow as its slowest rank.
    slowest = [[min(each) for each in zip(*(rank[-1][n] for rank in result), strict=True)] for n in range(2)]
    return samples, dict(zip(COLLECTIVES, slowest, strict=True))


def _collect(receivers: list[Connection], processes: Sequence[Any]) -> list[list[Any]]:
    result: dict[int, Any] = {}
    while len(result) < len(receivers):
        open_ends: list[Any] = [r for n, r in enumerate(receivers) if n not in result]
        sentinels = [p.sentinel for n, p in enumerate(processes) if n not in result]
        wait([*open_ends, *sentinels])
        for rank, receiver in enumerate(receivers):
            if rank in result:
                continue
            alive = processes[rank].is_alive()
            if receiver.poll():
                result[rank] = receiver.recv()
            elif not alive:
                raise RuntimeError(f"rank {rank} died with code {processes[rank].exitcode}")
    errors = {rank: said for rank, said in result.items() if isinstance(said, str)}
    if errors:
        # The BrokenBarrierErrors of other ranks follow from the first error.
        rank = min(errors, key=lambda rank: "BrokenBarrierError" in errors[rank])
        raise RuntimeError(f"rank {rank} could not measure: {errors[rank]}")
    return [result[rank] for rank in range(len(receivers))]


def _measure(job: RankMeasurement, rank: int, barrier: Any, enough: Any, sender: Connection) -> None:
    try:
        torch.set_num_threads(job.own_threads)
        if job.cuda:
            torch.cuda.set_device(rank)
        result = []
        for number, stage in enumerate(STAGES):
            with _stage(stage, job, rank) as (amount, work, clock):
                alone: list[float] = []
                work(job.own_threads)
                barrier.wait(PATIENCE_S)
                if rank == 0:
                    alone = repeat_s(lambda: work(job.threads_alone), job.budget_s, clock)
                barrier.wait(PATIENCE_S + job.budget_s)
                together = _together(lambda: work(job.own_threads), job, clock, enough, number, barrier)
                result.append(([amount / s for s in alone], [amount / s for s in together]))
                barrier.wait(PATIENCE_S)
        result.append(_collectives(job, rank))
        sender.send(result)
    except Exception as error:  # sent to the parent process, which raises it
        barrier.abort()
        sender.send(f"{type(error).__name__}: {error}")


def _collectives(job: RankMeasurement, rank: int) -> tuple[list[float], list[float]]:
    # The buffers have the size of DeepSpeed's prefetch bucket where there is memory for it.
    import torch.distributed as dist

    device = torch.device("cuda", rank) if job.cuda else torch.device("cpu")
    meeting = (Path(job.folder).absolute() / "collectives").as_uri()
    dist.init_process_group("nccl" if job.cuda else "gloo", init_method=meeting, rank=rank, world_size=job.ranks)
    try:
        part = torch.ones(max(1, job.elements // job.ranks), dtype=torch.bfloat16, device=device)
        whole = torch.ones(job.ranks * part.numel(), dtype=torch.bfloat16, device=device)
        received = (job.ranks - 1) * part.numel() * part.element_size()
        clock: Clock = copies.cuda_clock if job.cuda else timed_s

        # The newest PyTorch calls it reduce_scatter_single, and warns about the former name.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

        def rates(collective: Callable[[], object]) -> list[float]:
            collective()
            return [received / clock(collective) for _ in range(COLLECTED)]

        return (rates(lambda: dist.all_gather_into_tensor(whole, part)), rates(lambda: reduce_scatter(part, whole)))
    finally:
        dist.destroy_process_group()


def _together(
    work: Callable[[], object], job: RankMeasurement, clock: Clock, enough: Any, number: int, barrier: Any
) -> list[float]:
    # A rank goes on while others still measure, since samples on an otherwise idle machine would be wrong. A rank that
    # fails would keep the others waiting forever, so it breaks the ``barrier``, which ends the loop.
    began_s = time.perf_counter()
    durations: list[float] = []
    reported = False
    while enough[number] < job.ranks and not barrier.broken:
        durations.append(clock(work))
        if (
            not reported
            and len(durations) >= LEAST_REPEATS
            and (time.perf_counter() - began_s >= job.budget_s or len(durations) >= MOST_REPEATS)
        ):
            reported = True
            with enough.get_lock():
                enough[number] += 1
    # The last measurement may have continued after the other ranks ended.
    return durations[:-1] if len(durations) > LEAST_REPEATS else durations


@contextmanager
def _stage(stage: str, job: RankMeasurement, rank: int) -> Iterator[tuple[float, Callable[[int], object], Clock]]:
    clock: Clock = copies.cuda_clock if job.cuda else timed_s
    elements = job.own_elements
    if stage in ("h2d", "d2h", "link"):
        yield (*_copying(stage, elements * 4, job.cuda), clock)
    elif stage == "triad":
        a, b, c = (noise(elements) for _ in range(3))
        amount = float(elements * TRIAD_BYTES_PER_ELEMENT)
        yield amount, lambda threads: host.triad(a, b, c, threads), timed_s
    elif stage == "host_adam":
        buffers = AdamBuffers(elements)
        yield float(elements), buffers.host_update, timed_s
    else:
        with storage.file_to_write(Path(job.folder) / f"rank-{rank}", elements * 4) as file:
            yield float(file.size_bytes), lambda threads: file.write(), timed_s


def _copying(stage: str, size_bytes: int, cuda: bool) -> tuple[float, Callable[[int], object]]:
    ends = copies.Endpoints(size_bytes, cuda)
    if stage == "link":
        both = copies.both_ways(ends, size_bytes)
        return 2.0 * size_bytes, lambda threads: both()
    copy = ends.h2d if stage == "h2d" else ends.d2h
    return float(size_bytes), lambda threads: copy()
