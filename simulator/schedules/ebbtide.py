"""Builds the schedule of ebbtide's iteration from a workload and a plan."""

from __future__ import annotations

from simulator.plan import Plan, PlanError
from simulator.schedule import Lane, OpKind, Schedule
from simulator.schedules.loop import ALL_CORES, TrainingLoop
from simulator.workload import STATE_BYTES_PER_PARAM, Workload

SPLIT_STATE_BYTES_PER_PARAM = 10  # the bf16 half of the master is the parameter on the device


def build_schedule(
    workload: Workload, plan: Plan, iterations: int = 3, *, fused: bool = True
) -> Schedule:
    """The schedule that the runtime executes under ``plan``, for some iterations in a row.

    Three iterations are enough to see the steady state: the first one starts with nothing to wait
    for, the period is read between the ends of the second and the third backward.

    Args:
        fused: the host kernel reads wire gradients, scales, updates and writes wire parameters in
            one pass; False shows what stock's separate passes would cost in the same schedule.

    Raises:
        PlanError: the plan covers another number of subgroups than the workload has.
    """
    loop = EbbtideLoop(workload, plan, fused=fused)
    loop.run(iterations)
    return loop.schedule(iterations)


def visit_bytes_per_param(workload: Workload, plan: Plan) -> int:
    """What a visiting subgroup moves each way: 12, or 10 with a lossless split master."""
    if plan.split_master and workload.wire_dtype == "bf16":
        return SPLIT_STATE_BYTES_PER_PARAM
    return STATE_BYTES_PER_PARAM


