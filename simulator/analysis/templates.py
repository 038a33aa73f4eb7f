"""Reuse of schedules that differ only in times or memory, for ebbtide's web page, where sliders change values.

The ops of a schedule and their dependencies follow from a strategy's options and the workload's sizes. If only times or
memory change, the new values are written into the arrays of an earlier schedule with the same ops.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.compiled import CompiledSchedule, compile_schedule
from ebbtide.simulator.engines.kernel import Ints
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.footprint import base_by_kind, with_base
from ebbtide.simulator.schedules.stock import PRODUCTS_WAITED_FOR
from ebbtide.simulator.workload import PASSES, PASSES_UNDER_PLANS, Layer, Workload

# Fields that `Template.retimed` replaces, or that no schedule depends on. All other fields are the structure.
RETIMED_LAYER = ("name", *PASSES, *PASSES_UNDER_PLANS, "activation_bytes")
RETIMED_WORKLOAD = (
    "schema_version",
    "name",
    "layers",
    "subgroup_size",
    "deepspeed_subgroup_size",
    "nodes",
    "tokens_per_iteration",
    "samples_per_iteration",
    "micro_batch",
    "sequence",
    "recompute",
    "pipeline_idle_s",
    "device_base_bytes",
    "device_base_parts",
    "memory_curve",
    "model_checkpoint_bytes",
    "provenance",
    "phase_times",
    "memory_peaks",
    "warnings",
    "clip_rate",
)
_LAYER_STRUCTURE = tuple(name for name in Layer.model_fields if name not in RETIMED_LAYER)
_WORKLOAD_STRUCTURE = tuple(name for name in Workload.model_fields if name not in RETIMED_WORKLOAD)


def structure(workload: Workload) -> Hashable:
    """Return a key that is equal for two workloads if their schedules have the same ops and dependencies."""
    return (
        *(getattr(workload, name) for name in _WORKLOAD_STRUCTURE),
        bool(workload.pipeline_idle_s),
        tuple(tuple(getattr(layer, name) for name in _LAYER_STRUCTURE) for layer in workload.layers),
    )


def times(workload: Workload) -> dict[str, Hashable]:
    """Return those values of a workload that can change without changing the ops of its schedule, as a dict by name."""
    layers = workload.layers
    return {
        "forward_s": tuple(layer.forward_s for layer in layers),
        "backward_s": tuple(layer.backward_s for layer in layers),
        "planned": tuple(tuple(getattr(layer, name) for name in PASSES_UNDER_PLANS) for layer in layers),
        "activation_bytes": tuple(layer.activation_bytes for layer in layers),
        "pipeline_idle_s": workload.pipeline_idle_s,
        "device_base_bytes": workload.device_base_bytes,
    }


@dataclass
class Template:
    """A compiled schedule that can be reused for another workload with the same ops, because its times and memory can
    be replaced.

    Reuse is tested once for each kind of value, such as forward times: the values are replaced in the schedule, and the
    result is compared with a newly built schedule.

    Attributes:
        made_for: Replaceable values of the workload for which the schedule was compiled, as a dict by name (see
            `times`).
        rows: Ops with a replaceable value, as a dict by kind of op, such as ``forward``. Each entry is two arrays: the
            indices of these ops in the schedule's array of ops, and the index of each op's layer.
        beside: Bytes of GPU memory that the schedule holds throughout an iteration, as a dict by kind of data. The
            workload's base memory (`device_base_bytes`) is not included.
        gone_bytes: Bytes of parameters that the schedule keeps in host memory. The workload's base memory includes
            these bytes, so they are subtracted from the base memory.
        checked: Names of the values for which reuse was tested.
        fixed: True if a test of reuse found a difference. The schedule is then never reused.
    """

    compiled: CompiledSchedule
    made_for: dict[str, Hashable]
    rows: dict[str, tuple[Ints, Ints]]
    beside: Mapping[Kind, int]
    gone_bytes: int
    checked: set[str] = field(default_factory=set)
    fixed: bool = False

    @classmethod
    def of(cls, schedule: Schedule, workload: Workload) -> Self:
        """Return a template, a compiled schedule with replaceable times, from the schedule of a workload."""
        result: dict[str, list[tuple[int, int]]] = {name: [] for name in _WRITTEN.values()}
        for op in schedule.ops:
            name = _WRITTEN.get((op.kind, op.lane, op.rate))
            if name is not None:
                result[name].append((op.id, op.layer))
        held = schedule.held["device"]
        gone_bytes = base_by_kind(workload)["parameters"] - held["parameters"]
        base = base_by_kind(workload, gone_bytes)
        pairs = {n: np.array(f, dtype=np.int64).reshape(-1, 2) for n, f in result.items()}
        return cls(
            _without_ops(schedule),
            times(workload),
            {name: (two[:, 0].copy(), two[:, 1].copy()) for name, two in pairs.items()},
            {kind: size - base.get(kind, 0) for kind, size in held.items()},
            gone_bytes,
        )

    @property
    def size_bytes(self) -> int:
        """Return the bytes of host memory that a reusable schedule (template) takes."""
        made = self.compiled
        return made.ops.nbytes + made.after_first.nbytes + made.after.nbytes

    def changed(self, workload: Workload) -> set[str]:
        """Return the names of the replaceable values, such as forward times, that differ between two workloads."""
        return {name for name, value in times(workload).items() if value != self.made_for[name]}

    def retimed(self, workload: Workload) -> CompiledSchedule:
        """Return this template's compiled schedule, with the times and the memory of another workload.

        Both workloads must have the same ops (`structure`). Replacing the times is faster than building another
        schedule.
        """
        forward_s = np.array([layer.forward_s for layer in workload.layers])
        backward_s = np.array([layer.backward_s for layer in workload.layers])
        kept = np.array([layer.activation_bytes for layer in workload.layers], dtype=np.float64)
        ops = self.compiled.ops.copy()
        for name, column, values in (
            ("forward", kernel.WORK, forward_s),
            ("forward", kernel.DEVICE_ALLOC, kept),
            ("backward", kernel.WORK, backward_s),
            ("backward", kernel.DEVICE_FREE, kept),
            ("gradient kernels", kernel.WORK, backward_s * PRODUCTS_WAITED_FOR),
        ):
            rows, layers = self.rows[name]
            ops[rows, column] = values[layers]
        ops[self.rows["idle"][0], kernel.WORK] = workload.pipeline_idle_s
        held = self.compiled.schedule.held
        device = with_base(workload, self.beside, self.gone_bytes)
        schedule = replace(self.compiled.schedule, held={**held, "device": device})
        return replace(self.compiled, ops=ops, schedule=schedule)


_WRITTEN = {
    (OpKind.FORWARD, Lane.COMPUTE, "wall_s"): "forward",
    (OpKind.BACKWARD, Lane.COMPUTE, "wall_s"): "backward",
    (OpKind.GRADIENT_PASS, Lane.DEVICE_UPDATE, "wall_s"): "gradient kernels",
    (OpKind.IDLE, Lane.COMPUTE, "wall_s"): "idle",
}


def _without_ops(schedule: Schedule) -> CompiledSchedule:
    return replace(compile_schedule(schedule), schedule=replace(schedule, ops=()))


def _equal(one: CompiledSchedule, other: CompiledSchedule) -> bool:
    arrays = ("ops", "after_first", "after")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    return same and (one.rate_keys, one.schedule) == (other.rate_keys, other.schedule)


def _whole(value: Any) -> str:
    return value.digest if isinstance(value, Plan) else repr(value)


class Templates:
    """A cache of schedule templates: compiled schedules with values, such as forward times, that can be replaced.

    Each thread needs its own cache. If all templates together are larger than ``most_bytes``, the oldest ones are
    dropped. When a value is replaced for the first time, the schedule is also built without the template, as a test. If
    the two schedules differ, replacing the value is not enough, and the template is not reused.
    """

    def __init__(self, build: Callable[..., Schedule], most_bytes: int = 64 * 2**20) -> None:
        self._build, self._most_bytes, self._bytes = build, most_bytes, 0
        self._held: OrderedDict[Hashable, Template] = OrderedDict()

    def compiled(self, name: str, workload: Workload, options: Mapping[str, Any]) -> CompiledSchedule:
        """Return the compiled schedule of a strategy for a workload, from a cached template if possible.

        The compiled schedule contains arrays, but no op objects.

        Raises:
            ValueError: `build_strategy` refuses the strategy or an option.
        """
        given = tuple(sorted((key, _whole(value)) for key, value in options.items()))
        key = (name, given, structure(workload))
        template = self._held.get(key)
        if template is None:
            schedule = self._build(name, workload, **options)
            template = Template.of(schedule, workload)
            self._keep(key, template)
            return template.compiled
        self._held.move_to_end(key)
        changed = template.changed(workload)
        if not template.fixed and changed <= template.checked:
            return template.retimed(workload)
        built = _without_ops(self._build(name, workload, **options))
        if not template.fixed:
            template.fixed = not _equal(template.retimed(workload), built)
            template.checked |= changed
        return built

    def _keep(self, key: Hashable, template: Template) -> None:
        if template.size_bytes > self._most_bytes // 4:
            return
        self._held[key] = template
        self._bytes += template.size_bytes
        while self._bytes > self._most_bytes:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.size_bytes
