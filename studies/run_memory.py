"""Peak of host memory per parameter while a plan is attached, changed, resumed or made automatically.

    python -m studies.run_memory --json run_memory.json

The peak of an action, such as attaching a plan, is the sum of two numbers. The first is the host memory that ebbtide
holds for the plan after the action. The second is the resident memory that was in use during the action but not after
it. `*_device_bytes_per_param` is the device memory that ebbtide holds after the action.

In this study, DeepSpeed's buffers are not page-locked. A plan that uses page-locked memory must therefore copy each of
these buffers to a new one, and the old and the new buffer exist together for a while. With ZeRO-1 and 2, DeepSpeed's
flat buffers always stay in host memory. Optimizer state that a plan keeps on the device then takes memory on the host
too.

Without a GPU, an emulated device makes the same copies. All memory of the emulated device is in use before the first
measurement, so it is part of no peak.
"""

import argparse
import gc
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ebbtide.runtime
import torch
from ebbtide.profiler.memory import host_bytes
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.emulated import EmulatedDevice
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.replan.observed import WATCHED_STEPS
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.cuts import subgroups_of
from ebbtide.simulator import Plan, Way, preset
from ebbtide.simulator.plan import Placement

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine, train_step
from studies.bench.console import publish, study_parser
from studies.bench.host_peak import host_peak_bytes, reset_host_peak
from studies.bench.rank import become_only_rank

HOST: tuple[Placement, ...] = ("host",)
MIX: tuple[Placement, ...] = ("host", "device", "resident")
DEVICE_BYTES_PER_PARAM = 24  # memory of the emulated GPU: enough for two plans


class Peak(NamedTuple):
    """The peak of host memory while a block of code runs, and the device memory in use when the block ends."""

    host_bytes: int
    device_bytes: int


