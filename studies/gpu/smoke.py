"""The GPU suite's quick checks, which run first on a new machine because they find most faults.

They check the compilers, the GPU kernel, a training step, and whether copies and updates overlap.
"""

import itertools
import os
import shutil
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from ebbtide.simulator.schedule import D2H_LANES, H2D_LANES, Lane, Span
from ebbtide.simulator.timeline import Timeline

from studies.gpu.contract import attached, differing, plan_of, settle, start, train
from studies.gpu.suite import Figures, OutOfTimeError, Suite

DEVICE_LANES = D2H_LANES | H2D_LANES | {Lane.DEVICE_UPDATE}


def ops(suite: Suite) -> Figures:
    """Check that DeepSpeed's CPU ops, and ebbtide's CPU and GPU kernels, are compiled or can be compiled."""
    from ebbtide.runtime.kernels import host

    from studies.bench.deepspeed_ops import build_host_ops

    build_host_ops()
    host.load()
    figures: Figures = {
        "host_ops": "built",
        "host_kernel": "built",
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if not suite.emulated:
        figures["fused_adam"] = _fused_adam()
        _on_device(
            [torch.ones(4096) for _ in range(3)],
            torch.ones(4096).bfloat16(),
            torch.zeros(4096, dtype=torch.bfloat16),
            _first_step(),
        )
        figures["device_kernel"] = "built"
    return figures | {"correct": True}


def _fused_adam() -> str:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception as error:  # fails without nvcc. The row of this system reports it too
        return f"not built: {error}"
    return "built"


def kernel_bits(suite: Suite) -> Figures:
    """Compare ebbtide's GPU and CPU kernels of the Adam update, bit by bit, on random and special values."""
    from ebbtide.runtime.kernels.adam import AdamStep, BiasCorrection
    from ebbtide.runtime.kernels.host import host_update

    chunk, total = (10_007, 10**5) if suite.emulated else (20_000_003, 4 * 10**8)
    bias, unequal, seen = BiasCorrection(0.9, 0.95), 0, 0
    special = torch.tensor([0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan")])
    generator = torch.Generator().manual_seed(0)
    for number in range(1, total // chunk + 2):
        try:
            suite.left_s()
        except OutOfTimeError:
            break  # `values` shows how far the run came
        values = [torch.randn(chunk, generator=generator) for _ in range(3)]
        values[2] = values[2].square()
        grad = torch.randn(chunk, generator=generator) * 10.0 ** ((number % 30) - 24)
        grad[: len(special)] = special
        grad = grad.bfloat16()
        step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, *bias.advance(number, 0.9, 0.95))
        theirs = [v.clone() for v in values]
        wires = [torch.zeros(chunk, dtype=torch.bfloat16) for _ in range(2)]
        threads = torch.get_num_threads()
        host_update(values, grad, wires[0], step, 0.37, threads=threads, tail=chunk % 16)
        theirs, wires[1] = _on_device(theirs, grad, wires[1], step)
        pairs = [*zip(values, theirs, strict=True), tuple(wires)]
        unequal += sum(_unequal(a, b) for a, b in pairs)
        seen += chunk
    return {"values": seen, "differing": unequal, "correct": unequal == 0 and seen > 0}


def _first_step() -> Any:
    from ebbtide.runtime.kernels.adam import AdamStep, BiasCorrection

    return AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, *BiasCorrection(0.9, 0.95).advance(1, 0.9, 0.95))


def _on_device(
    state: list[torch.Tensor], grad: torch.Tensor, wire: torch.Tensor, step: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    tail = grad.numel() % 16
    if not torch.cuda.is_available():
        from ebbtide.runtime.devices.choice import EmulatedDevice

        EmulatedDevice().update(state, grad, wire, step, 0.37, tail, None)
        return state, wire
    from ebbtide.runtime.kernels.device import device_update

    there, out = [t.cuda() for t in state], wire.cuda()
    device_update(there, grad.cuda(), out, step, 0.37, tail)
    return [t.cpu() for t in there], out.cpu()


def _unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    same = (a.view(bits) == b.view(bits)) | (torch.isnan(a) & torch.isnan(b))
    return int((~same).sum())


def one_step(suite: Suite) -> Figures:
    """Train a tiny model with all placements of optimizer state, and compare the bits with those of stock DeepSpeed.

    Returns:
        The tensors that differ, and the seconds for which two or more lanes worked at the same time (a
        lane is a queue of ops that run one after the other, such as a copy direction). Also each place
        in the code that makes the host wait for the GPU during a step after the warm-up.
    """
    settle()
    stock = train(start())
    control = differing(train(start()), stock)
    pattern = ["host", "device", "resident"]
    differ = differing(train(attached(start(), pattern, suite.emulated)), stock)
    timeline, waits = _steady(suite)
    overlap_s, busy_s = overlap(timeline)
    return {
        "differing": differ[:8],
        "control_differing": control[:8],
        "correct": (not differ) or (None if control else False),
        "lanes": sorted({span.lane.value for span in timeline.spans}),
        "lanes_overlap_s": overlap_s,
        "lanes_busy_s": busy_s,
        "waits_for_the_device": waits,
        "summary": f"{len(waits)} places wait for the device, lanes overlap {overlap_s:.2g} s",
    }


def sanitizer(suite: Suite) -> Figures:
    """Run the GPU suite's section ``one_step`` under NVIDIA's memory checker, if it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or suite.emulated:
        return {"summary": "compute-sanitizer is not installed, or there is no GPU: not run"}
    folder = suite.out / "sanitizer"
    folder.mkdir(exist_ok=True)
    command = ["studies.gpu", "--section", "one_step", "--out", str(folder), "--minutes", "2"]
    under = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    failed = suite.run("sanitizer", command, suite.left_s(), under)
    return {"correct": failed is None} | ({"failed": failed} if failed else {})


class Synchronisations:
    """A counter of calls that make the host wait for the GPU and that torch's debug mode does not report.

    Attributes:
        places: Number of such calls, by called function and by the file and line of the caller.
    """

    NAMES = ("synchronize", "Event.synchronize", "Stream.synchronize")

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._undo: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Synchronisations":
        for name in self.NAMES:
            path, _, member = name.rpartition(".")
            owner = getattr(torch.cuda, path) if path else torch.cuda
            stock = getattr(owner, member)
            self._undo.append((owner, stock))
            setattr(owner, member, self._counted(name, stock))
        return self

    def _counted(self, name: str, stock: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while "accelerator" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back  # DeepSpeed's frame, which passes the call on
            self.places[f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"] += 1
            return stock(*args, **kwargs)

        return synchronize

    def __exit__(self, *_: object) -> None:
        while self._undo:
            owner, stock = self._undo.pop()
            owner.synchronize = stock


def _steady(suite: Suite) -> tuple[Timeline, dict[str, int]]:
    import ebbtide.runtime

    from studies.bench.byte_gpt import SIZES, Batches, train_step

    engine = start()
    device = "emulated" if suite.emulated else "cuda"
    ebbtide.runtime.attach(engine, plan_of(engine, ["host", "device", "resident"]), device=device)
    batches = Batches(2, SIZES["tiny"].sequence)
    for number in range(4):
        train_step(engine, batches.at(number, engine.device))
    steady = [batches.at(number, engine.device) for number in range(4, 7)]
    with warnings.catch_warnings(record=True) as told, Synchronisations() as synchronised:
        warnings.simplefilter("always")
        _debug_waits("warn")
        for batch in steady:
            train_step(engine, batch)
        _debug_waits("default")
    waits = Counter(f"{w.filename}:{w.lineno}" for w in told if "synchroniz" in str(w.message).lower())
    waits += synchronised.places
    timeline = engine.optimizer.timeline()
    engine.destroy()
    return timeline, dict(waits.most_common(30))


def _debug_waits(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def overlap(timeline: Timeline) -> tuple[float, float]:
    """Return how long the lanes of a training timeline work at the same time, in seconds.

    Returns:
        Seconds with two or more busy lanes, and seconds with at least one.
    """
    spans = [s for s in timeline.spans if s.lane in DEVICE_LANES or s.lane == Lane.HOST]
    marks = sorted({s.start_s for s in spans} | {s.end_s for s in spans})
    both = busy = 0.0
    for begin, end in itertools.pairwise(marks):
        lanes = {s.lane for s in spans if _covers(s, begin, end)}
        busy += (end - begin) * (len(lanes) >= 1)
        both += (end - begin) * (len(lanes) >= 2)
    return both, busy


def _covers(span: Span, begin_s: float, end_s: float) -> bool:
    return span.start_s <= begin_s and span.end_s >= end_s
