"""The prediction of ``"plan": "auto"``, compared with a simulation that knows the whole workload.

With ``auto``, ebbtide's runtime watches some steps of training and then makes a plan. Here the watched steps are
simulated, because there is no GPU. The runtime's own functions make the plan from what they would have measured: when
forward, backward and each gradient end, when the GPU waits for copies, the rates of copies and updates, and the free
memory. The time that they expect of this plan is compared with a simulation of the plan for the whole workload.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ebbtide.runtime.devices.passes import Pass, Place, disjoint
from ebbtide.runtime.execution.gradients import ParameterSlice
from ebbtide.runtime.replan.auto import DEVICE_MEMORY_MARGIN, better_plan, host_plan
from ebbtide.runtime.replan.observed import as_observed, measured_rates, observed_workload
from ebbtide.runtime.zero.storing import spaced
from ebbtide.runtime.zero.subgroup_size import DEEPSPEEDS_SUBGROUP, piece_elements
from ebbtide.simulator import Lane, Machine, OpKind, Plan, Schedule, Workload, build_schedule
from ebbtide.simulator.analysis.many_plans import expected
from ebbtide.simulator.engines.compiled import SimResult, compile_schedule, simulate_fast, timeline
from ebbtide.simulator.estimates.estimate import rank_of
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.simulator.plan import ParameterLocation, Way
from ebbtide.simulator.schedules.buckets import bucket_of
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.steps import HOST_SLOTS

WAITED_FOR = (OpKind.GRADIENT_D2H, OpKind.PARAMETER_FETCH)
PASSES = (OpKind.FORWARD, OpKind.BACKWARD)


def automatic(job: Workload, machine: Machine, *, stores: bool = False) -> tuple[float, float]:
    """Predict the iteration time of a job under the plan that ``"plan": "auto"`` makes for it, in two ways.

    Args:
        stores: True if DeepSpeed's config offloads optimizer state to a drive.

    Returns:
        Two times in seconds, for the same plan. The first is the prediction of ebbtide's runtime, from observations
        of some training steps. The second comes from a simulation of the full workload.
    """
    work = _cut(job, whole=stores)
    first = host_plan(work.subgroup_size or max(work.subgroups), len(work.subgroups), "device")
    room = _host_room_bytes(work, machine)
    if stores:
        first = _storing(work, first, room)
    schedule = build_schedule(work, first)
    watched = simulate_fast(schedule, machine)
    seen = simulated_workload(work, machine, schedule, watched)
    rates = simulated_rates(schedule, watched, seen, machine)
    known = as_observed(machine, rates, seen, first)
    free_device = machine.device_memory_bytes - machine.device_reserved_bytes - watched.device_peak_bytes
    free_device -= int(DEVICE_MEMORY_MARGIN * machine.device_memory_bytes)
    free_host = room - footprint(work, first)["host"]
    current = first.model_copy(update={"overlap_forward": work.overlaps_forward})
    found = better_plan(seen, known, current, max(0, free_device), max(0, free_host))

    def run(plan: Plan) -> SimResult:
        return simulate_fast(build_schedule(work, plan), machine)

    return found.iteration_s, expected(work, machine, found.plan, run).iteration_s


def simulated_workload(
    work: Workload, machine: Machine, schedule: Schedule, watched: SimResult, location: ParameterLocation = "device"
) -> Workload:
    """Return the workload that ebbtide's runtime would measure if the simulated training steps ``watched`` were real
    steps.

    Args:
        location: Memory that holds the parameters in these steps.
    """
    norms = [op.work for op in schedule.ops if op.kind == OpKind.NORM]
    seen = observed_workload(
        _Engine(work),  # type: ignore[arg-type]
        list(_passes(work, schedule, watched, _issued_s(work, machine, location))),
        norms[0],
        location=location,
        ranks=work.ranks_per_node * work.nodes,
    )
    return seen.model_copy(
        update={"ranks_per_node": work.ranks_per_node, "nodes": work.nodes, "clip_rate": work.expected_clip_rate}
    )


def simulated_rates(schedule: Schedule, watched: SimResult, seen: Workload, machine: Machine) -> dict[str, float]:
    """Return a dict of the rates that ebbtide's runtime would measure in the simulated training steps ``watched``."""
    return measured_rates(timeline(compile_schedule(schedule), watched), seen, machine)


