"""The measurement of this machine's speed (copies, updates, disk) in at most a minute, with a cached result."""

import logging
import platform
import shlex
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from ebbtide.profiler.hardware import Hardware, look
from ebbtide.profiler.neighbours import DISTURBED, HostWatch
from ebbtide.profiler.nvml import GpuWatch
from ebbtide.profiler.rates import adam, contention, copies, products, storage
from ebbtide.profiler.rates.ranks import HOST_ADAM_BYTES, check_ranks, measure_ranks
from ebbtide.profiler.rates.sampling import Part, unstable
from ebbtide.profiler.rates.sharing import differences, with_writer_cost
from ebbtide.runtime.hardware.builds import own_ninja_first, tell_builds
from ebbtide.runtime.hardware.launcher import rank
from ebbtide.runtime.kernels import host
from ebbtide.simulator.engines.cache import cache_dir
from ebbtide.simulator.machine import Machine, ShareName
from ebbtide.simulator.quantity import Quantity
from torch.utils import cpp_extension

logger = logging.getLogger("ebbtide")
Progress = Callable[[int, int, str], object]
ELEMENTS = 32_000_000  # elements of a measured subgroup, which is far larger than any cache
MOST_SECONDS = 60.0
# A measurement that was disturbed is repeated at the next request, this many times in all. The best one counts.
MOST_TIMES = 3
TIMES = "measurements"
STAGES = (
    "kernels",
    "copies",
    "device Adam",
    "products",
    "host Adam",
    "stock Adam",
    "DRAM",
    "storage",
    "contention",
    "ranks at once",
)


def measure_machine(
    storage_dir: str | Path | None = None,
    *,
    seconds: float = 30.0,
    elements: int = ELEMENTS,
    progress: Progress | None = None,
    fresh: bool = False,
    ranks: int = 1,
    drives: Sequence[str | Path] = (),
) -> Machine:
    """Measure how fast this machine copies, computes, updates optimizer state and writes to disk, for the simulator.

    Without CUDA, a GPU is emulated on the CPU. The emulated speeds are marked as emulated, and describe no real GPU.

    Args:
        storage_dir: Folder for checkpoints. The disk that holds this folder is measured.
        seconds: Total time to spend. Each speed is measured at least 5 times. The first run also compiles kernels.
        progress: Called with the number of finished stages, the number of stages, and the next stage's name.
        fresh: If True, measure even if the cache has results for this machine. Cached results that were disturbed by
            other programs are measured again, up to `MOST_TIMES` times in all. Results with ``storage_dir`` or
            ``drives`` are never cached, because another folder may be on another disk.
        ranks: If above 1, also measure with this number of processes at the same time (`ebbtide.profiler.rates.ranks`).
            The processes are spawned, so a calling script must guard its own start with ``if __name__ == "__main__"``.
        drives: Folders for optimizer state on drives. The drive of each folder is measured (`Machine.drives`).

    Raises:
        ValueError: seconds is not in (0, 60], or there are more ranks than cores or GPUs.
    """
    own_ninja_first()
    tell_builds(cpp_extension, rank)
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"seconds must be > 0 and at most {MOST_SECONDS:g} (--seconds), but got {seconds}")
    cuda = torch.cuda.is_available()
    facts = look(cuda)
    if ranks != 1:
        check_ranks(ranks, facts.cores, cuda)
    cached = _cache_path(facts, cuda)
    disks = storage_dir is not None or bool(drives)
    known = None if disks or fresh else _cached(cached, facts, ranks)
    times = int(known.facts.get(TIMES, 1)) if known is not None else 0
    if known is not None and (not _disturbed(known) or times >= MOST_TIMES):
        return known
    if known is not None:
        cause = "; ".join(_disturbed(known))
        logger.info("measuring this machine's rates again (time %d of at most %d): %s", times + 1, MOST_TIMES, cause)
    wanted = _Wanted(
        facts,
        cuda,
        Path(storage_dir) if storage_dir is not None else None,
        seconds,
        elements,
        ranks,
        progress or _silent,
        tuple(Path(drive) for drive in drives),
    )
    machine = _watched(wanted)
    if known is not None and len(_disturbed(known)) < len(_disturbed(machine)):
        machine = known
    if not disks:
        machine = machine.model_copy(update={"facts": {**machine.facts, TIMES: str(times + 1)}})
        cached.parent.mkdir(parents=True, exist_ok=True)
        machine.save(cached)
    return machine


