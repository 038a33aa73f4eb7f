"""Measures a workload: a live DeepSpeed ZeRO-3 engine over a few training steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from profiler.memory import device_bytes, host_bytes
from runtime.kernels import host
from simulator.workload import Layer, MemoryPoint, WireDtype, Workload

# DeepSpeed records its trace in the first two steps; the allocators settle in the next ones.
WARMUP_STEPS = 4
SAMPLE_EVERY_S = 0.005
Phase = Literal["forward", "backward", "step", "other"]
_WIRE: dict[torch.dtype, WireDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class _Trace:
    """What the hooks note during one step; times in seconds, synchronised on CUDA."""

    began_s: float = 0.0
    phase: Phase = "forward"
    units: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gradient_path_s: float = 0.0
    memory: list[MemoryPoint] = field(default_factory=list)


def profile_engine(
    engine: Any, train_step: Callable[[Any], object], iterations: int = 3, name: str | None = None
) -> Workload:
    """Runs ``train_step(engine)`` a few times and describes what it does.

    Per-layer forward times come from module hooks; backward is split over the layers in the same
    proportions. What stock DeepSpeed's gradient path takes within backward is measured apart
    (``stock_backward_extra_s``), so that ``backward_s`` is what remains under a plan. On CUDA every
    hook synchronises: the phases' sum is then a little longer than an undisturbed step.

    Args:
        train_step: forward, backward and step of one whole optimizer step.
        iterations: measured steps, after `WARMUP_STEPS` of warm-up.

    Raises:
        ValueError: iterations < 1, or the engine's optimizer is not ZeRO-3's.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, but got {iterations}")
    if not hasattr(engine.optimizer, "fp16_partitioned_groups_flat_numel"):
        raise ValueError(
            "the engine must run ZeRO stage 3 (zero_optimization.stage: 3), but its optimizer is "
            f"{type(engine.optimizer).__name__}"
        )
    for _ in range(WARMUP_STEPS):
        train_step(engine)
    watcher = _Watcher(engine)
    try:
        traces = [watcher.watch(train_step) for _ in range(iterations)]
    finally:
        watcher.remove()
    return _workload(engine, traces, name or type(engine.module).__name__)


class PassiveProfile:
    """Profiles an engine that somebody else drives: `on_step` is called after each of its steps.

    Calls are counted per optimizer step, so that micro-steps of gradient accumulation belong to
    the step they end in.
    """

    def __init__(self, engine: Any, iterations: int) -> None:
        self._engine, self._iterations = engine, iterations
        self._seen = engine.global_steps
        self._steps = 0
        self._traces: list[_Trace] = []
        self._watcher: _Watcher | None = None

    def on_step(self) -> Workload | None:
        """The workload once enough steps were seen, else None."""
        if self._engine.global_steps == self._seen:
            return None
        self._seen = self._engine.global_steps
        self._steps += 1
        if self._watcher is not None:
            self._traces.append(self._watcher.trace)
            self._watcher.begin()
        elif self._steps == WARMUP_STEPS:
            self._watcher = _Watcher(self._engine)
            self._watcher.begin()
        if self._watcher is None or len(self._traces) < self._iterations:
            return None
        self._watcher.remove()
        return _workload(self._engine, self._traces, type(self._engine.module).__name__)


