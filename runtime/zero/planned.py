"""The base of DeepSpeed's ZeRO optimizers under a plan: the code that all ZeRO stages share."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, cast

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.passes import Place
from ebbtide.runtime.execution.gradients import GradientOps
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.checks.other_steps import recomputes
from ebbtide.runtime.zero.windows import OneBuffer, Windows, ZeroSlice
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Queue
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import WireDtype, ZeroStage

if TYPE_CHECKING:
    from ebbtide.runtime.execution.session import Session
    from ebbtide.runtime.zero.flat_partitions import Cut, FlatState

_WIRE: dict[torch.dtype, WireDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class PlannedZero:
    """The base class of DeepSpeed's ZeRO optimizers under a plan, for every ZeRO stage.

    It implements part of the interface `ebbtide.runtime.execution.engine.TrainingEngine`. `EbbtideStage3` and
    `EbbtideStage2` inherit from it before DeepSpeed's own class. It is never constructed: `ebbtide.attach`
    changes the class of DeepSpeed's existing optimizer, after setting ``_rule`` and other fields.
    """

    _ebbtide: Session
    _rule: UpdateRule
    _flat: FlatState | None  # None: DeepSpeed keeps a tensor for each of the plan's subgroups
    _hooks: list[Any]  # handles of ebbtide's hooks, for their removal
    _layers: dict[tuple[int, int], str] | None = None  # see `GradientOps.layers`. None before the first backward
    optimizer: Any  # one of those that `ebbtide.runtime.kernels.rules` has a rule for
    dtype: torch.dtype
    loss_scale: Any  # a float, or a tensor in some modes of DeepSpeed
    clip_grad: float
    gradient_accumulation_dtype: torch.dtype
    gradient_accumulation_steps: int
    master_weights_and_grads_dtype: torch.dtype
    norm_for_param_grads: dict[int, torch.Tensor]
    reduce_bucket_size: int
    _module_of: weakref.ref[torch.nn.Module]

    # -- backward and step -------------------------------------------------------------------

    def backward_prologue(self) -> None:
        self._ebbtide.recorder.backward_begins()
        super().backward_prologue()  # type: ignore[misc]

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        super().backward_epilogue(*args, **kwargs)  # type: ignore[misc]
        self._ebbtide.recorder.backward_ends()

    def reduce_ready_partitions_and_remove_grads(self, param: Any, *group: int) -> None:
        """Record that backward has computed a parameter's gradient, then reduce the gradient as DeepSpeed does."""
        if self.zero_stage() > 1:  # ZeRO-1 calls this method after the whole backward
            device = self._ebbtide.device
            device.backward_threads.runs()
            if device.watched is not None:
                device.watched.made(self._places(param))
        super().reduce_ready_partitions_and_remove_grads(param, *group)  # type: ignore[misc]

    def _places(self, param: Any) -> list[Place]:
        raise NotImplementedError

    def any_rank(self, flag: bool) -> bool:
        return bool(private.largest_of_ranks([flag]).item())

    def _norms_to_host(self) -> None:
        norms = self.norm_for_param_grads
        if norms and next(iter(norms.values())).is_cuda:
            began_s = time.perf_counter()
            values = torch.stack(list(norms.values())).cpu()
            self._ebbtide.recorder.issue_waited(time.perf_counter() - began_s)
            self.norm_for_param_grads = dict(zip(norms, values, strict=True))

    def _gradient_scale(self, scaled_norm: torch.Tensor) -> float:
        combined = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((scaled_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined = torch.clamp(clip, min=1.0) * self.loss_scale
        return float(torch.as_tensor(1.0 / combined).to(torch.float32))

    def zero_stage(self) -> ZeroStage:
        raise NotImplementedError

    # -- what the session asks ---------------------------------------------------------------

    @property
    def _cuts(self) -> list[Cut]:
        raise NotImplementedError

    def sizes(self) -> tuple[int, ...]:
        return tuple(elements for _, _, elements in self._cuts)

    def gradient_buffers(
        self, device: Device, states: list[SubgroupState], ops: GradientOps, complete: Callable[[int], None]
    ) -> Windows:
        spend = self._spend if self._rule.spends else None
        one = self.zero_stage() < 3 and self.master_weights_and_grads_dtype != torch.float32
        buffers = OneBuffer if one else Windows
        return buffers(device, states, self.slices(), ops, complete, spend=spend)

    def slices(self) -> dict[int, ZeroSlice]:
        raise NotImplementedError

    @property
    def _windows(self) -> Windows:
        return cast("Windows", self._ebbtide.gradient_buffers)

    def units(self) -> dict[tuple[int, int], str]:
        from ebbtide.profiler.watcher import unit_of, units

        module = self._module_of()
        assert module is not None  # the engine keeps the module alive
        parts = [name for name, _ in units(module)]
        names = {param: name for name, param in module.named_parameters()}
        return {
            (place.subgroup, place.offset): unit_of(names.get(param, ""), parts)
            for param in self._trained()
            for place in self._places(param)
        }

    def _know_layers(self) -> None:
        ops = self._windows.ops
        if not ops.layers:  # a new plan
            ops.layers = self._layers = self.units() if self._layers is None else self._layers

    def first_use(self) -> list[int]:
        module = self._module_of()
        assert module is not None  # the engine keeps the module alive
        place = {param: i for i, param in enumerate(module.parameters())}
        first = [len(place)] * len(self._cuts)
        for param in self._trained():
            for subgroup in self._subgroups_of(param):
                first[subgroup] = min(first[subgroup], place.get(param, len(place)))
        return first

    def _subgroups_of(self, param: Any) -> list[int]:
        raise NotImplementedError

    def _trained(self) -> list[Any]:
        raise NotImplementedError

    def _spend(self, subgroup: int, start: int, gradient: torch.Tensor) -> None:
        executor = self._ebbtide.executor
        elements = executor.states[subgroup].elements
        count = self._rule.tail(elements, start, start + len(gradient))
        if count:
            executor.wait_state(subgroup)
            begin = start + len(gradient) - count - self._rule.tail_begin(elements)
            tensors, step = executor.bodies.spent[subgroup]
            last = gradient[len(gradient) - count :]
            state = [tensor[begin : begin + count] for tensor in tensors]
            last.copy_(self._rule.spent(state, last.cpu(), step))

    def wire_dtype(self) -> WireDtype:
        return _WIRE.get(self.dtype, "fp32")

    def update_rule(self) -> UpdateRule:
        return self._rule

    def gradient_bytes(self) -> int:
        return self.gradient_accumulation_dtype.itemsize

    def bucket_params(self) -> int:
        ranks = private.partition_count(self) if self.zero_stage() == 3 else 1
        return max(1, int(self.reduce_bucket_size) // ranks)

    def micro_batches(self) -> int:
        return int(self.gradient_accumulation_steps)

    def recomputes(self) -> bool | None:
        module = self._module_of()
        return None if module is None else recomputes(module)

    def clips(self) -> bool:
        return self.clip_grad > 0

    def _kept(self, master: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        values = self.optimizer.state.get(master, {}).values() if self._rule.own_step else ()
        return tuple(v for v in values if torch.is_tensor(v) and v.shape == master.shape)

    def _masters(self) -> list[torch.nn.Parameter]:
        raise NotImplementedError

    def _group_of(self) -> list[int]:
        raise NotImplementedError

    def hyperparameters(self) -> list[UpdateStep]:
        masters = zip(self._masters(), self._group_of(), strict=True)
        return self._of_subgroups([self._rule.next_step(self.optimizer, *master) for master in masters])

    def _of_subgroups(self, steps: list[UpdateStep]) -> list[UpdateStep]:
        return [steps[master] for master, _, _ in self._cuts]

    def resume_rule(self) -> None:
        """Set the optimizer's update rule to its state after all previous steps, as if this process had run
        these steps.
        """
        if self._rule.own_step:
            return
        steps = {int(self.optimizer.state[master]["step"]) for master in self._masters()}
        groups = self.optimizer.param_groups
        if len(steps) == 1:
            self._rule.resume(steps.pop(), [groups[number] for number in self._group_of()])

    def expected_step(self) -> tuple[list[UpdateStep], float]:
        rule, groups = copy.deepcopy(self._rule), self.optimizer.param_groups
        steps = [
            rule.step(groups[number], self.optimizer.state[master]["step"] + 1)
            for master, number in zip(self._masters(), self._group_of(), strict=True)
        ]
        return self._of_subgroups(steps), self.unclipped_scale()

    def unclipped_scale(self) -> float:
        return self._gradient_scale(torch.zeros((), dtype=torch.float64))

    def early_updates_allowed(self) -> bool:
        """Return whether updates may start before the gradient norm is known.

        False if the gradients so far show that the step clips or overflows. Norms on the GPU are not read, because
        backward would have to end first.
        """
        norms = self.norm_for_param_grads.values()
        if self.clip_grad <= 0.0 or any(norm.is_cuda for norm in norms):
            return True
        squares = sum(float(norm) ** 2 for norm in norms)
        return squares <= (self.clip_grad * float(self.loss_scale)) ** 2

    # -- readers -----------------------------------------------------------------------------

    def publish(self) -> None:
        """Wait for running updates, so that DeepSpeed's own tensors show the latest step's optimizer state."""
        own = self.__dict__.get("_ebbtide")  # None while the optimizer is being built
        if own is not None and not own.closed:
            own.executor.state_shown()  # a reader of DeepSpeed's public tensors may also write to them
            own.wait_for_readers()
            if self._flat is not None:
                self._flat.publish(own)

    def saved_state(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        flat, (master, _, _) = self._flat, self._cuts[subgroup]
        own = self._ebbtide.executor.states[subgroup].state if flat is None else flat.state(subgroup)
        return own + self._kept(self._masters()[master])

    def settle(self) -> None:
        if self._flat is not None:
            self._flat.published = not self._flat.shadows

    def state_dict(self) -> dict[str, Any]:
        self.publish()
        return super().state_dict()  # type: ignore[misc, no-any-return]

    def timeline(self) -> Timeline:
        """Return the measured timeline of the latest training steps, in the format of the simulator's timeline."""
        return self._ebbtide.timeline()

    def offload_states(self, include: Container[Any] | None = None, **_: Any) -> None:
        """Wait for updates, and move all optimizer state from GPU memory to host memory until `reload_states`.

        With ZeRO-3, parameters move too if ``include`` contains ``lp_params``. Training may continue meanwhile, with
        bit-identical results.

        Args:
            include: Members of DeepSpeed's `OffloadStateTypeEnum`. None means all of them.
        """
        plan = self._ebbtide.plan
        leave = self.zero_stage() == 3 and (include is None or "lp_params" in include)
        held = [_in_host_memory(way, parameters_too=leave) for way in plan.ways]
        self._ebbtide.switch(plan.with_ways(held, staging_slots=0, prefetch=0))
        self._ebbtide.set_aside = self._ebbtide.set_aside or plan
        private.empty_cache()  # so that other processes, and other allocators of this process, can use the memory

    def reload_states(self, **_: Any) -> None:
        """Undo `offload_states`: move optimizer state and parameters back to the memory that the plan names."""
        if self._ebbtide.set_aside is not None:
            self._ebbtide.switch(self._ebbtide.set_aside)
            self._ebbtide.set_aside = None

    def destroy(self) -> None:
        try:
            self._ebbtide.close()
        finally:
            self._let_go()
            super().destroy()  # type: ignore[misc]

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._flat is not None:
            self._flat.let_go(self._ebbtide)


def gated(name: str, read: Callable[[Any], Any] | None = None) -> property:
    """Build a property for an attribute of DeepSpeed's optimizer, such that reading the attribute first
    waits for running updates.

    Ebbtide's own code reads the attribute through ``__dict__``, which does not wait.

    Args:
        read: Function that returns the value. None reads the attribute itself.
    """

    def get(self: PlannedZero) -> Any:
        self.publish()
        if read is not None:
            return read(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def set_(self: PlannedZero, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, None if read is not None else set_)


def published(name: str, then: str = "") -> Callable[..., Any]:
    """Build a method for DeepSpeed's optimizer that waits for running updates, then calls DeepSpeed's method ``name``.

    Args:
        then: Name of a method to call afterwards. If ``name`` loads state into DeepSpeed's tensors, the method ``then``
            makes the plan use the loaded state.
    """

    def method(self: PlannedZero, *args: Any, **kwargs: Any) -> Any:
        self.publish()
        result = getattr(super(PlannedZero, self), name)(*args, **kwargs)
        if then:
            getattr(self, then)()
        return result

    return method


def float64_norm(part: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of a gradient in float64. On CUDA torch makes a float64 copy, as in stock DeepSpeed."""
    if part.device.type == "cpu":
        return torch.tensor(host.norm(part), dtype=torch.float64)
    return torch.linalg.vector_norm(part, dtype=torch.float64)


def float64_norms(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norms of several gradients in float64, in one tensor."""
    if parts[0].device.type == "cpu":
        return torch.tensor([host.norm(part) for part in parts], dtype=torch.float64)
    return torch.stack([float64_norm(part) for part in parts])


def take_loaded_moments(inner: Any, rule: UpdateRule, master: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
    """Copy the optimizer's moments, after a checkpoint load, into the tensors that training uses.

    The load has put the moments into new tensors. A checkpoint that stock DeepSpeed wrote before the first update has
    no moments. The moments are then set to zero.
    """
    if rule.own_step:
        return
    state = inner.state[master]
    state.setdefault("step", 0)
    for key in rule.unused:
        state.setdefault(key, torch.zeros_like(master))
    for key, buffer in buffers.items():
        loaded = state.get(key)
        if loaded is None:
            buffer.zero_()
        elif loaded is not buffer:
            buffer.copy_(loaded)
        state[key] = buffer


def _in_host_memory(way: Way, *, parameters_too: bool) -> Way:
    placement = "host" if RECIPES[way.placement].queue is Queue.DEVICE else way.placement
    moved = Way(placement, "host" if parameters_too else way.parameters, way.early and way.placement == placement)
    return moved.fitted()
