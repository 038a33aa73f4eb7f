"""Memory, link traffic and utilization in each phase of training with stock ZeRO-3 and offloading.

    python -m studies.memory_wall --json memory_wall.json

The study asks the questions of "Breaking the Memory Wall" (Maurya et al., arXiv 2406.10728) on this machine. With a
CUDA GPU, it reads the counters of torch's allocator and of NVML. Without a GPU, there is neither device memory nor a
link. Then the results have the memory and CPU use of the process, and null for all values of the device.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from ebbtide.profiler.nvml import handle_of
from ebbtide.profiler.watcher import host_bytes
from rich.progress import track

from studies.bench.byte_gpt import SIZES, Batch, Batches, ByteGPT, ds_config, stock_engine
from studies.bench.console import publish, study_parser
from studies.bench.phase_clock import PHASES
from studies.bench.rank import become_only_rank

T = TypeVar("T")
Row = dict[str, Any]  # figures of a phase. None for a value that could not be read
WARMUP = 3
SAMPLE_EVERY_S = 0.005
# Bytes/s of one lane in one direction, after the line code (8b/10b, 128b/130b, FLIT).
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class MemoryInUse:
    """The host and device memory in use at one moment of training. ``device_bytes`` is None without a GPU."""

    t_s: float
    host_bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class Passage:
    """One phase of one training step: its wall time, CPU time, and peak of GPU memory (None without a GPU)."""

    phase: str
    begun_s: float
    ended_s: float
    cpu_s: float
    device_peak_bytes: int | None

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s


class Sampler(Generic[T]):
    """A thread that calls the function ``read`` repeatedly while a ``with`` block runs, and collects the results.

    The thread appends to the list ``found``, so use the list only after the block. If ``read`` raises an
    error, the error is raised again at the end of the block.
    """

    def __init__(self, read: Callable[[], T], every_s: float) -> None:
        self.found: list[T] = []
        self._read, self._every_s = read, every_s
        self._done, self._pool = threading.Event(), ThreadPoolExecutor(1)

    def __enter__(self) -> "Sampler[T]":
        self._sampling = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._pool.shutdown()
        self._sampling.result()

    def _run(self) -> None:
        while True:
            self.found.append(self._read())
            if self._done.wait(self._every_s):
                return


@dataclass(frozen=True)
class LinkSample:
    """One reading of a GPU's PCIe traffic and utilization counters.

    NVML counts the traffic over 20 ms, and the utilization (0 to 1) over up to a second.
    """

    t_s: float
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    gpu_utilisation: float


class LinkCounters:
    """A reader of one GPU's NVML counters, for use by a single thread."""

    def __init__(self, index: int) -> None:
        """Connect to NVML's counters of one GPU.

        Args:
            index: Index of the GPU in torch. NVML finds the GPU by its UUID, since
                ``CUDA_VISIBLE_DEVICES`` renumbers torch's GPUs and not NVML's.

        Raises:
            RuntimeError: If NVML is missing or forbids the counters.
        """
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpu = handle_of(pynvml, index)
            self.capacity_bytes_per_s = self._capacity()
            self.read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"PCIe traffic is read from NVML, which must give its counters, but: {error}") from error

    def _capacity(self) -> float | None:
        generation = self._nvml.nvmlDeviceGetCurrPcieLinkGeneration(self._gpu)
        width = self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self._gpu)
        lane = LANE_BYTES_PER_S.get(generation)
        return None if lane is None else lane * width

    def read(self) -> LinkSample:
        """Return one reading of the GPU's NVML counters (PCIe traffic and utilization), with the middle of
        the call as time.
        """
        nvml, begun_s = self._nvml, time.perf_counter()
        # The GPU receives what comes from the host. NVML counts in KB/s.
        received = nvml.nvmlDeviceGetPcieThroughput(self._gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)
        sent = nvml.nvmlDeviceGetPcieThroughput(self._gpu, nvml.NVML_PCIE_UTIL_TX_BYTES)
        busy = nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu / 100
        middle_s = (begun_s + time.perf_counter()) / 2
        return LinkSample(middle_s, received * 1e3, sent * 1e3, busy)