class EbbtideLoop(TrainingLoop):
    """ebbtide's iteration: see "What an iteration looks like under a plan" in the design."""

    def __init__(self, workload: Workload, plan: Plan, *, fused: bool = True) -> None:
        if plan.subgroup_count != len(workload.subgroups):
            raise PlanError(
                "plan.placement must cover each subgroup of the workload once, but got "
                f"{plan.subgroup_count} placements for {len(workload.subgroups)} subgroups: plan "
                "again with `tune plan` for this model and sub_group_size"
            )
        super().__init__(workload)
        self.plan = plan
        self.fused = fused
        self.placements = plan.placements
        # No more slots than visits: a slot's wait then also orders a subgroup's next visit behind
        # its own write-back.
        self.slots = min(plan.staging_slots, plan.count("device"))
        self.visit_bytes_per_param = visit_bytes_per_param(workload, plan)
        self.gradient_home: dict[int, int] = {}  # subgroup -> op
        self.missing: list[int] = []  # layers whose gradient a subgroup still lacks
        self.visits_begun = 0  # state H2D ops of all iterations so far
        self.written_back: list[int] = []  # state D2H op of each visit
        self.prefetched: dict[int, int] = {}  # subgroup -> its state H2D

    def schedule(self, iterations: int) -> Schedule:
        """What was appended so far, with the memory that is in use throughout."""
        w = self.workload
        resident = self.elements("resident") * self.visit_bytes_per_param
        staging = self.slots * max((self.sizes[s] for s in self.placed("device")), default=0)
        hosted = (w.params - self.elements("resident")) * STATE_BYTES_PER_PARAM
        host_gradients = self.elements("host") * w.grad_bytes_per_param
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=w.ranks_per_node,
            strategy="ebbtide",
            device_base_bytes=w.device_base_bytes + resident + staging * self.visit_bytes_per_param,
            host_base_bytes=hosted + host_gradients,
        )

    def placed(self, placement: str) -> list[int]:
        return [s for s, p in enumerate(self.placements) if p == placement]

    def elements(self, placement: str) -> int:
        return sum(self.sizes[s] for s in self.placed(placement))

    def backward(self, micro_batch: int) -> None:
        self.missing = [len(layers) for layers in self.layers_of]
        self.prefetched = {}
        super().backward(micro_batch)

    def gradient_alloc_bytes(self, layer: int, micro_batch: int) -> int:
        """Gradients of visiting and resident subgroups wait on the device for their update."""
        if micro_batch > 0:
            return 0
        stays = sum(n for s, n in self.shares[layer] if self.placements[s] != "host")
        return stays * self.workload.grad_bytes_per_param

    def gradients(self, layer: int, micro_batch: int, after: int) -> None:
        """A subgroup's gradient goes home when all its layers are through."""
        for subgroup, _ in reversed(self.shares[layer]):
            self.missing[subgroup] -= 1
            if self.missing[subgroup] == 0:
                self._gradient_home(subgroup, micro_batch, after)
        starts = min(self.plan.prefetch_after_layer, len(self.workload.layers) - 1)
        if layer == starts and micro_batch == self.boundary:
            for subgroup in self.placed("device")[: self.plan.prefetch]:
                self.prefetched[subgroup] = self._state_h2d(subgroup, self.backward_done)

    def _gradient_home(self, subgroup: int, micro_batch: int, after: int) -> None:
        if self.placements[subgroup] != "host":
            self.gradient_home[subgroup] = after
            return
        size = self.sizes[subgroup] * self.workload.grad_bytes_per_param
        if micro_batch > 0:
            after = self._fetch(subgroup, size, [after, self.gradient_home[subgroup]])
        self.gradient_home[subgroup] = self.out.add(
            OpKind.GRADIENT_D2H, Lane.D2H, size, "d2h_bytes_per_s", [after],
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip

    def _fetch(self, subgroup: int, size_bytes: int, waits: list[int]) -> int:
        """The sum so far comes back: micro-batches are added on the device, as stock adds them."""
        return self.out.add(
            OpKind.GRADIENT_H2D, Lane.H2D_PARAMETERS, size_bytes, "h2d_bytes_per_s", waits,
            dram_bytes=size_bytes, subgroup=subgroup,
        )  # fmt: skip

    def _state_h2d(self, subgroup: int, after: int) -> int:
        """Visit v takes the slot of visit v - slots, once that one is written back."""
        waits = [after]
        if self.visits_begun >= self.slots:
            waits.append(self.written_back[self.visits_begun - self.slots])
        self.visits_begun += 1
        size = self.sizes[subgroup] * self.visit_bytes_per_param
        return self.out.add(
            OpKind.STATE_H2D, Lane.H2D, size, "h2d_bytes_per_s", waits,
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip

    def step(self) -> None:
        """Norm barrier, then host, device and both copies at once, in forward order."""
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=self.gradients_done)
        ends = [self._update(subgroup, norm) for subgroup in range(len(self.sizes))]
        if self.plan.overlap_forward:
            self.parameters_new = dict(enumerate(ends))
            waits = [norm]
        else:
            waits = [norm, *ends, *self.written_back]
        self.step_end = self.out.add(OpKind.STEP_END, Lane.COMPUTE, 0.0, after=waits)

    def _update(self, subgroup: int, norm: int) -> int:
        """Appends one subgroup's update; returns the op after which its parameters are new."""
        placement = self.placements[subgroup]
        if placement == "host":
            return self._update_host(subgroup, norm)
        if placement == "resident":
            return self._update_device(subgroup, [norm, *self.may_overwrite(subgroup)])
        return self._visit(subgroup, norm)

    def may_overwrite(self, subgroup: int) -> list[int]:  # noqa: ARG002
        """The ops that must have ended before a subgroup's state changes where it lives: a
        checkpoint's, see `simulator.schedules.checkpointed`.
        """
        return []

    def _update_host(self, subgroup: int, norm: int) -> int:
        waits = [norm, self.gradient_home[subgroup], *self.may_overwrite(subgroup)]
        update = self._host_kernel(subgroup, waits) if self.fused else self._passes(subgroup, waits)
        size = self.sizes[subgroup] * self.workload.wire_bytes
        return self.out.add(
            OpKind.PARAMETER_H2D, Lane.H2D_PARAMETERS, size, "h2d_bytes_per_s", [update],
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip

    def _host_kernel(self, subgroup: int, waits: list[int]) -> int:
        w, size = self.workload, self.sizes[subgroup]
        per_param = 2 * STATE_BYTES_PER_PARAM + w.grad_bytes_per_param
        if self.visit_bytes_per_param == STATE_BYTES_PER_PARAM:  # else the master holds it
            per_param += w.wire_bytes
        return self.out.add(
            OpKind.UPDATE_HOST, Lane.HOST, size, "host_adam_params_per_s", waits,
            dram_bytes=size * per_param, cores=self.plan.threads or ALL_CORES, subgroup=subgroup,
        )  # fmt: skip

    def _passes(self, subgroup: int, waits: list[int]) -> int:
        """Widen and scale, update, downcast: what the fused kernel does in one pass."""
        size, cores = self.sizes[subgroup], self.plan.threads or ALL_CORES
        widened = self.out.add(
            OpKind.GRADIENT_PASS, Lane.HOST, 4 * size, "host_copy_bytes_per_s", waits,
            dram_bytes=6 * size, cores=cores, subgroup=subgroup,
        )  # fmt: skip
        self.out.add(
            OpKind.UPDATE_HOST, Lane.HOST, size, "stock_host_adam_params_per_s", [widened],
            dram_bytes=size * (2 * STATE_BYTES_PER_PARAM + 4), cores=cores, subgroup=subgroup,
        )  # fmt: skip
        return self.out.add(
            OpKind.PARAMETER_CAST, Lane.HOST, 3 * size, "host_copy_bytes_per_s",
            dram_bytes=6 * size, cores=cores, subgroup=subgroup,
        )  # fmt: skip

    def _update_device(self, subgroup: int, waits: list[int]) -> int:
        size = self.sizes[subgroup]
        return self.out.add(
            OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, size, "device_adam_params_per_s",
            [*waits, self.gradient_home[subgroup]], device_share=1.0,
            device_free_bytes=size * self.workload.grad_bytes_per_param, subgroup=subgroup,
        )  # fmt: skip

    def _visit(self, subgroup: int, norm: int) -> int:
        arrived = self.prefetched.get(subgroup)
        if arrived is None:
            arrived = self._state_h2d(subgroup, norm)
        update = self._update_device(subgroup, [norm, arrived])
        size = self.sizes[subgroup] * self.visit_bytes_per_param
        back = self.out.add(
            OpKind.STATE_D2H, Lane.D2H, size, "d2h_bytes_per_s",
            [update, *self.may_overwrite(subgroup)],
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip
        self.written_back.append(back)
        return update