@dataclass(frozen=True)
class _Wanted:
    facts: Hardware
    cuda: bool
    folder: Path | None
    seconds: float
    elements: int
    ranks: int
    progress: Progress
    drives: tuple[Path, ...] = ()

    @property
    def share_s(self) -> float:
        return self.seconds / (len(STAGES) - 1 - (self.ranks == 1) + len(self.drives))


def _silent(done: int, total: int, stage: str) -> None:
    del done, total, stage


def _cache_path(facts: Hardware, cuda: bool) -> Path:
    key = f"{facts.cpu_name}-{facts.cores}-{facts.gpu_name}-{facts.gpus}-{'cuda' if cuda else 'cpu'}"
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in key)
    return cache_dir() / f"machine-{safe}.json"


def _cached(path: Path, facts: Hardware, ranks: int) -> Machine | None:
    try:
        known = Machine.load(path)
    except (OSError, ValueError):
        return None
    if ranks != 1 and ranks not in known.rank_shares:
        return None
    # The cache holds rates. The container's memory limit may have changed since.
    return known.model_copy(update={"host_memory_bytes": facts.host_memory_bytes})


def _watched(wanted: _Wanted) -> Machine:
    if not wanted.cuda:
        with HostWatch() as host_watch:
            machine = _measure(wanted)
        return _with_notes(machine, {}, host_watch.warnings)
    with GpuWatch(torch.cuda.current_device()) as gpu_watch, HostWatch() as host_watch:
        machine = _measure(wanted)
    return _with_notes(machine, gpu_watch.facts, gpu_watch.warnings + host_watch.warnings)


def _with_notes(machine: Machine, facts: dict[str, str], warnings: list[str]) -> Machine:
    return machine.model_copy(
        update={
            "facts": {**machine.facts, **facts},
            "warnings": (*machine.warnings, *warnings, *_unstable(machine), *differences(machine)),
        }
    )


def _disturbed(machine: Machine) -> list[str]:
    return [warning for warning in machine.warnings if any(sign in warning for sign in DISTURBED)]


def _unstable(machine: Machine) -> list[str]:
    quantities = {
        "host Adam out of place": machine.host_adam_out_of_place,
        "stock host Adam": machine.stock_host_adam_params_per_s,
        "device Adam": machine.device_adam_params_per_s,
        "matrix products": machine.device_flops_per_s,
        "device memory": machine.device_memory_bytes_per_s,
        "host copies": machine.host_copy_bytes_per_s,
        "pageable H2D": machine.pageable_h2d_bytes_per_s,
        "pageable D2H": machine.pageable_d2h_bytes_per_s,
        **machine.contention,
    }
    return [note for name, q in quantities.items() if q is not None for note in unstable(name, q)]


def _measure(wanted: _Wanted) -> Machine:
    facts, cuda = wanted.facts, wanted.cuda
    tell = _stages(wanted.progress)
    tell()
    host.load()
    adam.stock_ops()
    if cuda:
        adam.device_adam(4096, 0.0, cuda)
    rates, notes = _device_rates(wanted, tell)
    for part in (_host_rates, _storage):
        more_rates, more_notes = part(wanted, tell)
        rates, notes = rates | more_rates, notes + more_notes
    tell()
    shares, collected, rank_notes = _ranks(wanted)
    wanted.progress(len(STAGES), len(STAGES), "")
    machine = Machine(
        name=platform.node() or "this machine",
        device_shares_host_cores=not cuda,
        numa_nodes=facts.numa_nodes,
        **facts.fields,
        **rates,
        **collected,
        rank_shares=shares,
        facts=facts.facts,
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        measured_with=shlex.join(sys.argv),
        warnings=(*facts.warnings, *notes, *rank_notes),
    )
    return with_writer_cost(machine)