def _cut(job: Workload, *, whole: bool) -> Workload:
    own = job.recut(job.deepspeed_subgroup_size or job.subgroup_size or DEEPSPEEDS_SUBGROUP)
    if whole:
        return own
    size = piece_elements(job.params)
    return own.in_pieces(size) if job.zero_stage == 3 else own.recut(min(size, own.subgroup_size))


def _host_room_bytes(work: Workload, machine: Machine) -> int:
    return int(machine.host_memory_bytes * (1 - UNKNOWN_MARGIN)) // work.ranks_per_node


def _storing(work: Workload, plan: Plan, room_bytes: int) -> Plan:
    count = len(work.subgroups)
    for stored in range(count + 1):
        there = spaced(count, stored)
        ways = [way._replace(placement="stored" if i in there else "host") for i, way in enumerate(plan.ways)]
        tried = plan.with_ways([Way(*way) for way in ways], host_slots=HOST_SLOTS)
        tried = tried.model_copy(update={"storage_dir": "drive" if stored else None})
        if footprint(work, tried)["host"] <= room_bytes:
            break
    return tried


@dataclass(frozen=True)
class _Parameter:
    """A range of elements that belong to one parameter and to one layer of a workload.

    A parameter that spans several layers is divided into one range per layer.

    Attributes:
        begin, end: First element of the range, and the first element after it. Elements are numbered through all layers
            of this rank.
    """

    layer: int
    begin: int
    end: int


def _parameters(work: Workload) -> list[_Parameter]:
    ends = list(accumulate(n for group in work.parameters for n in group)) or [work.params]
    layers = [0, *accumulate(layer.params for layer in work.layers)]
    cuts = sorted({0, *ends, *layers})
    found, layer = [], 0
    for begin, end in pairwise(cuts):
        while layers[layer + 1] <= begin:
            layer += 1
        found.append(_Parameter(layer, begin, end))
    return found


def _places(work: Workload, parameter: _Parameter) -> tuple[Place, ...]:
    found, first = [], 0
    for subgroup, size in enumerate(work.subgroups):
        begin, end = max(parameter.begin, first), min(parameter.end, first + size)
        if end > begin:
            found.append(Place(subgroup, begin - first, end - begin))
        first += size
    return tuple(found)


def _issued_s(work: Workload, machine: Machine, location: ParameterLocation) -> dict[OpKind, float]:
    """Return the CPU time of the training thread in forward and backward of one micro-batch, under a plan."""
    if work.job is None or not work.module_issue_s:
        return dict.fromkeys(PASSES, 0.0)
    rank = rank_of(work.job, machine)
    thread = rank.under_plans["planned_" if location == "device" else "fetched_"]
    forward_s = [thread.forward * rank.issue_s(block) for block in rank.stage_blocks]
    backward_s = [thread.backward * rank.issue_backward_s(block) for block in rank.stage_blocks]
    again_s = [rank.again(block) * s for block, s in zip(rank.stage_blocks, forward_s, strict=True)]
    return {OpKind.FORWARD: sum(forward_s), OpKind.BACKWARD: sum(backward_s) + sum(again_s)}