class PageLocking(EmulatedDevice):
    """An emulated device that lets a study measure a plan's host memory as the resident set of the process.

    Host buffers are on separate memory pages, as page-locked buffers are. The memory that stands for GPU memory is
    touched when the device is built, and is never given back. So using it does not change the resident set.

    Attributes:
        used_bytes: Bytes of the device's memory that are in use.
    """

    def __init__(self, memory_bytes: int) -> None:
        super().__init__()
        self._pages: set[int] = set()
        self._memory = torch.frombuffer(mmap.mmap(-1, memory_bytes), dtype=torch.uint8).fill_(1)
        self.used_bytes = 0

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        begin = -(-self.used_bytes // 256) * 256
        end = begin + elements * dtype.itemsize
        if end > self._memory.numel():
            raise torch.OutOfMemoryError(f"{end} bytes of {self._memory.numel()}")
        self.used_bytes = end
        return self._memory[begin:end].view(dtype)

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        if not elements:
            return torch.empty(0, dtype=dtype)
        memory = mmap.mmap(-1, elements * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype, count=elements).zero_()
        self._pages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pages:
            return tensor
        return self.host_empty(tensor.numel(), tensor.dtype).copy_(tensor)


def main() -> None:
    args = _arguments()
    # With this threshold, freed buffers return to the system immediately, so that the resident set shows the memory in
    # use.
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        os.execv(sys.executable, [sys.executable, "-m", "studies.run_memory", *sys.argv[1:]])
    become_only_rank()
    publish("run_memory", args.json, measure(args.size, args.subgroup))


def _arguments() -> argparse.Namespace:
    parser = study_parser("run_memory", __doc__)
    parser.add_argument("--size", default="40m", choices=sorted(SIZES))
    parser.add_argument(
        "--subgroup", type=int, default=1_000_000, help="elements per subgroup (DeepSpeed's sub_group_size)"
    )
    return parser.parse_args()


def measure(size: str, subgroup: int) -> dict[str, Any]:
    """Measure peaks of host memory with ZeRO-3 and ZeRO-2, and return them in bytes per parameter of the model.

    Memory is measured in three actions: a plan is attached, the plan is changed, and training resumes from a
    checkpoint. With ZeRO-3, memory is also measured with the plan ``auto``.
    """
    params, peaks = _by_hand(size, subgroup, 3)
    peaks["auto"] = _automatic(size, subgroup)
    _, below = _by_hand(size, subgroup, 2)
    peaks |= {f"stage2_{name}": peak for name, peak in below.items()}
    kind = "cuda" if torch.cuda.is_available() else PageLocking.name
    figures: dict[str, Any] = {"device_kind": kind, "params": params}
    for name, peak in peaks.items():
        figures[f"{name}_peak_bytes_per_param"] = round(peak.host_bytes / params, 2)
    for name, peak in peaks.items():
        figures[f"{name}_device_bytes_per_param"] = round(peak.device_bytes / params, 2)
    return figures


def _by_hand(size: str, subgroup: int, stage: int) -> tuple[int, dict[str, Peak]]:
    """Measure the memory peaks of attaching a plan to an engine, changing the plan, and resuming from a checkpoint.

    Returns:
        The number of parameters, and the peaks by name.
    """
    peaks: dict[str, Peak] = {}
    batches = Batches(1, 32)
    engine = _engine(size, ds_config(1, subgroup, stage=stage))
    sizes = list(subgroups_of(engine.optimizer, subgroup))
    host, mix = _plan(subgroup, sizes, HOST), _plan(subgroup, sizes, MIX)
    device = _device(sum(sizes))
    with _peak(engine, peaks, "attach"):
        ebbtide.runtime.attach(engine, host, device=device)
    train_step(engine, batches.at(0, engine.device))
    engine.optimizer.wait()
    with _peak(engine, peaks, "replan"):
        switch_plan(engine, mix)
    with _peak(engine, peaks, "replan_back"):
        switch_plan(engine, host)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.checkpoint_engine.wait()
        with _peak(engine, peaks, "resume"):
            engine.load_checkpoint(folder)
    engine.destroy()
    peaks["replan"] = _highest(peaks["replan"], peaks.pop("replan_back"))
    return sum(sizes), peaks


def _automatic(size: str, subgroup: int) -> Peak:
    """Return the peak of host memory of training with the plan ``auto``.

    Two peaks are measured: while ebbtide attaches to the engine, and while it switches to the plan that it has made.
    The higher peak is returned.
    """
    peaks: dict[str, Peak] = {}
    batches = Batches(1, 32)
    engine = _engine(size, ds_config(1, subgroup))
    device = _device(SIZES[size].params)
    with _peak(engine, peaks, "attach"):
        # Any machine is suitable, because memory is measured, and no predicted time is used.
        ebbtide.runtime.attach(engine, "auto", device=device, machine=preset("h100-node"))
    for number in range(WATCHED_STEPS - 1):
        train_step(engine, batches.at(number, engine.device))
    engine.optimizer.wait()
    # Before the measurement, so that memory of the training itself (activations, gradients on the device) is not
    # counted as the plan's.
    engine.backward(engine(*batches.at(WATCHED_STEPS, engine.device)))
    with _peak(engine, peaks, "switch"):
        engine.step()
        engine.optimizer.wait()
    engine.destroy()
    return _highest(*peaks.values())


def _highest(*peaks: Peak) -> Peak:
    return Peak(max(p.host_bytes for p in peaks), max(p.device_bytes for p in peaks))


def _device(params: int) -> Device:
    if torch.cuda.is_available():
        from ebbtide.runtime.devices.cuda import CudaDevice

        return CudaDevice()
    return PageLocking(DEVICE_BYTES_PER_PARAM * params)


def _engine(size: str, config: dict[str, Any]) -> Any:
    model = ByteGPT(SIZES[size].with_sequence(32))
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    return stock_engine(model, config)


def _plan(subgroup: int, sizes: list[int], pattern: tuple[Placement, ...]) -> Plan:
    placements = [pattern[i % len(pattern)] for i in range(len(sizes))]
    slots = 2 if "device" in placements else 0
    return Plan(subgroup_size=subgroup, ways=Way.each(placements), staging_slots=slots, prefetch=min(1, slots))


@contextmanager
def _peak(engine: Any, peaks: dict[str, Peak], name: str) -> Iterator[None]:
    """Record the peak of host memory that ebbtide takes while the ``with`` block runs, as ``peaks[name]``.

    The peak is the sum of two numbers: the memory that ebbtide holds for the plan when the block ends, and the memory
    that the process used during the block but had freed by its end. Other memory of the process does not count.
    """
    gc.collect()
    reset_host_peak()
    yield
    highest = host_peak_bytes()
    gc.collect()
    session = engine.optimizer._ebbtide
    held = session.host_bytes() + highest - host_bytes()
    peaks[name] = Peak(held, _device_bytes(session))


def _device_bytes(session: Session) -> int:
    states = session.executor.states
    resident = sum(t.nbytes for s in states if s.placement == "resident" for t in s.state)
    gradients = sum(s.gradient.nbytes for s in states if s.placement != "host")
    return resident + gradients + sum(slot.nbytes for slot in session.executor.slots)


if __name__ == "__main__":
    main()
