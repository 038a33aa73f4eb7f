"""Schedules that differ in times only are built once: what a service asked by sliders lives on.

Which ops there are, and what they wait for, follows from a strategy's options and from the
workload's sizes. A layer's times and activations, the pipeline's idle time and the memory in use
throughout are written into the arrays of an earlier schedule of the same structure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from simulator.engines import kernel
from simulator.engines.compiled import CompiledSchedule, compile_schedule
from simulator.engines.kernel import Ints
from simulator.schedule import OpKind, Schedule
from simulator.workload import Layer, Workload

# What `Template.retimed` writes anew, or what no schedule depends on; all else is the structure.
RETIMED_LAYER = ("name", "forward_s", "backward_s", "activation_bytes")
RETIMED_WORKLOAD = (
    "schema_version", "name", "layers", "subgroup_size", "parameters", "nodes",
    "tokens_per_iteration", "samples_per_iteration", "pipeline_idle_s", "device_base_bytes",
    "memory_curve", "model_checkpoint_bytes", "provenance", "phase_times", "memory_peaks",
    "warnings",
)  # fmt: skip
_LAYER_STRUCTURE = tuple(name for name in Layer.model_fields if name not in RETIMED_LAYER)
_WORKLOAD_STRUCTURE = tuple(name for name in Workload.model_fields if name not in RETIMED_WORKLOAD)


def structure(workload: Workload) -> Hashable:
    """Equal for workloads whose schedules have the same ops and waits."""
    return (
        *(getattr(workload, name) for name in _WORKLOAD_STRUCTURE),
        bool(workload.pipeline_idle_s),
        tuple(
            tuple(getattr(layer, name) for name in _LAYER_STRUCTURE) for layer in workload.layers
        ),
    )


@dataclass(frozen=True)
class Template:
    """A compiled schedule, and which of its rows belong to which layer.

    Attributes:
        forward, backward: rows of these ops; ``*_layers`` the layer of each.
        idle: rows of the pipeline's idle time.
        held_bytes: device memory of the schedule throughout, without the workload's base.
    """

    compiled: CompiledSchedule
    forward: Ints
    forward_layers: Ints
    backward: Ints
    backward_layers: Ints
    idle: Ints
    held_bytes: int

    @classmethod
    def of(cls, schedule: Schedule, workload: Workload) -> Self:
        """Of a schedule that was built for ``workload``."""

        def rows(kind: OpKind) -> tuple[Ints, Ints]:
            found = [(op.id, op.layer) for op in schedule.ops if op.kind == kind]
            pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
            return pairs[:, 0].copy(), pairs[:, 1].copy()

        # Without the ops: their times are those of one workload.
        compiled = replace(compile_schedule(schedule), schedule=replace(schedule, ops=()))
        return cls(
            compiled, *rows(OpKind.FORWARD), *rows(OpKind.BACKWARD), rows(OpKind.IDLE)[0],
            schedule.device_base_bytes - workload.device_base_bytes,
        )  # fmt: skip

    @property
    def size_bytes(self) -> int:
        """Of its arrays."""
        made = self.compiled
        arrays = (made.ops, made.after_first, made.after, self.forward, self.backward)
        return sum(array.nbytes for array in arrays)

    def retimed(self, workload: Workload) -> CompiledSchedule:
        """What building and compiling for ``workload`` gives, but for the ops as objects."""
        micro = workload.gradient_accumulation_steps
        forward_s = np.array([layer.forward_s / micro for layer in workload.layers])
        backward_s = np.array([layer.backward_s / micro for layer in workload.layers])
        kept = np.array([layer.activation_bytes for layer in workload.layers], dtype=np.float64)
        ops = self.compiled.ops.copy()
        ops[self.forward, kernel.WORK] = forward_s[self.forward_layers]
        ops[self.forward, kernel.DEVICE_ALLOC] = kept[self.forward_layers]
        ops[self.backward, kernel.WORK] = backward_s[self.backward_layers]
        ops[self.backward, kernel.DEVICE_FREE] = kept[self.backward_layers]
        ops[self.idle, kernel.WORK] = workload.pipeline_idle_s
        base = workload.device_base_bytes + self.held_bytes
        schedule = replace(self.compiled.schedule, device_base_bytes=base)
        return replace(self.compiled, ops=ops, schedule=schedule)


class Templates:
    """The latest templates, as many as fit into ``most_bytes``; one instance per thread."""

    def __init__(self, build: Callable[..., Schedule], most_bytes: int = 64 * 2**20) -> None:
        """``build``: as `build_strategy`."""
        self._build, self._most_bytes, self._bytes = build, most_bytes, 0
        self._held: OrderedDict[Hashable, Template] = OrderedDict()

    def compiled(
        self, name: str, workload: Workload, options: Mapping[str, Any]
    ) -> CompiledSchedule:
        """A strategy's schedule as arrays, without its ops as objects.

        Raises:
            ValueError: as `build_strategy`.
        """
        told = tuple(sorted((key, repr(value)) for key, value in options.items()))
        key = (name, told, structure(workload))
        template = self._held.get(key)
        if template is None:
            template = Template.of(self._build(name, workload, **options), workload)
            self._keep(key, template)
        else:
            self._held.move_to_end(key)
        return template.retimed(workload)

    def _keep(self, key: Hashable, template: Template) -> None:
        """The oldest go; one that would drive out most others is not kept."""
        if template.size_bytes > self._most_bytes // 4:
            return
        self._held[key] = template
        self._bytes += template.size_bytes
        while self._bytes > self._most_bytes:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.size_bytes