def _passes(work: Workload, schedule: Schedule, watched: SimResult, issued_s: Mapping[OpKind, float]) -> Iterator[Pass]:
    # The gradients of the layer's parameters are complete at different times. These times are interpolated: computing a
    # gradient is assumed to take time in proportion to its number of elements.
    parameters: dict[int, list[_Parameter]] = {}
    for parameter in reversed(_parameters(work)):
        parameters.setdefault(parameter.layer, []).append(parameter)
    for iteration in range(schedule.iterations):
        for kind in PASSES:
            ops = [op for op in schedule.ops if op.kind == kind and op.iteration == iteration][: len(work.layers)]
            start_s, end_s = float(watched.start_s[ops[0].id]), float(watched.end_s[ops[-1].id])
            waits, made = [], []
            for before, op in zip([None, *ops], ops, strict=False):
                idle_s = start_s if before is None else float(watched.end_s[before.id])
                waits += [(idle_s, float(watched.end_s[copy])) for copy in _awaited(schedule, op.id)]
                done, own = 0, parameters.get(op.layer, []) if kind == OpKind.BACKWARD else []
                for parameter in own:
                    done += parameter.end - parameter.begin
                    left = 1 - done / work.layers[op.layer].params
                    at_s = float(watched.end_s[op.id]) - left * op.work
                    made.append((at_s, _places(work, parameter)))
            yield Pass(kind, iteration, start_s, end_s, disjoint(waits), tuple(made), issued_s[kind])
        gathers: dict[Lane, float] = {}
        for op in schedule.ops:
            if op.kind == OpKind.PARAMETER_GATHER and op.iteration == iteration and op.layer < 0:
                took_s = float(watched.end_s[op.id] - watched.start_s[op.id])
                gathers[op.lane] = gathers.get(op.lane, 0.0) + took_s
        if gathers:  # a watched step exchanges parameters after all updates
            yield Pass(OpKind.PARAMETER_GATHER, iteration, 0.0, max(gathers.values()))


def _awaited(schedule: Schedule, op: int) -> list[int]:
    # Either the op itself waits for a copy, or the host waits for the copy before it launches the op.
    found = []
    for before in schedule.ops[op].after:
        if schedule.ops[before].kind == OpKind.ISSUE:
            found += _awaited(schedule, before)
        elif schedule.ops[before].kind in WAITED_FOR:
            found.append(before)
    return found


@dataclass(frozen=True)
class _LayerGathers:
    """The all-gathers of parameters that follow from the layers of a simulated workload.

    The class has the interface of `Gathered`, which describes the all-gathers of a real engine.
    """

    work: Workload

    @property
    def live(self) -> int | None:
        return self.work.live_params

    @cached_property
    def _keys(self) -> list[tuple["_Parameter", Place]]:
        return _keys(self.work)

    def of_layer(self, pieces: Iterable[tuple[int, int]]) -> dict[str, int]:
        again = persistent = 0.0
        for key, elements in pieces:
            layer = self.work.layers[self._keys[key][0].layer]
            regathered = layer.params if layer.regathered_params is None else layer.regathered_params
            again += elements * regathered / layer.params
            persistent += elements if elements <= layer.persistent_params else 0
        return {"persistent_params": round(persistent), "regathered_params": round(again)}


def _keys(work: Workload) -> list[tuple[_Parameter, Place]]:
    return [(parameter, place) for parameter in _parameters(work) for place in _places(work, parameter)]


@dataclass(frozen=True)
class _Rule:
    name: str


@dataclass(frozen=True)
class _Engine:
    """A stand-in of `TrainingEngine` for a simulated workload, with only those attributes and methods that
    `observed_workload` uses.
    """

    work: Workload

    @property
    def shares_state(self) -> bool:
        return self.work.state_stays

    def sizes(self) -> tuple[int, ...]:
        return self.work.subgroups

    def bucket_params(self) -> int:
        return bucket_of(self.work)

    def micro_batches(self) -> int:
        return self.work.gradient_accumulation_steps

    def slices(self) -> Mapping[int, ParameterSlice]:
        return {key: ParameterSlice(*place, real=True) for key, (_, place) in enumerate(_keys(self.work))}

    def units(self) -> Mapping[tuple[int, int], str]:
        return {(place.subgroup, place.offset): str(parameter.layer) for parameter, place in _keys(self.work)}

    def gathers(self) -> "_LayerGathers | None":
        return _LayerGathers(self.work) if self.work.zero_stage == 3 else None

    def wire_dtype(self) -> str:
        return self.work.wire_dtype

    def gradient_bytes(self) -> int:
        return self.work.grad_bytes_per_param

    def clips(self) -> bool:
        return self.work.clip

    def recomputes(self) -> bool:
        return bool(self.work.recompute)

    def update_rule(self) -> _Rule:
        return _Rule(self.work.optimizer)

    def zero_stage(self) -> int:
        return self.work.zero_stage
