"""Builds the schedule of ebbtide's iteration from a workload and a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.plan import Plan, PlanError
from simulator.schedule import Lane, OpKind, Schedule, ScheduleBuilder
from simulator.workload import STATE_BYTES_PER_PARAM, Workload

ALL_CORES = math.inf  # capped at the machine's cores by the simulator


def build_schedule(workload: Workload, plan: Plan, iterations: int = 3) -> Schedule:
    """The schedule that the runtime executes under ``plan``, for some iterations in a row.

    Three iterations are enough to see the steady state: the first one starts with nothing to wait
    for, the period is read between the ends of the second and the third backward.

    Raises:
        PlanError: the plan covers another number of subgroups than the workload has.
    """
    if plan.subgroup_count != len(workload.subgroups):
        raise PlanError(
            "plan.placement must cover each subgroup of the workload once, but got "
            f"{plan.subgroup_count} placements for {len(workload.subgroups)} subgroups: plan "
            "again with `tune plan` for this model and sub_group_size"
        )
    builder = _IterationBuilder(workload, plan)
    for iteration in range(iterations):
        builder.out.iteration = iteration
        builder.forward()
        builder.backward()
        builder.update()
    resident = builder.elements("resident") * STATE_BYTES_PER_PARAM
    slots = min(plan.staging_slots, plan.count("device"))
    staging = slots * max((builder.sizes[s] for s in builder.placed("device")), default=0)
    hosted = workload.params * STATE_BYTES_PER_PARAM - resident
    host_gradients = builder.elements("host") * workload.grad_bytes_per_param
    return Schedule(
        ops=tuple(builder.out.ops),
        iterations=iterations,
        ranks_per_node=workload.ranks_per_node,
        strategy="ebbtide",
        device_base_bytes=workload.device_base_bytes + resident + staging * STATE_BYTES_PER_PARAM,
        host_base_bytes=hosted + host_gradients,
    )


@dataclass
class _IterationBuilder:
    """Appends one iteration after the other; remembers what the next one must wait for."""

    workload: Workload
    plan: Plan
    out: ScheduleBuilder = field(default_factory=ScheduleBuilder)
    parameters_new: dict[int, int] = field(default_factory=dict)  # subgroup -> op
    gradient_home: dict[int, int] = field(default_factory=dict)  # subgroup -> op
    visits_begun: int = 0  # state H2D ops of all iterations so far
    written_back: list[int] = field(default_factory=list)  # state D2H op of each visit
    prefetched: dict[int, int] = field(default_factory=dict)  # subgroup -> its state H2D
    step_end: int | None = None
    backward_done: int = -1

    def __post_init__(self) -> None:
        self.sizes = self.workload.subgroups
        self.placements = self.plan.placements
        self.layers_of = self.workload.layers_of_subgroups()
        self.subgroups_of: list[list[int]] = [[] for _ in self.workload.layers]
        for subgroup, layers in enumerate(self.layers_of):
            for layer in layers:
                self.subgroups_of[layer].append(subgroup)

    def placed(self, placement: str) -> list[int]:
        return [s for s, p in enumerate(self.placements) if p == placement]

    def elements(self, placement: str) -> int:
        return sum(self.sizes[s] for s in self.placed(placement))

    def forward(self) -> None:
        """Each layer waits for just the subgroups that hold its parameters."""
        for number, layer in enumerate(self.workload.layers):
            waits = [] if self.step_end is None else [self.step_end]
            for subgroup in self.subgroups_of[number]:
                if subgroup in self.parameters_new:
                    waits.append(self.parameters_new[subgroup])
            self.out.add(
                OpKind.FORWARD, Lane.COMPUTE, layer.forward_s, after=waits, device_share=1.0,
                device_alloc_bytes=layer.activation_bytes, layer=number,
            )  # fmt: skip

    def backward(self) -> None:
        """Last layer first; a subgroup's gradient goes home when all its layers are through."""
        w = self.workload
        missing = [len(layers) for layers in self.layers_of]
        self.prefetched = {}
        for number in reversed(range(len(w.layers))):
            layer = w.layers[number]
            on_device = sum(
                self._share(number, s) for s in self.subgroups_of[number]
                if self.placements[s] != "host"
            )  # fmt: skip
            op = self.out.add(
                OpKind.BACKWARD, Lane.COMPUTE, layer.backward_s, device_share=1.0,
                device_alloc_bytes=on_device * w.grad_bytes_per_param,
                device_free_bytes=layer.activation_bytes, layer=number,
            )  # fmt: skip
            self.backward_done = op
            for subgroup in reversed(self.subgroups_of[number]):
                missing[subgroup] -= 1
                if missing[subgroup] == 0:
                    self._gradient_home(subgroup, op)
            if number == min(self.plan.prefetch_after_layer, len(w.layers) - 1):
                self._prefetch(op)

    def _share(self, layer: int, subgroup: int) -> int:
        """Elements of a subgroup that belong to a layer, to the nearest even split."""
        return self.sizes[subgroup] // len(self.layers_of[subgroup])

    def _gradient_home(self, subgroup: int, after: int) -> None:
        if self.placements[subgroup] != "host":
            self.gradient_home[subgroup] = after
            return
        size = self.sizes[subgroup] * self.workload.grad_bytes_per_param
        self.gradient_home[subgroup] = self.out.add(
            OpKind.GRADIENT_D2H, Lane.D2H, size, "d2h_bytes_per_s", [after],
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip

    def _prefetch(self, after: int) -> None:
        for subgroup in self.placed("device")[: self.plan.prefetch]:
            self.prefetched[subgroup] = self._state_h2d(subgroup, after)

    def _state_h2d(self, subgroup: int, after: int) -> int:
        """Visit v takes the slot of visit v - slots, once that one is written back."""
        waits = [after]
        if self.visits_begun >= self.plan.staging_slots:
            waits.append(self.written_back[self.visits_begun - self.plan.staging_slots])
        self.visits_begun += 1
        size = self.sizes[subgroup] * STATE_BYTES_PER_PARAM
        return self.out.add(
            OpKind.STATE_H2D, Lane.H2D, size, "h2d_bytes_per_s", waits,
            dram_bytes=size, subgroup=subgroup,
        )  # fmt: skip

    def update(self) -> None:
        """Norm barrier, then host, device and both copies at once, in forward order."""
        after = [self.backward_done]
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=after)
        ends: list[int] = []
        for subgroup, placement in enumerate(self.placements):
            if placement == "host":
                ends.append(self._update_host(subgroup, norm))
            elif placement == "resident":
                ends.append(self._update_device(subgroup, [norm]))
            else:
                ends.append(self._visit(subgroup, norm))
        self.parameters_new = dict(enumerate(ends))
        if not self.plan.overlap_forward:
            self.parameters_new = {}
        waits = [norm] if self.plan.overlap_forward else [norm, *ends, *self.written_back]
        self.step_end = self.out.add(OpKind.STEP_END, Lane.COMPUTE, 0.0, after=waits)

    def _update_host(self, subgroup: int, norm: int) -> int:
        w, size = self.workload, self.sizes[subgroup]
        per_param = 2 * STATE_BYTES_PER_PARAM + w.grad_bytes_per_param + w.wire_bytes
        update = self.out.add(
            OpKind.UPDATE_HOST, Lane.HOST, size, "host_adam_params_per_s",
            [norm, self.gradient_home[subgroup]], dram_bytes=size * per_param,
            cores=self.plan.threads or ALL_CORES, subgroup=subgroup,
        )  # fmt: skip
        return self.out.add(
            OpKind.PARAMETER_H2D, Lane.H2D_PARAMETERS, size * w.wire_bytes, "h2d_bytes_per_s", [update],
            dram_bytes=size * w.wire_bytes, subgroup=subgroup,
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
        size = self.sizes[subgroup] * STATE_BYTES_PER_PARAM
        self.written_back.append(
            self.out.add(
                OpKind.STATE_D2H,
                Lane.D2H,
                size,
                "d2h_bytes_per_s",
                [update],
                dram_bytes=size,
                subgroup=subgroup,
            )  # fmt: skip
        )
        return update
