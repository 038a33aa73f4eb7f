"""DeepSpeed's ZeRO-1 and ZeRO-2 optimizer under a plan, with bit-identical results.

Model parameters are plain tensors under ZeRO-1 and 2, which any code may read without a hook. On one rank, a parameter
therefore waits at its first use (`first_touch`). On several ranks, `step` waits for its updates, and the ranks exchange
each piece of the parameters as soon as its updates have ended.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, OPTIMIZER_TIMERS, DeepSpeedZeroOptimizer
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.passes import Place
from ebbtide.runtime.execution.first_touch import FirstTouch
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.zero.flat_partitions import Cut, FlatPartitions, HostSums, hand_back
from ebbtide.runtime.zero.one_rank.alone import UnreducedFlat
from ebbtide.runtime.zero.planned import PlannedZero, float64_norm, float64_norms, gated, published, take_loaded_moments
from ebbtide.runtime.zero.windows import ZeroSlice
from ebbtide.simulator.plan import ParameterLocation, Plan
from ebbtide.simulator.workload import ZeroStage

GATHERS_UNDER_WAY = 2  # all-gathers at a time. NCCL gathers to memory of its own first, until it is waited for
DEEPSPEEDS_OWN = (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads)


class EbbtideStage2(PlannedZero, UnreducedFlat):
    """DeepSpeed's ZeRO-1 or ZeRO-2 optimizer under a plan. It overrides how DeepSpeed copies gradients, runs updates,
    and gives other code access to optimizer state.

    One class serves both ZeRO stages, as in DeepSpeed.
    """

    _flat: FlatPartitions
    _touch: FirstTouch | None = None  # None if steps wait for their updates
    _offload_accumulated_param_ids: set[int]
    low_precision_master_weights_and_grads: bool
    use_grad_accum_attribute: bool
    _overflows: list[torch.Tensor]
    _order: dict[int, tuple[Any, int, int]]  # by parameter: its layer, minus its subgroup, and its place in this
    shares_state = True
    # These attributes are public. Readers outside must also see state that is resident in GPU memory, and wait for
    # updates.
    single_partition_of_fp32_groups = gated("single_partition_of_fp32_groups")
    bit16_groups_flat = gated("bit16_groups_flat")
    parallel_partitioned_bit16_groups = gated("parallel_partitioned_bit16_groups")
    state = gated("state", lambda self: self.optimizer.state)

    # -- backward ----------------------------------------------------------------------------

    def copy_grads_in_partition(self, param: Any, group_idx: int | None = None) -> None:
        """Take the gradients of a whole bucket, after its reduction over the ranks, once DeepSpeed asks for the last
        one.
        """
        # DeepSpeed calls this for each parameter of the bucket, and only then allows that the bucket is overwritten.
        del group_idx
        bucket, own = self.ipg_buckets[self.get_param_comm_dtype(param)].params, self.is_param_in_current_partition
        if self.get_param_id(param) == next(key for *_, key in reversed(bucket) if own[key]):
            groups = self.bit16_groups
            self._take([(key, groups[group][index], group) for group, index, key in bucket if own[key]])

    @torch.no_grad()
    def _take(self, reduced: list[tuple[int, Any, int]]) -> None:
        """Add gradients, as rows of key, parameter and group, to the sums in the memory that the updates read."""
        boundary, windows = self.is_gradient_accumulation_boundary(), self._windows
        if boundary:
            self._ebbtide.prefetch()
        reduced = self._in_host_order(reduced)
        if self._alone and boundary and self.micro_step_id <= 0:
            self._take_whole([key for key, _, _ in reduced], [param for _, param, _ in reduced])
            return
        arrived = [self._arrived(*row, boundary) for row in reduced]
        parts = [part for part, _, _ in arrived if part is not None]
        copied = len(parts) > 1 and len({part.dtype for part in parts}) == 1
        if copied:  # to one piece, in the order of the host's memory
            parts = list(torch.cat(parts).split([part.numel() for part in parts]))
        with windows.together():
            totals, left = {}, iter(parts)
            for (key, param, _), (part, first, alone) in zip(reduced, arrived, strict=True):
                if part is not None:
                    totals[key] = self._send_gradient(key, next(left), first=first, boundary=boundary, alone=alone)
                if boundary or self._alone:
                    self._drop_gradient(param)
            if boundary:  # before a complete subgroup's update begins, which may depend on the norms
                self._set_norms(totals)
        if not (copied or self._alone):  # the gradient lies in DeepSpeed's bucket
            windows.before_reuse()

    def _take_whole(self, keys: list[int], params: list[Any]) -> None:
        gradients = [param.grad.view(-1) for param in params]
        together = torch.cat(gradients) if len(gradients) > 1 else gradients[0]
        with self._windows.together():
            self._windows.accept_adjacent([piece for key in keys for piece in self._flat.slices[key]], together)
            for param in params:
                self._drop_gradient(param)
            parts = together.split([len(gradient) for gradient in gradients])
            self._set_norms(dict(zip(keys, parts, strict=True)))

    def _in_host_order(self, reduced: list[tuple[int, Any, int]]) -> list[tuple[int, Any, int]]:
        # Layers and subgroups stay in the order of backward, as in the simulated schedule.
        ops, places = self._windows.ops, self._order
        if not ops.layers or not places:  # a new plan
            self._know_layers()
            for key, pieces in self._flat.slices.items():
                place = next(((piece.subgroup, piece.offset) for piece in pieces), (0, 0))
                places[key] = (ops.layers.get(place), -place[0], place[1])
        layers: dict[Any, int] = {}
        for key, _, _ in reduced:
            layers.setdefault(places[key][0], len(layers))
        return sorted(reduced, key=lambda row: (layers[places[row[0]][0]], *places[row[0]][1:]))

    def _arrived(self, key: int, param: Any, group: int, boundary: bool) -> tuple[torch.Tensor | None, bool, bool]:
        """Return this rank's part (None: not to be sent yet), whether it starts a sum, and whether it is the only one.

        The cases are those of stock DeepSpeed's ``copy_grads_in_partition``.
        """
        _, start, _, elements = self.grad_position[key]
        if self._use_compact_grad_partition_buffer(group):
            self._offload_accumulated_param_ids.add(key)
            if not boundary:
                return None, True, False
            rank = torch.distributed.get_rank(group=self.real_dp_process_group[group])
            return self._get_compact_grad_partition_slice(group, rank, key, elements), True, False
        accumulates = self.micro_step_id > 0 or not boundary
        if accumulates:
            self._offload_accumulated_param_ids.add(key)
        sums_all = self._sums_all(param, elements)
        if sums_all and accumulates:
            self.async_accumulate_grad_in_cpu_via_gpu(param)
        elif accumulates:
            self.accumulated_grads_in_cpu[key] = None
        gradient = self.get_param_gradient_attribute(param)
        if sums_all and not boundary:
            return None, True, False
        if boundary and elements != param.numel():  # DeepSpeed looks for an overflow in the whole gradient
            self.update_offload_overflow_tracker(gradient)
        first = self.micro_step_id <= 0 or sums_all
        whole = gradient.view(-1)
        return whole if elements == len(whole) else whole.narrow(0, start, elements), first, not accumulates

    def _sums_all(self, param: Any, elements: int) -> bool:
        apart = elements != param.numel() or self.use_grad_accum_attribute
        return apart and not self.low_precision_master_weights_and_grads

    def _drop_gradient(self, param: Any) -> None:
        # Autograd made the gradient on another stream than the present one, which has just been given work on it.
        gradient = self.get_param_gradient_attribute(param)
        if gradient is not None:
            self._ebbtide.executor.device.let_go(gradient)
        self.clear_grad_attribute(param)

    def _send_gradient(
        self, key: int, gradient: torch.Tensor, *, first: bool, boundary: bool, alone: bool = False
    ) -> torch.Tensor:
        totals, position, slices = [], 0, self._flat.slices[key]
        for piece in slices:
            part = gradient.narrow(0, position, piece.elements) if len(slices) > 1 else gradient
            totals.append(self._windows.accept(piece, part, first=first, boundary=boundary, alone=alone))
            position += piece.elements
        return gradient if first else torch.cat(totals) if len(totals) > 1 else totals[0]

    def _set_norms(self, totals: dict[int, torch.Tensor]) -> None:
        norms = self.norm_for_param_grads
        # The norm of an earlier backward, whose overflow counts too.
        self._overflows += [~torch.isfinite(norms[key]) for key in totals if key in norms]
        if totals:
            norms.update(zip(totals, float64_norms(list(totals.values())).unbind(), strict=True))

    def _sum_on_host(self, key: int) -> torch.Tensor:
        sums = self._windows
        return torch.cat([sums.sum_so_far(piece).cpu() for piece in self._flat.slices[key]])

    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        for group, params in enumerate(self.params_in_partition):
            for param in params:
                key = self.get_param_id(param)
                if param.requires_grad and key in self._offload_accumulated_param_ids:
                    if self._use_compact_grad_partition_buffer(group):
                        self._take([(key, param, group)])
                    else:
                        self._close_param(param, key)

    def _close_param(self, param: Any, key: int) -> None:
        _, start, _, elements = self.grad_position[key]
        if self._sums_all(param, elements):
            self._wait_for_offload_copies()
            total = self.accumulated_grads_in_cpu[key]
            self.update_offload_overflow_tracker(total)
            total = total.view(-1).narrow(0, start, elements)
            self._set_norms({key: self._send_gradient(key, total.to(param.device), first=True, boundary=True)})
            return
        sums = [self._windows.finish(piece).to(param.device) for piece in self._flat.slices[key]]
        self.norm_for_param_grads[key] = float64_norm(torch.cat(sums))

    # -- step --------------------------------------------------------------------------------

    def update_offload_overflow_tracker(self, grad: torch.Tensor | None) -> None:
        """Check a gradient, also what other ranks own of it, for infinity and NaN, as stock DeepSpeed does."""
        # Stock DeepSpeed copies the result of each check to the host immediately.
        if grad is not None:
            self._overflows.append(self._has_inf_or_nan(grad.data))

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any gradient has an infinity or NaN.

        The method recognizes such a gradient by its norm in float64, which is not finite.
        """
        shared = bool(self._overflows) and bool(torch.stack(self._overflows).any())
        norms = list(self.norm_for_param_grads.values())
        if shared or (norms and not bool(torch.isfinite(torch.stack(norms)).all())):
            self.local_overflow = True
        return super().has_overflow(partition_gradients)

    def step(self, closure: Any = None) -> None:
        """Run the optimizer's updates as the plan says. Return when all ranks have the new parameters.

        Raises:
            BackgroundError: An update failed in the background.
        """
        del closure
        own = self._ebbtide
        self._settle_parameters()  # if no backward has done so
        own.begin_step()
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        self._wait_for_offload_copies()
        self._offload_accumulated_param_ids = set()
        norm = self._checked_norm()
        self._windows.close_window()
        scale_before = self.loss_scale
        self._update_scale(self.overflow)
        if self.overflow:
            self._skip()
        else:
            assert norm is not None
            self._global_grad_norm = norm / scale_before
            self._update(norm)
        for timer in OPTIMIZER_TIMERS:
            self.timers(timer).start()
            self.timers(timer).stop()
        own.recorder.step_ends()

    def reset_cpu_buffers(self) -> None:
        super().reset_cpu_buffers()
        self._overflows.clear()

    def _checked_norm(self) -> torch.Tensor | None:
        self.overflow = False
        if self.check_grad_overflow:
            self.check_overflow(partition_gradients=self.partition_gradients)
        if self.overflow:
            return None
        self._norms_to_host()
        norm: torch.Tensor = self.scaled_global_norm()
        strict = self.dtype != torch.bfloat16 or self.check_grad_overflow
        if strict and is_invalid_grad_norm(norm):
            self.overflow = True
        return norm

    def _skip(self) -> None:
        self._ebbtide.skip()
        self._global_grad_norm = float("inf")
        self.zero_grad(set_to_none=True)
        self.reset_cpu_buffers()

    def _update(self, norm: torch.Tensor) -> None:
        own = self._ebbtide
        self._flat.before_update(own)
        own.update(self._scale_of(norm))
        own.recorder.issue_ends()
        touch = self._touch if own.plan.overlap_forward else None
        if touch is None:
            self._exchange()
        self._lazy_init_hp_params_optimizer_state()
        for group in range(len(self.bit16_groups)):
            self.averaged_gradients[group] = None
        self.reset_cpu_buffers()
        if touch is not None:
            subgroups = range(len(self._cuts))
            touch.updates_launched(dict(zip(subgroups, own.executor.updates_of(subgroups), strict=False)))

    def _scale_of(self, norm: torch.Tensor) -> float:
        if is_invalid_grad_norm(norm):
            norm = torch.tensor(float("inf"))
        return self._gradient_scale(norm)

    def _exchange(self) -> None:
        # Exchange each piece of the parameters among the ranks once its updates have ended, while others run.
        executor, recorder = self._ebbtide.executor, self._ebbtide.recorder
        if self._ebbtide.device.watched is not None:  # the time of the exchange itself is measured
            executor.wait_all()
        recorder.gather_begins()
        begun = deque[Any]()
        for number, begin, elements, subgroups in self._flat.exchanges:
            executor.wait_parameters(subgroups)
            if len(begun) == GATHERS_UNDER_WAY:
                begun.popleft().wait()
            partitions = self.__dict__["parallel_partitioned_bit16_groups"][number]
            pieces = [partition.narrow(0, begin, elements).detach() for partition in partitions]
            ranks = self.real_dp_process_group[number]
            begun.append(dist.all_gather(pieces, pieces[dist.get_rank(group=ranks)], ranks, async_op=True))
        executor.wait_all()
        for exchange in begun:
            exchange.wait()
        recorder.gather_ends()
        for group in range(len(self.bit16_groups)):
            self._update_model_bit16_weights(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # no gradient waits for its parameter
            super().zero_grad(set_to_none)

    # -- readers and writers -----------------------------------------------------------------

    @property
    def overlaps_forward(self) -> bool:
        return all(torch.distributed.get_world_size(group=group) == 1 for group in self.real_dp_process_group)

    def touch_parameters(self) -> None:
        """Let parameters wait at their first use from now on, if updates may overlap the next forward."""
        module = self._module_of()
        if module is not None and self._ebbtide.overlaps:
            self._touch = FirstTouch(module, self._subgroups_of, self._ebbtide.device)
            self._touch.find(self._shown())

    def _subgroups_of(self, param: Any) -> list[int]:
        return [place.subgroup for place in self._places(param)]

    def _shown(self) -> Iterator[tuple[Any, torch.Tensor]]:
        flats = self.__dict__["bit16_groups_flat"]
        tables = self.round_robin_bit16_groups, self.round_robin_bit16_meta, self.round_robin_bit16_offsets
        for flat, *columns in zip(flats, *tables, strict=True):
            for param, meta, offset in zip(*columns, strict=True):
                yield param, flat.narrow(0, offset, meta.numel()).view(meta.shape).data

    def _settle_parameters(self) -> None:
        if self._touch is not None:
            self._touch.settle_all()

    def wait(self) -> None:
        """Wait until DeepSpeed's buffers hold all optimizer state, and the model's parameters their new values."""
        self.publish()

    def publish(self) -> None:
        super().publish()
        self._settle_parameters()

    def _link_all_hp_params(self) -> None:
        # Access through the links waits for running updates.
        super()._link_all_hp_params()
        self._hp_optimizer_states_linked = False
        # An optimizer that runs its own step creates its moments in its first step.
        if not self._rule.own_step or any(self.optimizer.state.values()):
            self._lazy_init_hp_params_optimizer_state()
        for group in self.bit16_groups:
            for param in group:
                self._gate(param)

    def _gate(self, param: Any) -> None:
        read, write = param.get_full_hp_param, param.set_full_hp_param
        read_gradient, write_gradient = param.get_full_hp_grad, param.set_full_hp_grad

        def get_full_hp_param(*args: Any, **kwargs: Any) -> Any:
            self.publish()
            return read(*args, **kwargs)

        def set_full_hp_param(*args: Any, **kwargs: Any) -> None:
            self.publish()
            write(*args, **kwargs)
            self._take_back()

        param.get_full_hp_param, param.set_full_hp_param = get_full_hp_param, set_full_hp_param
        param.get_full_hp_grad = self._with_gradient(param, read_gradient)
        param.set_full_hp_grad = self._with_gradient(param, write_gradient)

    def _with_gradient(self, param: Any, call: Callable[..., Any]) -> Callable[..., Any]:

        def gated(*args: Any, **kwargs: Any) -> Any:
            if param._hp_mapping is None:
                return call(*args, **kwargs)
            self._ebbtide.executor.wait_all()
            number, index = param._hp_mapping.param_group_index, param._index_in_param_group
            # With round robin, the index in the partition may be that of another parameter.
            shown = self.params_in_partition[number][index]
            kept = [self._windows.keep(p) for p in self._flat.slices[self.get_param_id(shown)]]
            fragment = torch.cat([part.cpu() for part in kept])
            group = self.offload_gradient_dict[number]
            group[index] = fragment
            result = call(*args, **kwargs)
            group[index] = None
            for part, written in zip(kept, fragment.split([k.numel() for k in kept]), strict=True):
                part.copy_(written)
            return result

        return gated

    def _get_offload_gradient_dict(self) -> None:
        for group, params in enumerate(self.params_in_partition):
            self.offload_gradient_dict[group] = [None] * len(params)

    # -- checkpoints -------------------------------------------------------------------------

    update_lp_params = published("update_lp_params")
    _restore_from_bit16_weights = published("_restore_from_bit16_weights", "_take_back")
    load_state_dict = published("load_state_dict", "_adopt_loaded")

    def _take_back(self) -> None:
        self._flat.take_back(self._ebbtide)

    def _adopt_loaded(self) -> None:
        for group, master in enumerate(self._masters()):
            take_loaded_moments(self.optimizer, self._rule, master, self._flat.moments(group))
        self._link_all_hp_params()
        self._take_back()
        self.resume_rule()

    # -- states that go away for a while -----------------------------------------------------

    def offload_states(self, include: Container[Any] | None = None, **how: Any) -> None:
        """Move parameters, gradients and optimizer state out of GPU memory until `reload_states`.

        DeepSpeed's own code moves the parameters, and the gradients that DeepSpeed itself sums in GPU memory. ebbtide
        moves the optimizer state. If the parameters have moved, training on a GPU can continue only after
        `reload_states`.
        """
        own = [kind for kind in DEEPSPEEDS_OWN if include is None or kind in include]
        self.publish()
        DeepSpeedZeroOptimizer.offload_states(self, own, **how)
        # Offloading cut the links together with the parameters' memory, but training may continue.
        self._link_all_hp_params()
        self._follow_parameters()
        super().offload_states(include)

    def reload_states(self, **how: Any) -> None:
        self.publish()
        DeepSpeedZeroOptimizer.reload_states(self, **how)
        self._follow_parameters()
        super().reload_states()

    def _follow_parameters(self) -> None:
        self.parallel_partitioned_bit16_groups[:] = [
            self.get_data_parallel_partitions(flat, group) for group, flat in enumerate(self.bit16_groups_flat)
        ]
        self._flat.find_parameters()
        if self._touch is not None:
            self._touch.find(self._shown())

    # -- what the session asks ---------------------------------------------------------------

    @property
    def _cuts(self) -> list[Cut]:
        return self._flat.cuts

    def _trained(self) -> list[Any]:
        return [param for group in self.bit16_groups for param in group]

    def _places(self, param: Any) -> list[Place]:
        pieces = self._flat.slices.get(self.get_param_id(param), ())
        return [Place(piece.subgroup, piece.offset, piece.elements) for piece in pieces if piece.real]

    def slices(self) -> dict[int, ZeroSlice]:
        return dict(enumerate(piece for pieces in self._flat.slices.values() for piece in pieces))

    def prepare(self, device: Device) -> None:
        """Do nothing, because `FlatPartitions` has already divided DeepSpeed's flat buffers among the subgroups."""

    def take(self, subgroup: int, now: SubgroupState | None) -> Buffers:
        return self._flat.buffers(subgroup, None if now is None else now.gradient)

    def adopt(self, state: SubgroupState) -> None:
        self._flat.adopt(state)

    def _let_go(self) -> None:
        if self._touch is not None:
            self._touch.close()
        super()._let_go()

    def parameter_location(self) -> ParameterLocation:
        return "device"

    def gathers(self) -> None:
        """Return None, because ZeRO-1 and 2 never gather partitioned parameters."""

    def zero_stage(self) -> ZeroStage:
        return 2 if self.partition_gradients else 1

    def _masters(self) -> list[torch.nn.Parameter]:
        return self.__dict__["single_partition_of_fp32_groups"]

    def _group_of(self) -> list[int]:
        return list(range(len(self._masters())))


def take_over(optimizer: Any, plan: Plan, device: Device, rule: UpdateRule, *, overlap_forward: bool) -> None:
    """Turn DeepSpeed's existing ZeRO-1 or 2 optimizer into an `EbbtideStage2`, which runs a plan."""
    masters = optimizer.single_partition_of_fp32_groups
    optimizer._rule = rule
    optimizer._overflows, optimizer._order = [], {}
    try:
        optimizer._flat = FlatPartitions(optimizer, masters, plan.subgroup_size, device)
        optimizer.__class__ = EbbtideStage2
        optimizer._ebbtide = Session(optimizer, plan, device, overlap_forward=overlap_forward)
    except BaseException:
        device.close()
        optimizer.__class__ = DeepSpeedZeroOptimizer
        hand_back(optimizer, masters)
        raise
    optimizer.accumulated_grads_in_cpu = HostSums(optimizer.accumulated_grads_in_cpu, optimizer._sum_on_host)
    optimizer._link_all_hp_params()
    optimizer.resume_rule()
    optimizer.touch_parameters()
    # For ``engine.basic_optimizer.state_dict()``. ZeRO-3 needs no hook, because its state dict has no parameters
    # between steps.
    inner = optimizer.optimizer
    optimizer._hooks = [inner.register_state_dict_pre_hook(lambda _: optimizer.publish())]
