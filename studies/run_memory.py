"""Peak host memory per parameter while a plan is attached, made, changed and resumed, by RSS.

    python -m studies.run_memory --json run_memory.json

Where pages are locked, a buffer cannot be kept: its bytes are copied to new memory, so that old and
new are there at once. Without a GPU a device that copies in the same way stands for one. A peak is
what the session holds after it, plus how much higher the resident set was meanwhile; it counts what
moved to the emulated device, which is host memory too. ZeRO-1 and 2 keep DeepSpeed's flat buffers:
what a plan keeps on the device takes room on both sides.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import runtime
from runtime.devices.base import Device
from runtime.devices.emulated import EmulatedDevice
from runtime.replan.auto import WATCHED_STEPS
from runtime.replan.switch import switch_plan
from runtime.zero.cuts import subgroups_of
from simulator import Machine, Plan, preset
from simulator.plan import Placement
from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step

HOST: tuple[Placement, ...] = ("host",)
MIX: tuple[Placement, ...] = ("host", "device", "resident")


class PageLocking(EmulatedDevice):
    """Its host buffers lie on pages of their own, as page-locked ones do: nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._pages: set[int] = set()

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
    """Entry point of ``python -m studies.run_memory``."""
    args = _arguments()
    # Freed buffers go back to the system at once, so that the resident set tells what is in use.
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        os.execv(sys.executable, [sys.executable, "-m", "studies.run_memory", *sys.argv[1:]])
    become_only_rank()
    figures = measure(args.size, args.subgroup)
    write_record(args.json, "run_memory", figures)
    for name, value in figures.items():
        Console().print(f"{name}: {value}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--size", default="40m", choices=sorted(SIZES))
    parser.add_argument("--subgroup", type=int, default=1_000_000, help="sub_group_size")
    return parser.parse_args()


def measure(size: str, subgroup: int) -> dict[str, Any]:
    """The peaks in bytes per parameter: the four of ZeRO-3, and ZeRO-2's without `auto`."""
    params, peaks = _by_hand(size, subgroup, 3)
    peaks["auto"] = _automatic(size, subgroup)
    _, below = _by_hand(size, subgroup, 2)
    peaks |= {f"stage2_{name}": peak for name, peak in below.items()}
    figures: dict[str, Any] = {"device_kind": _device().name, "params": params}
    return figures | {f"{name}_peak_bytes_per_param": round(p, 2) for name, p in peaks.items()}


def _by_hand(size: str, subgroup: int, stage: int) -> tuple[int, dict[str, float]]:
    """Parameters, and the peaks of attach, of re-plans there and back, and of a resume."""
    peaks: dict[str, float] = {}
    batches = Batches(1, 32)
    engine = _engine(size, ds_config(1, subgroup, stage=stage))
    sizes = list(subgroups_of(engine.optimizer, subgroup))
    host, mix = _plan(subgroup, sizes, HOST), _plan(subgroup, sizes, MIX)
    with _peak(engine, peaks, "attach"):
        runtime.attach(engine, host, device=_device())
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
    peaks["replan"] = max(peaks["replan"], peaks.pop("replan_back"))
    return sum(sizes), peaks


def _automatic(size: str, subgroup: int) -> float:
    """The peak of ``plan="auto"``: when it attaches, or when it has planned."""
    peaks: dict[str, float] = {}
    batches = Batches(1, 32)
    engine = _engine(size, ds_config(1, subgroup))
    with _peak(engine, peaks, "attach"):
        runtime.attach(engine, "auto", device=_device(), machine=_machine())
    for number in range(WATCHED_STEPS - 1):
        train_step(engine, batches.at(number, engine.device))
    engine.optimizer.wait()
    # The training's own memory (activations, gradients on the device) is not the plan's.
    engine.backward(engine(*batches.at(WATCHED_STEPS, engine.device)))
    with _peak(engine, peaks, "switch"):
        engine.step()
        engine.optimizer.wait()
    engine.destroy()
    return max(peaks.values())


def _device() -> Device:
    if torch.cuda.is_available():
        from runtime.devices.cuda import CudaDevice

        return CudaDevice()
    return PageLocking()


def _engine(size: str, config: dict[str, Any]) -> Any:
    import deepspeed

    model = ByteGPT(SIZES[size].with_sequence(32))
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _plan(subgroup: int, sizes: list[int], pattern: tuple[Placement, ...]) -> Plan:
    placements = [pattern[i % len(pattern)] for i in range(len(sizes))]
    slots = 2 if "device" in placements else 0
    return Plan(
        subgroup_size=subgroup, placement=Plan.runs(placements), staging_slots=slots,
        prefetch=min(1, slots),
    )  # fmt: skip


def _machine() -> Machine:
    """Any that makes `auto` plan: what is measured here is memory."""
    return preset("h100-node")


@contextmanager
def _peak(engine: Any, peaks: dict[str, float], name: str) -> Iterator[None]:
    """Notes the highest resident set of the block, in bytes of the session per parameter."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark so far
    yield
    highest = _status_bytes("VmHWM")
    gc.collect()
    session = engine.optimizer._ebbtide
    states = session.executor.states
    held = session.host_bytes()
    if session.device.name != "cuda":  # the emulated device's memory is resident too
        held += sum(t.nbytes for s in states if s.placement == "resident" for t in s.state)
        held += sum(s.gradient.nbytes for s in states if s.placement != "host")
        held += sum(slot.parts.nbytes for slot in session.executor.slots)
    params = sum(state.elements for state in states)
    peaks[name] = (held + highest - _status_bytes("VmRSS")) / params


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have {key}, but has not")


if __name__ == "__main__":
    main()
