"""Measures a machine, all in all in at most a minute, and remembers the result."""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from profiler import adam, contention, copies, dram, storage
from profiler.hardware import Hardware, look
from runtime.kernels.host import cache_dir
from simulator.machine import Machine
from simulator.quantity import Quantity

DeviceChoice = Literal["auto", "cuda", "emulated"]
Progress = Callable[[int, int, str], None]
ELEMENTS = 32_000_000  # of a measured subgroup: far beyond any cache
STAGES = ("copies", "host Adam", "stock Adam", "device Adam", "DRAM", "storage", "contention")


def measure_machine(
    storage_dir: str | Path | None = None,
    *,
    seconds: float = 30.0,
    device: DeviceChoice = "auto",
    elements: int = ELEMENTS,
    progress: Progress | None = None,
    name: str | None = None,
    fresh: bool = False,
) -> Machine:
    """Measures what the simulator needs to know of this machine.

    Args:
        storage_dir: the folder that checkpoints will go to; its disk is measured.
        seconds: time to spend, split over the measurements; each takes at least 5 repeats.
        device: ``auto`` takes CUDA if there is one. Without, the device is emulated: its
            quantities say so and describe no GPU.
        progress: called with (stages done, stages, the next one's name).
        fresh: measure although the cache has this machine. Only runs without ``storage_dir`` are
            cached, since the disk belongs to the folder.

    Raises:
        ValueError: ``cuda`` was asked for where there is none, or seconds <= 0.
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be > 0, but got {seconds}")
    cuda = _is_cuda(device)
    facts = look(cuda)
    cached = _cache_path(facts, cuda)
    if storage_dir is None and not fresh and cached.exists():
        return Machine.load(cached)
    machine = _measure(facts, cuda, storage_dir, seconds, elements, progress or _silent, name)
    if storage_dir is None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        machine.save(cached)
    return machine


def _silent(done: int, total: int, stage: str) -> None:
    del done, total, stage


def _is_cuda(device: DeviceChoice) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a CUDA GPU, but torch finds none: use 'auto'")
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _cache_path(facts: Hardware, cuda: bool) -> Path:
    key = (
        f"{facts.cpu_name}-{facts.cores}-{facts.gpu_name}-{facts.gpus}-{'cuda' if cuda else 'cpu'}"
    )
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in key)
    return cache_dir() / f"machine-{safe}.json"


def _measure(
    facts: Hardware,
    cuda: bool,
    storage_dir: str | Path | None,
    seconds: float,
    elements: int,
    progress: Progress,
    name: str | None,
) -> Machine:
    share_s = seconds / len(STAGES)
    threads = _threads(facts.cores)
    tell = _stages(progress)
    tell()
    copied = copies.measure_copies(cuda, elements * 4, share_s)
    tell()
    by_threads, notes = adam.host_adam_by_threads(elements, threads, share_s)
    tell()
    stock = adam.stock_host_adam(elements, share_s)
    tell()
    on_device = adam.device_adam(elements, share_s, cuda)
    tell()
    triad, triad_notes = dram.triad(elements, facts.cores, share_s)
    host_copy = dram.host_copy(elements, facts.cores, share_s / 4)
    tell()
    disk = _storage(storage_dir, elements * 4, share_s)
    tell()
    beside = contention.link_contention if cuda else contention.host_contention
    matrix = beside(elements // 2, facts.cores, share_s)
    progress(len(STAGES), len(STAGES), "")
    return Machine(
        name=name or platform.node() or "this machine",
        device_kind="cuda" if cuda else "emulated",
        device_name=facts.gpu_name or facts.cpu_name,
        unified_memory=not cuda,
        device_shares_host_cores=not cuda,
        gpus_per_node=facts.gpus,
        cpu_cores=facts.cores,
        numa_nodes=facts.numa_nodes,
        host_memory_bytes=facts.host_memory_bytes,
        device_memory_bytes=facts.device_memory_bytes,
        h2d_bytes_per_s=copied.h2d,
        d2h_bytes_per_s=copied.d2h,
        duplex_factor=copied.duplex_factor,
        pageable_h2d_bytes_per_s=copied.pageable_h2d,
        pageable_d2h_bytes_per_s=copied.pageable_d2h,
        copy_latency_s=copied.latency_s,
        dram_bytes_per_s=_dram_capacity(triad, by_threads[max(by_threads)]),
        host_copy_bytes_per_s=host_copy,
        host_adam_params_per_s=by_threads[max(by_threads)],
        stock_host_adam_params_per_s=stock,
        device_adam_params_per_s=on_device,
        host_adam_by_threads=by_threads,
        storage_write_bytes_per_s=disk.write,
        storage_read_bytes_per_s=disk.read,
        storage_fsync_s=disk.fsync_s,
        contention=matrix,
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        measured_with=shlex.join(sys.argv),
        warnings=(*facts.warnings, *copied.doubts, *notes, *triad_notes),
    )


def _dram_capacity(triad: Quantity, host_adam: Quantity) -> Quantity:
    """The larger of what triad and the update itself move: a capacity nothing exceeded."""
    moved = host_adam.median * 28
    return triad if moved <= triad.median else Quantity.exact(moved, "measured", "fused host Adam")


def _stages(progress: Progress) -> Callable[[], None]:
    names = iter(enumerate(STAGES))

    def tell() -> None:
        done, stage = next(names)
        progress(done, len(STAGES), stage)

    return tell


def _threads(cores: int) -> list[int]:
    """1, half of the cores, all of them."""
    return sorted({1, max(1, cores // 2), cores})


def _storage(folder: str | Path | None, size_bytes: int, budget_s: float) -> storage.StorageRates:
    if folder is not None:
        return storage.measure_storage(Path(folder), size_bytes, budget_s)
    with tempfile.TemporaryDirectory() as scratch:
        return storage.measure_storage(Path(scratch), size_bytes, budget_s)