class PhaseBorders:
    """A recorder of the start and end of training phases.

    On a GPU, every start and end waits for the GPU. So all work that a phase has started counts in this
    phase. This may make an iteration a little slower.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.passages: list[Passage] = []

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
        result = work()
        if self._cuda:
            torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated()) if self._cuda else None
        cpu_s = time.process_time() - cpu_begun_s
        self.passages.append(Passage(phase, begun_s, time.perf_counter(), cpu_s, peak))
        return result


def main(arguments: list[str] | None = None) -> None:
    args = _arguments(arguments)
    become_only_rank()
    size = "tiny" if args.quick else args.size
    figures = measure(size, args.steps, args.sequence, args.batch, args.subgroup)
    publish("memory_wall", args.json, figures)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = study_parser("memory_wall", __doc__)
    parser.add_argument("--size", default="57m", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=5, help=f"number of measured steps, after {WARMUP} warm-up steps")
    parser.add_argument(
        "--sequence", type=int, default=256, help="number of bytes in a training sequence of the byte-level model"
    )
    parser.add_argument("--batch", type=int, default=4, help="number of training sequences per step")
    parser.add_argument(
        "--subgroup", type=int, default=10_000_000, help="elements per subgroup (DeepSpeed's sub_group_size)"
    )
    parser.add_argument("--quick", action="store_true", help="run a quick test with a tiny model")
    args = parser.parse_args(arguments)
    for name in ("steps", "sequence", "batch", "subgroup"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, but got {getattr(args, name)}")
    return args


def measure(size: str, steps: int, sequence: int, batch: int, subgroup: int) -> dict[str, Any]:
    """Train a few steps with stock ZeRO-3 and offloading, and return the memory and PCIe traffic of each phase."""
    cuda = torch.cuda.is_available()
    model = ByteGPT(SIZES[size].with_sequence(sequence))
    engine = stock_engine(model, ds_config(batch, subgroup))
    params = sum(engine.optimizer.fp16_partitioned_groups_flat_numel)
    batches = Batches(batch, sequence)
    for number in range(WARMUP):
        _step(engine, batches.at(number, engine.device), PhaseBorders(cuda))
    borders = PhaseBorders(cuda)
    counters = LinkCounters(torch.cuda.current_device()) if cuda else None
    # No pause between reads, because each read of the counters takes NVML's window of 20 ms.
    traffic = Sampler(counters.read, 0.0) if counters else nullcontext()
    with Sampler(lambda: _memory(cuda), SAMPLE_EVERY_S) as memory, traffic as sampler:
        for number in track(range(WARMUP, WARMUP + steps), description="training with DeepSpeed's ZeRO-3 offload"):
            _step(engine, batches.at(number, engine.device), borders)
    links = sampler.found if sampler else []
    engine.destroy()
    rows = {p: phase_row(p, borders.passages, memory.found, links) for p in PHASES}
    capacity = counters.capacity_bytes_per_s if counters else None
    return {
        "model": size,
        "params": params,
        "steps": steps,
        "sequence": sequence,
        "batch": batch,
        "memory_source": "torch's CUDA allocator" if cuda else "the process's resident set: no GPU",
        "traffic_source": "NVML counters over 20 ms" if cuda else "none: there is no link to count",
        "link_capacity_bytes_per_s": capacity,
        "phases": rows,
        "claims": claims(rows, capacity),
        "passages": [asdict(p) for p in borders.passages],
        "memory": [asdict(s) for s in memory.found],
        "links": [asdict(s) for s in links],
    }


def _step(engine: Any, batch: Batch, borders: PhaseBorders) -> None:
    loss = borders.run("forward", lambda: engine(*batch))
    borders.run("backward", lambda: engine.backward(loss))
    borders.run("step", engine.step)


def _memory(cuda: bool) -> MemoryInUse:
    held = int(torch.cuda.memory_allocated()) if cuda else None
    return MemoryInUse(time.perf_counter(), host_bytes(), held)


def phase_row(
    phase: str, passages: Sequence[Passage], memory: Sequence[MemoryInUse], links: Sequence[LinkSample]
) -> Row:
    """Return a row with measurements of one training phase over all steps.

    The row has the phase's median time, the peaks of host and GPU memory, and the means of PCIe traffic and of GPU and
    CPU use. A value that could not be read is None.

    Raises:
        ValueError: If no step has this phase.
    """
    own = [p for p in passages if p.phase == phase]
    if not own:
        raise ValueError(
            f"at least one measured step must contain the phase {phase!r}, but none does. Set --steps to 1 or more"
        )
    seconds = sum(p.seconds for p in own)
    moments = [s for s in memory if _within(s.t_s, own)]
    traffic = [s for s in links if _within(s.t_s, own)]
    held = [s.device_bytes for s in moments if s.device_bytes is not None]
    return {
        "seconds": statistics.median(p.seconds for p in own),
        "cpu_cores_busy": sum(p.cpu_s for p in own) / seconds,
        "host_peak_bytes": max((s.host_bytes for s in moments), default=None),
        "device_peak_bytes": max((p.device_peak_bytes or 0 for p in own), default=0) or None,
        "device_trough_bytes": min(held, default=None),
        "gpu_utilisation": _mean([s.gpu_utilisation for s in traffic]),
        "to_device_bytes_per_s": _mean([s.to_device_bytes_per_s for s in traffic]),
        "from_device_bytes_per_s": _mean([s.from_device_bytes_per_s for s in traffic]),
    }


def _within(moment_s: float, passages: Sequence[Passage]) -> bool:
    return any(p.begun_s <= moment_s <= p.ended_s for p in passages)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def claims(rows: dict[str, Row], capacity: float | None) -> list[dict[str, Any]]:
    """Return a list of the claims of the paper "Breaking the Memory Wall", each with the values measured here.

    The claims are paraphrased from the abstract, which gives no numbers to compare with. A measured value
    is None if it needs a GPU.
    """
    iteration_s = sum(row["seconds"] for row in rows.values())
    peaks = [row["device_peak_bytes"] for row in rows.values()]
    troughs = [row["device_trough_bytes"] for row in rows.values()]
    varies = None if None in peaks + troughs else min(troughs) / max(peaks)
    badly = "data movement and computation overlap badly"
    return [
        {
            "paper": "host and GPU memory together are managed badly",
            "measure": "lowest over highest device memory of an iteration",
            "measured": varies,
        },
        {
            "paper": badly,
            "measure": "share of the link's capacity, larger direction, by phase",
            "measured": {p: _link_share(row, capacity) for p, row in rows.items()},
        },
        {
            "paper": badly,
            "measure": "GPU utilisation by phase",
            "measured": {p: row["gpu_utilisation"] for p, row in rows.items()},
        },
        {
            "paper": "offloading costs time",
            "measure": "step's share of forward + backward + step",
            "measured": rows["step"]["seconds"] / iteration_s,
        },
    ]


def _link_share(row: Row, capacity: float | None) -> float | None:
    ways = [row["to_device_bytes_per_s"], row["from_device_bytes_per_s"]]
    return None if capacity is None or None in ways else max(ways) / capacity


if __name__ == "__main__":
    main()