class _Watcher:
    """Hooks on the engine's units and wrappers around its phases, removed by `remove`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trace = _Trace()
        self._handles: list[Any] = []
        self._wrapped: list[tuple[Any, str]] = []
        for name, module in units(engine.module):
            self._hook(name, module)
        self._wrap(engine, "backward", "backward")
        self._wrap(engine, "step", "step")
        self._wrap_gradient_path()
        first = engine.module
        self._handles.append(first.register_forward_pre_hook(self._forward_begins, prepend=True))
        self._handles.append(first.register_forward_hook(self._forward_ends))

    def watch(self, train_step: Callable[[Any], object]) -> _Trace:
        self.begin()
        with _sampled(self._note_memory):
            train_step(self.engine)
        return self.trace

    def begin(self) -> None:
        """A new trace starts now."""
        self.trace = _Trace(began_s=_now_s())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for owner, name in self._wrapped:
            delattr(owner, name)

    def _forward_begins(self, *_: object) -> None:
        self.trace.phase = "forward"
        self._forward_began_s = _now_s()

    def _forward_ends(self, *_: object) -> None:
        self.trace.phases["forward"] += _now_s() - self._forward_began_s
        self._note_memory()

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        began: list[float] = []

        def before(*_: object) -> None:
            began.append(_now_s())

        def after(*_: object) -> None:
            if began and self.trace.phase == "forward":
                self.trace.units[name] += _now_s() - began.pop()
                self._note_memory()

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _wrap(self, owner: Any, name: str, phase: Phase) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.trace.phase = phase
            self._note_memory()
            began_s = _now_s()
            result = original(*args, **kwargs)
            self.trace.phases[phase] += _now_s() - began_s
            self._note_memory()
            return result

        setattr(owner, name, timed)
        self._wrapped.append((owner, name))

    def _wrap_gradient_path(self) -> None:
        optimizer = self.engine.optimizer
        original = optimizer.partition_grads

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = _now_s()
            result = original(*args, **kwargs)
            self.trace.gradient_path_s += _now_s() - began_s
            self._note_memory()
            return result

        optimizer.partition_grads = timed
        self._wrapped.append((optimizer, "partition_grads"))

    def _note_memory(self) -> None:
        self.trace.memory.append(
            MemoryPoint(
                t_s=max(0.0, time.perf_counter() - self.trace.began_s),
                phase=self.trace.phase,
                device_bytes=device_bytes(),
                host_bytes=host_bytes(),
            )
        )


@contextmanager
def _sampled(note: Callable[[], None]) -> Iterator[None]:
    """Calls ``note`` every few milliseconds from a thread of its own, and at both ends."""
    done = threading.Event()

    def keep_noting() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            note()

    note()
    thread = threading.Thread(target=keep_noting, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        note()


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def units(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules whose forward is timed: the members of lists of blocks, and what is beside them.

    Names are paths, so that a parameter belongs to the unit whose name begins its own.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child):
            found += [(f"{name}.{n}", block) for n, block in child.named_children()]
        elif any(isinstance(m, torch.nn.ModuleList) for m in child.modules()):
            found += [(f"{name}.{n}", unit) for n, unit in units(child)]
        else:
            found.append((name, child))
    return found


def _workload(engine: Any, traces: list[_Trace], name: str) -> Workload:
    optimizer = engine.optimizer
    sizes = tuple(int(n) for n in optimizer.fp16_partitioned_groups_flat_numel)
    forward_s = _median(trace.phases["forward"] for trace in traces)
    stock_extra_s = _median(trace.gradient_path_s for trace in traces)
    own_s = _own_gradient_path_s(optimizer) if not torch.cuda.is_available() else 0.0
    backward_s = max(0.0, _median(t.phases["backward"] for t in traces) - stock_extra_s)
    base = min(point.device_bytes for trace in traces for point in trace.memory)
    accumulation = int(engine.gradient_accumulation_steps())
    return Workload(
        name=name,
        layers=_layers(engine, traces, forward_s, backward_s + own_s),
        subgroups=sizes,
        subgroup_size=int(optimizer.sub_group_size),
        wire_dtype=_WIRE.get(optimizer.dtype, "fp32"),
        grad_bytes_per_param=optimizer.gradient_accumulation_dtype.itemsize,
        clip=optimizer.clip_grad > 0,
        gradient_accumulation_steps=accumulation,
        ranks_per_node=_ranks_per_node(),
        nodes=max(1, _world_size() // _ranks_per_node()),
        tokens_per_iteration=int(engine.train_batch_size()),
        device_base_bytes=base,
        stock_backward_extra_s=max(0.0, stock_extra_s - own_s),
        memory_curve=tuple(sorted(traces[-1].memory, key=lambda point: point.t_s)),
        provenance=f"medians of {len(traces)} steps of a live engine",
    )


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _own_gradient_path_s(optimizer: Any) -> float:
    """What ebbtide's gradient path takes instead on a machine without a GPU: copy and norm."""
    total = 0.0
    for flat in optimizer.fp16_partitioned_groups_flat:
        source = torch.zeros(flat.numel(), dtype=optimizer.gradient_accumulation_dtype)
        home = torch.zeros_like(source)
        began_s = time.perf_counter()
        home.copy_(source)
        host.norm(home)
        total += time.perf_counter() - began_s
    return total


def _layers(
    engine: Any, traces: list[_Trace], forward_s: float, backward_s: float
) -> tuple[Layer, ...]:
    """Runs of parameters, in DeepSpeed's order, that belong to one unit."""
    names = {param: name for name, param in engine.module.named_parameters()}
    unit_names = [name for name, _ in units(engine.module)]
    ordered = [p for group in engine.optimizer.fp16_groups for p in group]
    owners = [_owner(names.get(p, ""), unit_names) for p in ordered]
    elements: dict[str, int] = defaultdict(int)
    for param, owner in zip(ordered, owners, strict=True):
        elements[owner] += int(param.partition_numel())
    seconds = {n: _median(trace.units.get(n, 0.0) for trace in traces) for n in set(owners)}
    timed_s = sum(seconds.values()) or 1.0
    layers = []
    for owner, run in groupby(zip(ordered, owners, strict=True), key=lambda pair: pair[1]):
        size = sum(int(param.partition_numel()) for param, _ in run)
        share = seconds[owner] / timed_s * size / elements[owner]
        layers.append(
            Layer(name=owner, params=size, forward_s=forward_s * share,
                  backward_s=backward_s * share)
        )  # fmt: skip
    return tuple(layers)


def _owner(parameter: str, unit_names: list[str]) -> str:
    for unit in unit_names:
        if parameter.startswith(unit + "."):
            return unit
    return "model"


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _ranks_per_node() -> int:
    import os

    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