def _device_rates(wanted: _Wanted, tell: Callable[[], None]) -> Part:
    elements, share_s = wanted.elements, wanted.share_s
    tell()
    rates, doubts = copies.measure_copies(wanted.cuda, elements * 4, share_s)
    tell()
    on_device = adam.device_adam(elements, share_s, wanted.cuda)
    tell()
    rates |= {
        "device_adam_params_per_s": on_device,
        "device_flops_per_s": products.products(wanted.cuda, share_s * 0.7),
        "device_memory_bytes_per_s": products.device_memory(wanted.cuda, elements, share_s * 0.3),
    }
    return rates, doubts


def _host_rates(wanted: _Wanted, tell: Callable[[], None]) -> Part:
    cores, elements, share_s = wanted.facts.cores, wanted.elements, wanted.share_s
    own = wanted.facts.update_threads
    tell()
    by_threads, notes = adam.host_adam_by_threads(elements, _threads(own), share_s * 0.8)
    apart = adam.host_adam_out_of_place(elements, own, share_s * 0.2)
    tell()
    stock = adam.stock_host_adam(elements, share_s * 0.6, cores)
    one_thread = adam.stock_host_adam(elements, share_s * 0.4, 1)
    tell()
    triad, triad_notes = copies.triad(elements, cores, share_s * 0.8)
    rates = {
        "dram_bytes_per_s": _dram_capacity(triad, by_threads[max(by_threads)]),
        "host_copy_bytes_per_s": copies.host_copy(elements, cores, share_s * 0.2),
        "host_adam_params_per_s": by_threads[max(by_threads)],
        "host_adam_out_of_place": apart,
        "stock_host_adam_params_per_s": stock,
        "stock_host_adam_thread_params_per_s": one_thread,
        "host_adam_by_threads": by_threads,
    }
    return rates, notes + triad_notes


def _storage(wanted: _Wanted, tell: Callable[[], None]) -> Part:
    tell()
    with _folder(wanted.folder) as folder:
        rates, doubts = storage.measure_storage(folder, wanted.elements * 4, wanted.share_s)
        drives = {
            str(drive.absolute()): storage.measure_drive(drive, storage.PARTS * wanted.elements * 4, wanted.share_s)
            for drive in wanted.drives
        }
        tell()
        matrix = _contention(wanted, folder)
    save_s = storage.measure_save(wanted.share_s / 4)
    return rates | {"drives": drives, "save_s_per_tensor": save_s, "contention": matrix}, doubts


def _contention(wanted: _Wanted, folder: Path) -> dict[str, Quantity]:
    path = folder / f".ebbtide-contention-{uuid.uuid4().hex}"
    size_bytes = storage.affordable_bytes(path, wanted.elements * 4, wanted.share_s / 6)
    with storage.file_to_write(path, size_bytes) as file:
        return contention.measure_contention(
            wanted.cuda, wanted.elements // 2, wanted.facts.update_threads, file, wanted.share_s
        )


def _ranks(wanted: _Wanted) -> tuple[dict[int, dict[ShareName, Quantity]], dict[str, Quantity], list[str]]:
    if wanted.ranks == 1:
        return {}, {}, []
    shares, collected, notes = measure_ranks(
        wanted.ranks, wanted.facts.cores, wanted.cuda, wanted.elements, wanted.folder, wanted.share_s
    )
    return {wanted.ranks: shares}, collected, notes


def _dram_capacity(triad: Quantity, host_adam: Quantity) -> Quantity:
    moved = host_adam.scaled(HOST_ADAM_BYTES, "what the fused host Adam moves")
    return triad if moved.median <= triad.median else moved


def _stages(progress: Progress) -> Callable[[], None]:
    names = iter(enumerate(STAGES))

    def tell() -> None:
        done, stage = next(names)
        progress(done, len(STAGES), stage)

    return tell


def _threads(cores: int) -> list[int]:
    return sorted({1, max(1, cores // 2), cores})


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
