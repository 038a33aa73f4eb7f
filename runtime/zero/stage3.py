"""DeepSpeed's ZeRO-3 optimizer under a plan: the same bits, other places and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from runtime.execution.executor import Executor, SubgroupJob
from runtime.execution.gradients import GradientHomes, ParameterSlice
from runtime.execution.recorder import Recorder
from runtime.execution.subgroup_state import SubgroupState
from runtime.kernels import host
from runtime.kernels.rule import UpdateRule
from runtime.zero import private
from simulator.plan import Plan
from simulator.timeline import Timeline


@dataclass
class Attachment:
    """What ebbtide adds to one optimizer. Owned by the training thread.

    Attributes:
        rebuild: (optimizer, plan, states of an executor that has ended) -> (the plan that memory
            allowed, its executor).
    """

    plan: Plan
    executor: Executor
    homes: GradientHomes
    rule: UpdateRule
    recorder: Recorder
    rebuild: Callable[[Any, Plan, list[SubgroupState]], tuple[Plan, Executor]]
    subgroup_of: dict[int, int]  # ds_id -> subgroup
    undo_gates: Callable[[], None] = lambda: None
    prefetch_elements: int = 0
    held_back: bool = False  # DeepSpeed's gather-ahead is off while updates run
    on_step: list[Callable[[], None]] = field(default_factory=list)
    closed: bool = False
    watch: Any = None  # runtime.replan.watch.Watch, if the engine is watched

    def saved_state(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        """Where a checkpoint reads this subgroup's master and moments."""
        return self.executor.states[subgroup].state


class EbbtideStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Overrides the gradient path, the step and everything that reads or writes state.

    Never constructed: `runtime.attach` changes the class of DeepSpeed's live optimizer and sets
    ``_ebbtide``.
    """

    _ebbtide: Attachment

    # -- backward ----------------------------------------------------------------------------

    @torch.no_grad()
    def partition_grads(
        self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Takes each gradient home in one crossing; its norm is taken on the device."""
        own = self._ebbtide
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            own.executor.prefetch()
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            piece = own.homes.slices[self.get_param_id(param)]
            if piece.real:
                # Record active param so unmanaged offload finalize skips params unused this window.
                self._offload_boundary_param_ids.add(param.ds_id)
                total = own.homes.accept(
                    piece, partition.view(-1), first=self.micro_step_id == 0, boundary=boundary
                )
                if boundary:
                    self.norm_for_param_grads[self.get_param_id(param)] = _norm(total)
            if param.grad is not None:
                # One larger than a bucket is where autograd made it, on another stream than this.
                own.executor.device.let_go(param.grad)
            param.grad = None
        if private.in_bucket(self, grad_partitions):
            own.homes.before_reuse()
        return []

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, *_: Any
    ) -> None:
        """Unmanaged accumulation ends its window here, at step()."""
        total = self._ebbtide.homes.finish(self._piece(param))
        self.norm_for_param_grads[self.get_param_id(param)] = _norm(total.to(grad_buffer.device))

    def backward_prologue(self) -> None:
        self._ebbtide.recorder.backward_begins()
        super().backward_prologue()

    def backward_epilogue(self) -> None:
        super().backward_epilogue()
        self._ebbtide.recorder.backward_ends()

    # -- step --------------------------------------------------------------------------------

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """fp16: some gradient is infinite or NaN. Its float64 norm tells, without another pass."""
        del partition_gradients
        norms: dict[int, torch.Tensor] = self.norm_for_param_grads
        bad = any(not bool(torch.isfinite(norm)) for norm in norms.values())
        flag = torch.tensor([bad], dtype=torch.uint8, device=self._training_device())
        import deepspeed.comm as dist

        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _training_device(self) -> torch.device:
        return self.fp16_partitioned_groups_flat[0].device  # type: ignore[no-any-return]

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Brings all norms to the host in one copy; DeepSpeed then adds them up as ever."""
        norms = self.norm_for_param_grads
        if norms and next(iter(norms.values())).is_cuda:
            values = torch.stack(list(norms.values())).cpu()
            self.norm_for_param_grads = dict(zip(norms, values, strict=True))
        return super()._get_norm_groups()  # type: ignore[no-any-return]

    def step(self, closure: Any = None) -> None:
        """Launches the updates and returns; parameters are new when somebody reads them.

        Raises:
            BackgroundError: an earlier update or checkpoint failed in the background.
        """
        del closure
        own = self._ebbtide
        own.executor.raise_if_failed()
        own.recorder.step_begins()
        self._pre_step()
        self._partition_all_parameters()
        scaled_norm = self._checked_norm()
        own.homes.close_window()
        if self._loss_scale_update_and_overflow_cleanup():
            own.homes.last_scale = None
            self._gather_persistent()
            own.recorder.step_ends()
            return
        self._global_grad_norm = scaled_norm / self.loss_scale
        scale = self._gradient_scale(scaled_norm)
        own.homes.last_scale = scale
        own.homes.scale_kept(scale)
        own.executor.launch(self._jobs(scale), own.homes.arrived, own.recorder.iteration)
        if own.plan.overlap_forward:
            self._hold_back_gathers()
        else:
            own.executor.wait_all()
        self._post_step(set())
        own.recorder.step_ends()
        for call in own.on_step:
            call()

    def _checked_norm(self) -> torch.Tensor:
        """The global norm times the loss scale; sets ``self.overflow`` as DeepSpeed's step does."""
        self._overflow_check_and_loss_scale_update(update_scale=False)
        norm = torch.tensor(float("inf"))
        if not self.overflow:
            norm = combine_grad_norm_groups(self._get_norm_groups())
            if is_invalid_grad_norm(norm):
                self.overflow = True
        return norm

    def _gradient_scale(self, scaled_norm: torch.Tensor) -> float:
        """Unscale and clip as one fp32 factor: DeepSpeed's `unscale_and_clip_grads`."""
        combined = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((scaled_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined = torch.clamp(clip, min=1.0) * self.loss_scale
        return float(torch.as_tensor(1.0 / combined).to(torch.float32))

    def _jobs(self, scale: float) -> list[SubgroupJob]:
        own = self._ebbtide
        jobs = []
        for index in range(len(self.fp16_groups)):
            group = self.optimizer.param_groups[self.sub_group_to_group_id[index]]
            state = self.optimizer.state[self.fp32_partitioned_groups_flat[index]]
            state["step"] += 1
            step = own.rule.step(group, state["step"])
            jobs.append(SubgroupJob(step, own.homes.segments(index, scale)))
        return jobs

    def _hold_back_gathers(self) -> None:
        """DeepSpeed gathers ahead of the current layer; that would wait for updates too early.

        With several ranks it must go on: gathers are collective then, so that what is gathered
        when may not depend on how far a rank's own updates are. They are gated all the same.
        """
        own = self._ebbtide
        if self.partition_count > 1:
            return
        for coordinator in private.coordinators(self):
            if not own.held_back:
                own.prefetch_elements = private.prefetch_elements(coordinator)
            private.set_prefetch_elements(coordinator, 0)
        own.held_back = True

    def _release_gathers(self) -> None:
        own = self._ebbtide
        for coordinator in private.coordinators(self):
            private.set_prefetch_elements(coordinator, own.prefetch_elements)
        own.held_back = False

    def _post_step(self, timer_names: set[str]) -> None:
        """Persistent parameters are gathered by whoever reads them first, not all at once here:
        they are spread over all subgroups, so that gathering them would wait for every update.
        """
        self.reset_cpu_buffers()
        self.invalidate_secondary_tensor()
        self.timers.log(timer_names)
        if not self._ebbtide.plan.overlap_forward:
            self._gather_persistent()

    def _gather_persistent(self) -> None:
        if self.persistent_parameters:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)

    # -- readers and writers -----------------------------------------------------------------

    def await_parameters(self, params: Iterable[Any]) -> None:
        """Called before every gather: waits for just the subgroups of these parameters."""
        own = self._ebbtide
        if own.closed:
            return
        ids = (getattr(param, "ds_id", None) for param in params)
        subgroups = {own.subgroup_of[i] for i in ids if i in own.subgroup_of}
        own.executor.wait_parameters(sorted(subgroups))
        if own.held_back and not own.executor.busy:
            self._release_gathers()

    def wait(self) -> None:
        """Blocks until every update has ended; raises what failed in the background."""
        self._ebbtide.executor.wait_all()

    def timeline(self) -> Timeline:
        """What the latest steps did, op by op, in the simulator's own type."""
        self.wait()
        return self._ebbtide.recorder.timeline(self._ebbtide.executor.history)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        self._ebbtide.executor.wait_state(self.grad_position[self.get_param_id(param)][0])
        return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)

    def set_full_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: Any = None
    ) -> None:
        super().set_full_hp_param(value, param, optim_state_key)
        self._state_written(param)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: Any = None
    ) -> None:
        super().set_local_hp_param(value, param, optim_state_key)
        self._state_written(param)

    def _state_written(self, param: Any) -> None:
        if param.requires_grad:
            self._ebbtide.executor.state_written([self.grad_position[self.get_param_id(param)][0]])

    def _piece(self, param: Any) -> ParameterSlice:
        return self._ebbtide.homes.slices[self.get_param_id(param)]

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        del release_swap_buffers
        self._ebbtide.executor.wait_all()  # an update may be reading this gradient
        piece = self._piece(param)
        return self._ebbtide.homes.keep(piece), piece.subgroup

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Group index -> parameter index -> fp32 gradient partition."""
        return {
            index: {
                number: self._get_fp32_grad_state_partition(param, True)[0]
                for number, param in enumerate(group)
            }
            for index, group in enumerate(self.fp16_groups)
        }

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: list[Any]
    ) -> None:
        for param in param_list:
            if param.requires_grad:
                part, _ = self._get_fp32_grad_state_partition(param, True)
                full = self._fp32_state_allgather(param, part)
                self.set_fp32_grad_for_param(update_func(full, param), param)

    # -- checkpoints -------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        self.wait()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """Leaves persistent parameters to their first reader, as `_post_step` does.

        Were they here after a load and not after a step, a model that reads one outside of its
        module (``self.embedding.weight``) would be traced differently in its second forward.
        """
        if self._ebbtide.plan.overlap_forward:
            self.invalidate_secondary_tensor()
        else:
            super().checkpoint_event_epilogue()

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        return super().state_dict()  # type: ignore[no-any-return]

    def _rigid_load_state_dict(
        self, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        self.wait()
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        self._adopt_loaded()

    def _load_universal_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.wait()
        super()._load_universal_checkpoint(*args, **kwargs)
        self._adopt_loaded()

    def _restore_from_bit16_weights(self) -> None:
        self.wait()
        super()._restore_from_bit16_weights()
        self._adopt_loaded()

    def _restore_from_fp32_weights(self, all_state_dict: Any) -> None:
        self.wait()
        super()._restore_from_fp32_weights(all_state_dict)
        self._adopt_loaded()

    def _adopt_loaded(self) -> None:
        """Torch's loader replaces the moments by new tensors; bring their values home."""
        own = self._ebbtide
        for index, own_state in enumerate(own.executor.states):
            state = self.optimizer.state[self.fp32_partitioned_groups_flat[index]]
            for key, home in zip(own.rule.moments, own_state.moments, strict=True):
                if state[key] is not home:
                    home.copy_(state[key])
                    state[key] = home
        own.executor.state_written(range(len(own.executor.states)))
        self.resume_rule()

    def resume_rule(self) -> None:
        """Bias correction continues as if the steps so far had been run without a break."""
        steps = {int(self.optimizer.state[p]["step"]) for p in self.fp32_partitioned_groups_flat}
        groups = [
            self.optimizer.param_groups[self.sub_group_to_group_id[i]]
            for i in range(len(self.fp16_groups))
        ]
        if len(steps) == 1:
            self._ebbtide.rule.resume(steps.pop(), groups)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "offload_states() must not be called under a plan, whose placements already say where "
            "state lives: call engine.destroy() and attach again, or train without ebbtide"
        )

    reload_states = offload_states

    def destroy(self) -> None:
        own = self._ebbtide
        if not own.closed:
            try:
                own.executor.wait_all()
            finally:
                own.closed = True
                own.undo_gates()
                own.executor.close()
        super().destroy()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """DeepSpeed's `_constant_buffered_norm2` without its float64 copies, to the bit."""
    total = None
    for part in gradient.split(250_000_000):
        square = _float64_norm(part) ** 2.0
        total = square if total is None else total + square
    assert total is not None
    root: torch.Tensor = total**0.5
    return root


def _float64_norm(part: torch.Tensor) -> torch.Tensor:
    if part.device.type == "cpu":
        return torch.tensor(host.norm(part), dtype=torch.float64)
    return torch.linalg.vector_norm(part, dtype=torch.float64)
