"""Hooks in a live DeepSpeed engine that record the times and the memory of profiled training steps."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from ebbtide.profiler.activations import activations_of
from ebbtide.profiler.memory import device_bytes, host_bytes, peak_device_bytes, reset_peak
from ebbtide.profiler.tokens import tokens_of
from ebbtide.profiler.units import units
from ebbtide.runtime.hardware.background import InterpreterEndsError, native_work
from ebbtide.simulator.layer import MemoryPoint

SAMPLE_EVERY_S = 0.005
Phase = Literal["forward", "backward", "step", "other"]


@dataclass
class Trace:
    """The record of one profiled training step.

    Durations are in seconds. On CUDA they include the GPU's work, because the GPU is synchronized whenever the clock is
    read. The exception is ``issued_s``.

    Attributes:
        units: Forward seconds by part of the model, summed over all micro-batches.
        issued_s: CPU seconds to issue the forward passes to the GPU, without waiting for it.
        modules: Number of forward calls of modules with parameters during ``issued_s``.
        activations: Activation bytes by part of the model, in the micro-batch with the most.
        tokens: Tokens of this rank in all micro-batches. None if the number is unknown in any of them.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    phase: Phase = "other"
    unit: str = ""
    units: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    issued_s: float = 0.0
    modules: int = 0
    activations: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: int | None = 0
    gradient_path_s: float = 0.0
    memory: list[MemoryPoint] = field(default_factory=list)

    @property
    def device_peak_bytes(self) -> int:
        return max((point.device_bytes for point in self.memory), default=0)


class Watcher:
    """A recorder of times and memory in the steps of a DeepSpeed engine.

    The recorder puts hooks on the model's modules and wraps the engine's functions, until `remove`. Between the hooks,
    a thread samples memory. This thread only reads counters and appends to the measurements of the current step.
    Everything else runs on the training thread. The engine's ``step`` is not wrapped: callers run it through `timed`.

    Args:
        engine: DeepSpeed engine.
        first: True for the engine's first recorder. It matters only without CUDA, where counting activations slows down
            training. Only the first recorder then counts activations and samples memory, and only in its first step.
    """

    def __init__(self, engine: Any, *, first: bool = True) -> None:
        self.engine = engine
        self.trace = Trace()
        self._handles: list[Any] = []
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._activations = activations_of(engine.module)
        self._counts = first or not self._activations.costly
        self._in_engine_backward = False
        self._backward_began_s = 0.0
        for name, module in units(engine.module):
            self._hook(name, module)
        self._wrap(engine, "backward", self._timed_backward)
        # ``loss.backward()`` comes past the engine, but not past these two.
        self._wrap(engine.optimizer, "backward_prologue", self._torch_backward_begins)
        self._wrap(engine.optimizer, "backward_epilogue", self._torch_backward_ends)
        self._wrap(engine.optimizer, "partition_grads", self._timed_gradient_path)
        root = engine.module
        self._handles += [
            root.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            # Also after an exception: nothing of ours stays behind on autograd's stack.
            root.register_forward_hook(self._forward_ends, always_call=True),
        ]
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if self._counts:
            self._sampler.start()

    def begin(self) -> None:
        """Start the record of a new training step's times and memory."""
        self.trace = Trace(began_s=_now_s())
        self.note_memory()

    def end(self) -> Trace:
        """End the record of the current training step's times and memory, and return the record."""
        self.note_memory()
        self.trace.ended_s = _now_s()
        if self._activations.costly:
            self._counts = False
            self._done.set()
        return self.trace

    def timed(self, phase: Phase, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record the call's duration and memory peak under a phase of the training step.

        Args:
            phase: Name of the phase, such as ``forward`` or ``step``.
            work: Function to call with the other arguments.
        """
        self.trace.phase = phase
        self.note_memory()
        reset_peak()
        began_s = _now_s()
        result = work(*args, **kwargs)
        self.trace.phases[phase] += _now_s() - began_s
        self.note_memory(peak=True)
        return result

    def remove(self) -> None:
        """Remove all hooks and wrappers from the profiled DeepSpeed engine, and end the thread that samples memory."""
        self._done.set()
        if self._sampler.ident is not None:  # it was started
            self._sampler.join()
        self._activations.end()
        for handle in self._handles:
            handle.remove()
        for owner, name, before in self._wrapped:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._handles, self._wrapped = [], []

    def _forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        trace = self.trace
        if not torch.is_grad_enabled():  # an evaluation in between is no part of the step
            trace.phase = "other"
            return
        trace.phase = "forward"
        if trace.tokens is not None:
            tokens = tokens_of(module, args, kwargs)
            trace.tokens = None if tokens is None else trace.tokens + tokens
        self.note_memory()
        reset_peak()
        self._activations.bytes_by_unit.clear()
        if self._counts:
            self._activations.begin()
        self._forward_began_s = _now_s()

    def _forward_ends(self, *_: object) -> None:
        if self.trace.phase != "forward":
            return
        self.trace.phases["forward"] += _now_s() - self._forward_began_s
        if self._counts:
            self._activations.end()
        for unit, held in self._activations.bytes_by_unit.items():
            self.trace.activations[unit] = max(self.trace.activations[unit], held)
        self.note_memory(peak=True)

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        began: list[float] = []
        modules = sum(bool(m._parameters) for m in module.modules())

        def before(*_: object) -> None:
            if self.trace.phase == "forward":
                self.trace.unit = name
                if self._counts:
                    self._activations.enter(name)
                began.append(_now_s())

        def after(*_: object) -> None:
            if began and self.trace.phase == "forward":
                self.trace.issued_s += time.perf_counter() - began[-1]
                self.trace.modules += modules
                self.trace.units[name] += _now_s() - began.pop()
                if self._counts:
                    self._activations.leave(name)
                self.note_memory()
                self.trace.unit = ""
            began.clear()

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrapped)

    def _timed_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_engine_backward = True
        try:
            return self.timed("backward", original, *args, **kwargs)
        finally:
            self._in_engine_backward = False

    def _torch_backward_begins(self, original: Callable[..., Any], *args: Any) -> Any:
        if not self._in_engine_backward:
            self.trace.phase = "backward"
            self.note_memory()
            reset_peak()
            self._backward_began_s = _now_s()
        return original(*args)

    def _torch_backward_ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._in_engine_backward:
            self.trace.phases["backward"] += _now_s() - self._backward_began_s
            self.note_memory(peak=True)
        return result

    def _timed_gradient_path(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began_s = _now_s()
        result = original(*args, **kwargs)
        self.trace.gradient_path_s += _now_s() - began_s
        self.note_memory()
        return result

    def _sample(self) -> None:
        with contextlib.suppress(InterpreterEndsError):
            while not self._done.wait(SAMPLE_EVERY_S):
                with native_work():
                    self.note_memory()

    def note_memory(self, *, peak: bool = False) -> None:
        """Record the GPU and host memory that this process uses now, in the record of the current training step.

        With ``peak``, record the highest GPU memory since the current phase (such as forward) began.
        """
        trace = self.trace
        if not trace.began_s:
            return
        point = MemoryPoint(
            t_s=max(0.0, time.perf_counter() - trace.began_s),
            phase=trace.phase,
            device_bytes=max(device_bytes(), peak_device_bytes() if peak else 0),
            host_bytes=host_bytes(),
            layer=trace.unit,
        )
        trace.memory.append(point)


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
