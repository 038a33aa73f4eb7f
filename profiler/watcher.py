"""Hooks in a live DeepSpeed engine that record the times, the tokens and the memory of profiled training steps, for
each part of the model that becomes a layer of a workload.
"""

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from ebbtide.profiler.activations import activations_of
from ebbtide.runtime.hardware.background import InterpreterEndsError, native_work
from ebbtide.simulator.workload import MemoryPoint


def units(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the submodules of a model that are timed one by one in forward, as a list of pairs (name, submodule).

    They are the members of module lists (such as transformer layers), and the submodules outside such lists. A name is
    the submodule's path in the model, such as ``model.layers.0``.
    """
    result: list[tuple[str, torch.nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child):
            result += [(f"{name}.{n}", block) for n, block in child.named_children()]
        elif any(isinstance(m, torch.nn.ModuleList) for m in child.modules()):
            result += [(f"{name}.{n}", unit) for n, unit in units(child)]
        else:
            result.append((name, child))
    return result


def unit_of(parameter: str, unit_names: Sequence[str]) -> str:
    """Return the name of the submodule that contains a parameter, or "model" if none of the given ones does."""
    return next((unit for unit in unit_names if parameter.startswith(unit + ".")), "model")


_IDS = (torch.int64, torch.int32)


def tokens_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a model's inputs, or None if it cannot be derived from their shapes."""
    shape = batch_of(model, args, kwargs)
    return None if shape is None else shape.numel()


def batch_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape (batch, sequence) of the tokens in a model's inputs, or None if it cannot be derived.

    The tokens are in the argument ``input_ids``, or else in the first tensor. That tensor must be an integer
    matrix (batch, sequence), the model must have an embedding, and all integer matrices (such as targets and
    masks) must have the same shape.
    """
    if not any(isinstance(module, torch.nn.Embedding) for module in model.modules()):
        return None
    named = dict(_named(args, kwargs))
    ids = named.get("input_ids")
    if ids is not None:
        return ids.shape if _are_ids(ids) else None
    tensors = list(named.values())
    if not tensors or not _are_ids(tensors[0]):
        return None
    shapes = {t.shape for t in tensors if _are_ids(t)}
    return tensors[0].shape if len(shapes) == 1 else None


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, value in enumerate(args):
        if isinstance(value, Mapping):
            yield from _named((), value)
        elif isinstance(value, torch.Tensor):
            yield str(number), value
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _are_ids(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _IDS and tensor.dim() == 2


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Return the bytes of this process's tensors in GPU memory, or its resident host memory without CUDA."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return host_bytes()


def host_bytes() -> int:
    """Return the bytes of host memory that are resident for this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES


def reset_peak() -> None:
    """Reset the peak of tensor bytes in GPU memory, so that `peak_device_bytes` measures from now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_device_bytes() -> int:
    """Return the peak of this process's tensor bytes in GPU memory since `reset_peak`, or 0 without CUDA."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


SAMPLE_EVERY_S = 0.005
# Methods that DeepSpeed's step runs in Python before its updates. Their time grows with the number of parameters. By
# whether the optimizer is ZeRO-3's.
BEFORE_UPDATES = {
    True: ("_partition_all_parameters", "_get_norm_groups"),
    False: ("check_overflow", "scaled_global_norm"),
}
GRADIENT_PATH = {True: "partition_grads", False: "copy_grads_in_partition"}
Phase = Literal["forward", "backward", "step", "other"]


def partitions_parameters(optimizer: Any) -> bool:
    """Return whether an optimizer is ZeRO-3's."""
    return hasattr(optimizer, "fp16_partitioned_groups_flat_numel")


def hooks_lengthen_steps() -> bool:
    """Return True with CUDA: a `Watcher` waits for the GPU, so the training thread cannot run ahead."""
    return torch.cuda.is_available()


@dataclass
class ProfiledStep:
    """The record of one profiled training step.

    Durations are in seconds and include the GPU's work. The exceptions are ``issued_s``, and ``gradient_path_s`` of a
    plain record.

    Attributes:
        plain: True if only the phases and the gradient path were timed, without a wait for the GPU. False if hooks in
            the model also recorded memory and the times of the model's parts. On CUDA these hooks wait for the GPU,
            which lengthens the step.
        bare: True if DeepSpeed's hooks on modules were off, as under a plan on one rank.
        units: Forward seconds by part of the model, summed over all micro-batches.
        issued_s: CPU seconds to issue the forward passes to the GPU, without waiting for it.
        modules: Number of forward calls of modules with parameters during ``issued_s``.
        activations: Activation bytes by part of the model, in the micro-batch with the most.
        tokens: Tokens of this rank in all micro-batches. None if the number is unknown in any of them.
        gradient_path_s: Time in which DeepSpeed moves gradients to host memory during backward. In a plain record, the
            time by which this lengthens ``computed_s``.
        step_issue_s: CPU time that ``step()`` spends before the updates, in DeepSpeed's Python code. 0 if the record is
            not plain.
        computed_s: Time from the start of backward until the GPU has computed all gradients. 0 if it is unknown.
    """

    plain: bool = False
    bare: bool = False
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
    computed_s: float = 0.0
    step_issue_s: float = 0.0
    memory: list[MemoryPoint] = field(default_factory=list)

    @property
    def device_peak_bytes(self) -> int:
        return max((point.device_bytes for point in self.memory), default=0)


class PhaseHooks:
    """Hooks in a DeepSpeed engine at the beginning and the end of forward and backward, until `remove`.

    Subclasses record what they measure there in `trace`. The engine's ``step`` is not wrapped: callers run it through
    `timed`.

    Attributes:
        trace: Record of the current training step.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trace = ProfiledStep()
        self._handles: list[Any] = []
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._in_engine_backward = False
        self._wrap(engine, "backward", self._engine_backward)
        # ``loss.backward()`` does not call the engine, but it does call these two methods.
        self._wrap(engine.optimizer, "backward_prologue", self._torch_backward_begins)
        self._wrap(engine.optimizer, "backward_epilogue", self._torch_backward_ends)
        self._wrap(engine.optimizer, GRADIENT_PATH[partitions_parameters(engine.optimizer)], self._gradient_path)
        root = engine.module
        self._handles += [
            root.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            # Also after an exception, so that none of our hooks stays on autograd's stack.
            root.register_forward_hook(self._forward_ends, always_call=True),
        ]

    def begin(self) -> None:
        """Start the record of a new training step."""
        raise NotImplementedError

    def end(self) -> ProfiledStep:
        """End the record of the current training step, and return the record."""
        raise NotImplementedError

    def timed(self, phase: Phase, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record the call under a phase of the training step."""
        self._begins(phase)
        result = work(*args, **kwargs)
        self._ends(phase)
        return result

    def remove(self) -> None:
        """Remove all hooks and wrappers from the profiled DeepSpeed engine."""
        for handle in self._handles:
            handle.remove()
        for owner, name, before in self._wrapped:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._handles, self._wrapped = [], []

    def _begins(self, phase: Phase) -> None:
        raise NotImplementedError

    def _ends(self, phase: Phase) -> None:
        raise NotImplementedError

    def _gradient_path(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        if not torch.is_grad_enabled():  # an evaluation during training is not a part of the step
            self.trace.phase = "other"
            return
        self._begins("forward")

    def _forward_ends(self, *_: object) -> None:
        if self.trace.phase == "forward":
            self._ends("forward")

    def _engine_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_engine_backward = True
        try:
            return self.timed("backward", original, *args, **kwargs)
        finally:
            self._in_engine_backward = False

    def _torch_backward_begins(self, original: Callable[..., Any], *args: Any) -> Any:
        if not self._in_engine_backward:
            self._begins("backward")
        return original(*args)

    def _torch_backward_ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._in_engine_backward:
            self._ends("backward")
        return result

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrapped)


class PlainTimer(PhaseHooks):
    """A timer of the phases of training steps that does not lengthen the steps.

    On CUDA it records events in the GPU's streams, and reads them after the step. It records neither memory nor the
    times of the model's parts.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._begun: dict[Phase, _Moment] = {}
        self._phases: list[tuple[Phase, _Moment, _Moment]] = []
        self._computed: list[tuple[_Moment, _Moment]] = []
        self._paths: list[tuple[_Moment, _Moment]] = []
        # Begin and end of gradient work after all gradients are computed.
        self._late_paths: list[tuple[_Moment, _Moment]] = []
        self._in_epilogue = False
        self._wrap(engine.optimizer, "independent_gradient_partition_epilogue", self._gradients_computed)
        for name in BEFORE_UPDATES[partitions_parameters(engine.optimizer)]:
            self._wrap(engine.optimizer, name, self._issued)

    def begin(self) -> None:
        self.trace = ProfiledStep(plain=True, began_s=time.perf_counter())
        self._begun, self._phases, self._computed, self._paths, self._late_paths = {}, [], [], [], []

    def end(self) -> ProfiledStep:
        trace, trace.ended_s = self.trace, _now_s()
        for phase, begin, end in self._phases:
            trace.phases[phase] += begin.seconds_to(end)
        backwards = [(begin, end) for phase, begin, end in self._phases if phase == "backward"]
        paths = [*self._paths, *self._late_paths]
        if len(self._computed) == len(backwards):  # one of each micro-batch
            backwards, paths = self._computed, self._paths
            trace.computed_s = sum(begin.seconds_to(end) for begin, end in self._computed)
        path_s = sum(min(end.host_s - begin.host_s, begin.seconds_to(end)) for begin, end in paths)
        # If the CPU is ahead of the GPU by this time at the end, so much of its own time was hidden.
        ahead_s = sum(begin.seconds_to(end) - (end.host_s - begin.host_s) for begin, end in backwards)
        trace.gradient_path_s = max(0.0, path_s - max(0.0, ahead_s))
        return trace

    def _begins(self, phase: Phase) -> None:
        self.trace.phase = phase
        self._begun[phase] = _Moment()

    def _ends(self, phase: Phase) -> None:
        self.trace.phase = "other"
        begun = self._begun.pop(phase, None)
        if begun is not None:
            self._phases.append((phase, begun, _Moment()))

    def _gradients_computed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the time until all gradients are computed, before DeepSpeed waits for their copies."""
        begun = self._begun.get("backward")
        if begun is not None:
            self._computed.append((begun, _Moment()))
        self._in_epilogue = True
        try:
            return original(*args, **kwargs)
        finally:
            self._in_epilogue = False

    def _gradient_path(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = _Moment()
        result = original(*args, **kwargs)
        (self._late_paths if self._in_epilogue else self._paths).append((begin, _Moment()))
        return result

    def _issued(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        result = original(*args, **kwargs)
        if self.trace.phase == "step":  # saving a checkpoint releases the parameters too
            self.trace.step_issue_s += time.perf_counter() - began_s
        return result


class _Moment:
    """A point in the CPU's time and, with CUDA, in the current stream."""

    def __init__(self) -> None:
        self.host_s = time.perf_counter()
        self._event: Any = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_to(self, later: "_Moment") -> float:
        """Return the seconds to a later point in the same stream. The GPU must have reached both."""
        if self._event is None:
            return later.host_s - self.host_s
        return float(self._event.elapsed_time(later._event)) / 1e3


class Watcher(PhaseHooks):
    """A recorder of times and memory in the steps of a DeepSpeed engine.

    The recorder also puts hooks on the parts of the model, until `remove`. Between the hooks, a thread samples memory.
    This thread only reads counters and appends to the measurements of the current step. Everything else runs on the
    training thread.

    Args:
        engine: DeepSpeed engine.
        first: True for the engine's first recorder. It matters only without CUDA, where counting activations slows down
            training. Only the first recorder then counts activations and samples memory, and only in its first step.
    """

    def __init__(self, engine: Any, *, first: bool = True) -> None:
        self._activations = activations_of(engine.module)
        self._counts = first or not self._activations.costly
        self._began_s: dict[Phase, float] = {}
        super().__init__(engine)
        for name, module in units(engine.module):
            self._hook(name, module)
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if self._counts:
            self._sampler.start()

    def begin(self) -> None:
        self.trace = ProfiledStep(began_s=_now_s())
        self.note_memory()

    def end(self) -> ProfiledStep:
        self.note_memory()
        self.trace.ended_s = _now_s()
        if self._activations.costly:
            self._counts = False
            self._done.set()
        return self.trace

    def remove(self) -> None:
        """Remove all hooks and wrappers from the profiled DeepSpeed engine, and end the thread that samples memory."""
        self._done.set()
        if self._sampler.ident is not None:  # it was started
            self._sampler.join()
        self._activations.end()
        super().remove()

    def _begins(self, phase: Phase) -> None:
        self.trace.phase = phase
        self.note_memory()
        reset_peak()
        self._began_s[phase] = _now_s()

    def _ends(self, phase: Phase) -> None:
        self.trace.phases[phase] += _now_s() - self._began_s[phase]
        self.note_memory(peak=True)

    def _forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        trace = self.trace
        if torch.is_grad_enabled():
            if trace.tokens is not None:
                tokens = tokens_of(module, args, kwargs)
                trace.tokens = None if tokens is None else trace.tokens + tokens
            self._activations.bytes_by_unit.clear()
            if self._counts:
                self._activations.begin()
        super()._forward_begins(module, args, kwargs)

    def _forward_ends(self, *_: object) -> None:
        super()._forward_ends()
        if self.trace.phase != "forward":
            return
        if self._counts:
            self._activations.end()
        for unit, held in self._activations.bytes_by_unit.items():
            self.trace.activations[unit] = max(self.trace.activations[unit], held)

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

    def _gradient_path(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
