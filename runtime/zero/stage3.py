"""DeepSpeed's ZeRO-3 optimizer under a plan, with bit-identical results."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.comm import ReduceOp
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.passes import Place
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.zero import stage3_buffers
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.flat_partitions import Cut, FlatState, cuts_of
from ebbtide.runtime.zero.gathers import Gathers
from ebbtide.runtime.zero.planned import PlannedZero, float64_norms, gated, published, take_loaded_moments
from ebbtide.runtime.zero.windows import ZeroSlice
from ebbtide.simulator.plan import ParameterLocation, Plan, PlanError
from ebbtide.simulator.schedules.gathers import Gathered
from ebbtide.simulator.workload import ZeroStage


class EbbtideStage3(PlannedZero, DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's ZeRO-3 optimizer under a plan. It overrides how DeepSpeed copies gradients, runs updates, and gives
    other code access to optimizer state.
    """

    _gathers: Gathers
    _pieces: stage3_buffers.Pieces
    _swapped: list[int]  # subgroups whose parameters DeepSpeed's swapper holds
    _unread: torch.Tensor  # unused output of the updates of these subgroups: the swapper reads the master
    _infinite: set[int]  # parameters with a sum of micro-batches that is infinite or NaN
    shares_state = False
    overlaps_forward = True
    # These attributes of DeepSpeed are public. Reading them waits for the updates.
    fp32_partitioned_groups_flat = gated("fp32_partitioned_groups_flat")
    fp16_partitioned_groups_flat = gated("fp16_partitioned_groups_flat", lambda self: self._pieces.joined())
    state = gated("state", lambda self: self.optimizer.state)

    # -- backward ----------------------------------------------------------------------------

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send each reduced gradient once to the memory where its update will run, and compute its norm on the GPU."""
        own, windows = self._ebbtide, self._windows
        boundary, first, dtype = private.at_boundary(self), self.micro_step_id == 0, self.gradient_accumulation_dtype
        if boundary:
            own.prefetch()
        self._know_layers()
        with windows.together():
            totals: dict[int, torch.Tensor] = {}
            for param, partition in zip(params_to_release, grad_partitions, strict=True):
                key = self.get_param_id(param)
                piece = windows.slices[key]
                if piece.real:
                    private.note_active(self, param)
                    # Older DeepSpeeds convert a gradient to fp32 only when they add it up.
                    arrived = partition.view(-1).to(dtype)
                    totals[key] = windows.accept(piece, arrived, first=first, boundary=boundary)
                if param.grad is not None:
                    # Autograd made a gradient larger than a bucket on another stream than the present one.
                    own.executor.device.let_go(param.grad)
                param.grad = None
            if boundary:  # before a complete subgroup's update begins, which may depend on the norms
                self.norm_for_param_grads.update(zip(totals, _norms(list(totals.values())), strict=True))
        if private.in_bucket(self, grad_partitions):
            windows.before_reuse()
        return []

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # noqa: N802 - DeepSpeed's private method
        self, params: list[Any], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        gradients = private.own_sums(self, params, dtype) if private.only_rank(self) else None
        if gradients is None:
            return super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, dtype)
        return gradients

    def _offload_grad_partition_at_boundary(self, param: Any, grad_buffer: torch.Tensor, *_: Any) -> None:
        # DeepSpeed calls this method at ``step()`` if the training script, and not DeepSpeed, decides which micro-batch
        # is the last one of a step.
        total = self._windows.finish(self._piece(param))
        (self.norm_for_param_grads[self.get_param_id(param)],) = _norms([total.to(grad_buffer.device)])

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        super().backward_epilogue(*args, **kwargs)
        self._gathers.views.backward_ends()

    # -- step --------------------------------------------------------------------------------

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any gradient on any rank is infinite or NaN, for training in fp16."""
        del partition_gradients
        flag = private.largest_of_ranks([not self._sums_finite()], self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=ReduceOp.MAX)
        return bool(flag.item())

    def _sums_finite(self) -> bool:
        self._norms_to_host()
        windows = self._windows
        finite = {key: bool(torch.isfinite(norm)) for key, norm in self.norm_for_param_grads.items()}
        for key, piece in windows.slices.items():
            if piece.begun and not piece.touched:
                finite[key] = bool(torch.isfinite(windows.sum_so_far(piece)).all())
        bad = {key for key, well in finite.items() if not well}
        self._infinite = (self._infinite - finite.keys()) | bad
        return not self._infinite

    def _get_norm_groups(self) -> list[torch.Tensor]:
        self._norms_to_host()
        if not private.only_rank(self):
            return super()._get_norm_groups()
        # The same sums and roots, without DeepSpeed's tensor, reductions and waits for each of them.
        norms = {key: float(norm) for key, norm in self.norm_for_param_grads.items()}
        return [private.group_norm(self, group, norms) for group in self.fp16_groups]

    def step(self, closure: Any = None) -> None:
        """Start the optimizer's updates and return. Code that later reads a parameter waits for that
        parameter's update.

        Raises:
            BackgroundError: An earlier update or checkpoint failed in the background.
        """
        del closure
        own = self._ebbtide
        own.begin_step()
        self._gathers.shows = True
        self._pre_step()
        self._partition_all_parameters()
        scaled_norm = private.checked_norm(self)
        self._windows.close_window()
        if scaled_norm is None:
            own.skip()
            self._gathers.show_at_rest()  # DeepSpeed leaves the parameters partitioned here
        else:
            self._global_grad_norm = scaled_norm / self.loss_scale
            self._pieces.part()
            if self._flat is not None:
                self._flat.before_update(own)
            own.update(self._gradient_scale(scaled_norm))
            own.recorder.issue_ends()
            if own.plan.overlap_forward:
                self._gathers.together.updates_launched()
                self._gathers.stand_in()
            else:
                own.executor.wait_all()
                for index in self._swapped:
                    self._partitioned_params_swap_out(index)
            self._post_step(set())
        own.recorder.step_ends()

    def _partition_all_parameters(self) -> None:
        self._gathers.together.stay_gathered(False)
        private.release_all(self, self._gathers.parameters)
        self._gathers.views.stepped()

    def empty_partition_cache(self) -> None:
        super().empty_partition_cache()
        self._gathers.together.stay_gathered(False)

    def _post_step(self, timer_names: set[str]) -> None:
        # If the plan does not overlap updates with forward, gather the small parameters, as stock DeepSpeed always does
        # here. If the plan overlaps updates with forward, the first code that reads the small parameters gathers them.
        # A gather at the end of the step would wait for every update, because small parameters belong to many
        # subgroups.
        self.reset_cpu_buffers()
        self.invalidate_secondary_tensor()
        self._gathers.together.stay_gathered(True)
        self.timers.log(timer_names)
        if not self._ebbtide.plan.overlap_forward:
            self._gathers.show_persistent()

    # -- readers and writers -----------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every update has ended, and gather the small ZeRO-3 parameters."""
        # Raise errors of background updates. After a step, small parameters may hold NaN until they are gathered,
        # because their updates run in the background. With several ranks, all ranks must call this method.
        self.publish()
        self._gathers.show_persistent()

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        subgroup, _, _ = self._pieces.places[self.get_param_id(param)]
        self._ebbtide.executor.wait_state(subgroup)
        if self._flat is not None and subgroup in self._flat.shadows:
            self._flat.publish(self._ebbtide)
        return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: Any = None) -> None:
        super().set_full_hp_param(value, param, optim_state_key)
        self._state_written(param)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: Any = None) -> None:
        super().set_local_hp_param(value, param, optim_state_key)
        self._state_written(param)

    def _state_written(self, param: Any) -> None:
        if param.requires_grad:
            subgroup, _, _ = self._pieces.places[self.get_param_id(param)]
            self._ebbtide.executor.state_written([subgroup])

    def _piece(self, param: Any) -> ZeroSlice:
        return self._windows.slices[self.get_param_id(param)]

    def _trained(self) -> list[Any]:
        return [param for group in self.fp16_groups for param in group]

    def _places(self, param: Any) -> list[Place]:
        piece = self._piece(param)
        return [Place(piece.subgroup, piece.offset, piece.elements)] if piece.real else []

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        del release_swap_buffers
        self._ebbtide.executor.wait_all()  # an update may be reading this gradient
        number, _, _ = self.grad_position[self.get_param_id(param)]
        return self._windows.keep(self._piece(param)), number

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return the fp32 gradients of this rank's partitions, as a dict by DeepSpeed's subgroup index and
        then by parameter index.
        """
        return {
            index: {number: self._get_fp32_grad_state_partition(param, True)[0] for number, param in enumerate(group)}
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
        self.publish()
        self._gathers.shows = False
        self._gathers.blank()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """Restore the small ZeRO-3 parameters after DeepSpeed has saved or loaded a checkpoint.

        DeepSpeed needs all parameters partitioned for a save or a load, so the small ones were empty during this time.
        They get their values back, with one exception: after a save during which updates still write optimizer state to
        a drive, they are NaN until the next gather.

        If updates may overlap the next forward, the small parameters keep DeepSpeed's status "partitioned", as after
        every step. The status "gathered" would do harm after a load: in the second forward, DeepSpeed would record the
        modules in another order than before. This concerns models that read a parameter outside of its module
        (``self.embedding.weight``).
        """
        self._gathers.shows = True
        if self._ebbtide.plan.overlap_forward:
            self.invalidate_secondary_tensor()
            # The plans of ranks may differ, and gathering is collective.
            if self.any_rank(self._ebbtide.saves_in_flight):
                self._gathers.stand_in()  # as after a step: the first read waits for the updates
            else:
                self._gathers.show_at_rest()
        else:
            super().checkpoint_event_epilogue()
        self._gathers.together.stay_gathered(True)

    _rigid_load_state_dict = published("_rigid_load_state_dict", "_adopt_loaded")
    _load_universal_checkpoint = published("_load_universal_checkpoint", "_adopt_loaded")
    _restore_from_bit16_weights = published("_restore_from_bit16_weights", "_adopt_loaded")
    _restore_from_fp32_weights = published("_restore_from_fp32_weights", "_adopt_loaded")

    def _adopt_loaded(self) -> None:
        executor = self._ebbtide.executor
        for number, master in enumerate(self._masters()):
            if self._flat is not None:
                moments = self._flat.moments(number)
            else:
                placed = executor.states[number]
                moments = dict(zip(self._rule.moments, placed.moments, strict=True))
            take_loaded_moments(self.optimizer, self._rule, master, moments)
        self._pieces.take_back()
        executor.state_loaded()  # the tensors shown to DeepSpeed are copied back before the next update
        self.resume_rule()

    # -- what the session asks ---------------------------------------------------------------

    @property
    def _cuts(self) -> list[Cut]:
        return self._pieces.cuts

    def _subgroups_of(self, param: Any) -> list[int]:
        return self._gathers.partitions.subgroups([param])

    def slices(self) -> dict[int, ZeroSlice]:
        return stage3_buffers.slices(self)

    def prepare(self, device: Device) -> None:
        stage3_buffers.split_gradients(self, device)
        if not self._pieces.whole:
            self._flat = FlatState(self, self._masters(), self._pieces.cuts, device)
            self.shares_state = True
        largest = max((self.sizes()[index] for index in self._swapped), default=0)
        self._unread = device.host_empty(largest, self.dtype)

    def take(self, subgroup: int, now: SubgroupState | None) -> Buffers:
        if now is None:
            return stage3_buffers.stock_buffers(self, self._masters(), subgroup)
        movable = subgroup not in self._swapped
        state = now.state if self._flat is None else self._flat.state(subgroup)
        return Buffers(state, now.gradient, now.wire, now.parameter_location, movable)

    def adopt(self, state: SubgroupState) -> None:
        group, _, _ = self._pieces.cuts[state.index]
        moved = stage3_buffers.repoint(self, self._masters()[group], state)
        self._gathers.moved |= moved

    def settle(self) -> None:
        """Make each parameter with a moved partition use the partition's new memory. Then release DeepSpeed's flat
        buffers that are no longer used.
        """
        super().settle()
        if self._gathers.moved:
            self._pieces.part()
            stage3_buffers.drop_flat_parameters(self)
            self._gathers.show_anew()

    def parameter_location(self) -> ParameterLocation:
        return private.parameter_location(self)

    def gathers(self) -> Gathered | None:
        return private.gathers(self, self._gathers.views.trace)

    def zero_stage(self) -> ZeroStage:
        return 3

    def _masters(self) -> list[torch.nn.Parameter]:
        return self.__dict__["fp32_partitioned_groups_flat"]

    def _group_of(self) -> list[int]:
        return [self.sub_group_to_group_id[i] for i in range(len(self.fp16_groups))]

    def _let_go(self) -> None:
        self._gathers.open()
        super()._let_go()


def take_over(
    optimizer: Any,
    module: torch.nn.Module,
    plan: Plan,
    device: Device,
    rule: UpdateRule,
    *,
    overlap_forward: bool,
    subgroup_size: int,
) -> None:
    """Turn DeepSpeed's existing ZeRO-3 optimizer into an `EbbtideStage3`, which runs a plan.

    Args:
        subgroup_size: Number of elements of a plan's subgroup. If it is less than DeepSpeed's, the plan's
            subgroups are parts of DeepSpeed's.
    """
    optimizer._swapped = stage3_buffers.swapped(optimizer)
    if optimizer._swapped:
        overlap_forward = False  # so that no update still writes a master that the swapper reads
        _check_masters_at_hand(optimizer, plan)
    for master in optimizer.fp32_partitioned_groups_flat:
        master.grad = None  # 4 bytes per parameter
    optimizer._pieces = stage3_buffers.Pieces(optimizer, cuts_of(optimizer, subgroup_size))
    optimizer._gathers, optimizer._flat = Gathers(optimizer, module), None
    optimizer._rule, optimizer._infinite, optimizer._hooks = rule, set(), []
    optimizer.__class__ = EbbtideStage3
    try:  # converts one subgroup at a time
        optimizer._ebbtide = Session(optimizer, plan, device, overlap_forward=overlap_forward)
    except BaseException:
        device.close()
        optimizer.__class__ = DeepSpeedZeroOptimizer_Stage3
        stage3_buffers.hand_back(optimizer)
        raise
    optimizer.resume_rule()
    optimizer._gathers.gate()
    optimizer._ebbtide.after_switch.append(optimizer._gathers.choose_hooks)


def _check_masters_at_hand(optimizer: Any, plan: Plan) -> None:
    if plan.count("stored"):
        elements = sum(map(int, optimizer.fp16_partitioned_groups_flat_numel))
        raise PlanError(
            "zero_optimization.offload_param.max_in_cpu must hold all of this rank's "
            f"{elements} parameters if state is on a drive (offload_optimizer.device 'nvme'), but "
            f"got {optimizer.max_params_in_cpu}: raise it, or set offload_param.device to cpu"
        )


def _norms(gradients: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    if not gradients:
        return ()
    if all(gradient.numel() <= 250_000_000 for gradient in gradients):
        return ((float64_norms(gradients) ** 2.0) ** 0.5).unbind()
    return [_in_parts(gradient) for gradient in gradients]


def _in_parts(gradient: torch.Tensor) -> torch.Tensor:
    squares = float64_norms(list(gradient.split(250_000_000))) ** 2.0
    return functools.reduce(torch.add, squares.unbind()) ** 0.5
