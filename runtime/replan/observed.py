"""The workload and the machine's rates for ``plan="auto"``, as measured in the first training steps."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ebbtide.runtime.devices.passes import Pass
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.simulator.engines.compiled import CompiledSchedule, compile_schedule, simulate_fast, timeline
from ebbtide.simulator.estimates.compute import reissued_s
from ebbtide.simulator.estimates.rank import ISSUED_BACKWARD, MODULE_ISSUE_S, Thread, under_plans
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Plan
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import WIRE_BYTES, Layer, Workload

logger = logging.getLogger("ebbtide")

_RATED = (
    OpKind.UPDATE_HOST,
    OpKind.UPDATE_HOST_EARLY,
    OpKind.UPDATE_DEVICE,
    OpKind.UPDATE_DEVICE_EARLY,
    OpKind.STATE_H2D,
    OpKind.STATE_D2H,
)
_EARLY_KINDS = (OpKind.UPDATE_HOST_EARLY, OpKind.UPDATE_DEVICE_EARLY)


def measured_rates(timeline: Timeline, workload: Workload, machine: Machine) -> dict[str, float]:
    """Return the median rate of each kind of operation in a measured timeline, as a dict by the field name in
    `Machine`.

    Concurrent operations are slower than single ones. The rates are those under the present plan, whose operations
    share memory and links. A similar plan will share them in the same way.

    A CPU update that starts before the gradient norm is known writes to other memory than it reads, which is slower.
    Its rate is divided by ``machine.out_of_place`` to get the rate of an ordinary CPU update. An update of state on a
    drive needs no such correction, because it writes to the host buffer that it reads.
    """
    amounts = Bytes.of(workload)
    recipes = {early: [way.recipe for way in ways() if way.early is early] for early in (False, True)}
    per_param = {
        (updated_early, step.kind): (step.rate, step.work(amounts))
        for updated_early, some in recipes.items()
        for recipe in some
        for step in recipe.steps
        if step.kind in _RATED
    }
    early_updates = {(s.subgroup, s.iteration) for s in timeline.spans if s.kind in _EARLY_KINDS}
    in_place = {s.subgroup for s in timeline.spans if s.kind == OpKind.STATE_WRITE}
    samples: dict[str, list[float]] = defaultdict(list)
    for span in timeline.spans:
        key = ((span.subgroup, span.iteration) in early_updates, span.kind)
        if key in per_param and span.end_s > span.start_s:
            name, work = per_param[key]
            work *= workload.subgroups[span.subgroup]
            if span.kind == OpKind.UPDATE_HOST_EARLY:
                name = "host_adam_params_per_s"
                work /= 1.0 if span.subgroup in in_place else machine.out_of_place
            samples[name].append(work / (span.end_s - span.start_s))
    return {name: statistics.median(values) for name, values in samples.items()}


def with_observed(machine: Machine, rates: Mapping[str, float]) -> Machine:
    """Return a copy of a machine profile with the measured speeds, such as bandwidths, in place of its own.

    A measured speed that no machine can have is logged and dropped, and the profile keeps its own. Such speeds come
    from steps of a tiny model, or of a process that the system did not schedule.
    """
    for name, value in rates.items():
        try:
            machine = machine.with_rates(**{name: value})
        except ValueError as error:
            logger.info("ebbtide: a machine rate measured in training is implausible, the old rate is kept: %s", error)
    return machine


WATCHED_STEPS = 4  # the first step is left out of the results, because it compiles and warms up
SAME_RATE = 0.02  # relative difference between a simulated and a measured rate that is accepted


def observed_workload(
    engine: TrainingEngine,
    passes: Sequence[Pass],
    step_issue_s: float = 0.0,
    *,
    location: ParameterLocation = "device",
    ranks: int = 1,
) -> Workload:
    """Return a workload with the measured times of the first training steps, from which a plan can be made.

    Its layers are the model's blocks (such as transformer layers) and other modules, as in a profile. Times of forward
    and backward are medians over steps and exclude waits of the GPU for copies. The times at which gradients are
    computed tell how long backward takes in each layer. Forward is divided among layers in the same proportions.

    The steps ran under a plan, so the times are those of the workload's `planned` or `fetched`. Its other times follow
    from the CPU time of the training thread.

    Args:
        passes: Measured forward and backward of the first steps. The first step, which compiles and warms up, does not
            count.
        step_issue_s: CPU seconds that ``step()`` takes until it has started all updates.
        location: Memory that held the parameters.
        ranks: Number of ranks that train together.
    """
    sizes, micro_batches = engine.sizes(), engine.micro_batches()
    stage, gathers, groups = engine.zero_stage(), engine.gathers(), _groups(engine)
    forward, backward, gather = (_after_the_first(passes, kind) for kind in _WATCHED)
    shares = _shares(groups, gradient_s(backward))
    forward_s, backward_s, gather_s = (_median(p.computed_s for p in some) for some in (forward, backward, gather))
    threads = {"": Thread(1, 1, 1), **under_plans(stage, ranks)}
    ran = threads["planned_" if location == "device" else "fetched_"]
    parameters = max(1, sum(len(group.held) for group in groups))
    issued = _median(p.issued_s for p in forward), _median(p.issued_s for p in backward)
    issued_s, issued_back_s = (
        min(some_s, parameters * most_s) for some_s, most_s in zip(issued, _MOST_ISSUED_S, strict=True)
    )
    module_issue_s = issued_s / ran.forward / parameters
    if location == "host":  # the simulator adds this time to each wait for the parameters of a layer
        forward_s = max(0.0, forward_s - module_issue_s * _waited(forward, groups))
        backward_s = max(0.0, backward_s - module_issue_s * _waited(backward, groups))
    again_s = min(issued_s, issued_back_s) if engine.recomputes() else 0.0
    seconds, steps = dict[str, float](), dict[str, float]()
    for kind, thread in threads.items():
        forward_times, backward_times = thread.forward / ran.forward, thread.backward / ran.backward
        then_s = backward_times * (issued_back_s - again_s) + forward_times * again_s
        seconds[f"{kind}forward_s"] = reissued_s(forward_s, issued_s, forward_times * issued_s)
        seconds[f"{kind}backward_s"] = reissued_s(backward_s, issued_back_s, then_s)
        steps[f"{kind}step_issue_s"] = step_issue_s * thread.step / ran.step
    return Workload(
        name="observed",
        layers=tuple(
            Layer(
                name=group.unit,
                params=group.elements,
                **{name: s * share for name, s in seconds.items()},
                **({} if gathers is None else gathers.of_layer(group.held)),
            )
            for group, share in zip(groups, shares, strict=True)
        ),
        live_params=None if gathers is None else gathers.live,
        state_stays=engine.shares_state,
        subgroups=sizes,
        # DeepSpeed's bucket holds whole parameters. Below ZeRO-3, subgroups divide them.
        parameters=(_parameters(engine),) if stage == 3 else (),
        wire_dtype=engine.wire_dtype(),
        grad_bytes_per_param=engine.gradient_bytes(),
        gradient_accumulation_steps=micro_batches,
        reduce_bucket_params=engine.bucket_params(),
        clip=engine.clips(),
        optimizer=engine.update_rule().name,
        zero_stage=stage,
        step_gather_s=gather_s,
        module_issue_s=module_issue_s,
        **steps,
        # The base memory with all parameters on the GPU. The footprint of a plan subtracts those that are in host
        # memory.
        device_base_bytes=sum(sizes) * WIRE_BYTES[engine.wire_dtype()],
        provenance=f"{WATCHED_STEPS} watched steps",
    )


_WATCHED = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.PARAMETER_GATHER)
# CPU time of the training thread for one parameter in forward and in backward, at most. If the thread is ahead of the
# GPU by as many kernels as the GPU can queue, it waits for the GPU, and this wait is CPU time too.
_MOST_ISSUED_S = 2 * MODULE_ISSUE_S, 2 * (1 + ISSUED_BACKWARD) * MODULE_ISSUE_S


def _median(seconds: Iterable[float]) -> float:
    return statistics.median(list(seconds) or [0.0])


def _waited(passes: Sequence[Pass], groups: Sequence["_Group"]) -> float:
    return min(len(groups), _median(len(p.waits) for p in passes))


def _after_the_first(passes: Sequence[Pass], kind: OpKind) -> list[Pass]:
    some = sorted((p for p in passes if p.kind == kind), key=lambda p: p.iteration)
    return some[1:]


def gradient_s(backward: Sequence[Pass]) -> dict[tuple[int, int], float]:
    """Return the seconds that the GPU takes to compute each gradient, as medians over backward passes.

    They are the seconds from the end of the previous gradient to the end of this gradient, without waits for copies.
    The keys of the returned dict are pairs (subgroup, first element in the subgroup), which tell where a gradient is
    stored. If a gradient is stored in several places, its seconds are divided in proportion to their elements.
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in backward:
        spent: dict[tuple[int, int], float] = defaultdict(float)
        begun_s, made = one.start_s, sorted(one.made)
        for number, (made_s, places) in enumerate(made):
            end_s = made_s if number + 1 < len(made) else max(made_s, one.end_s)
            elements = sum(place.elements for place in places)
            for place in places:
                computed_s = one.computed_between_s(begun_s, end_s)
                spent[place.subgroup, place.offset] += computed_s * place.elements / max(1, elements)
            begun_s = end_s
        for key, seconds in spent.items():
            found[key].append(seconds)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


@dataclass
class _Group:
    """Parameters of one part of the model, such as a block, that lie next to each other in the subgroups.

    Attributes:
        begin: Position of the group's first element, counted over all subgroups.
        elements: Number of elements of the parameters and of the padding after them.
        places: For each parameter, the subgroup that it lies in and the position of its first element there.
        held: For each parameter, its key in `TrainingEngine.slices` and its number of elements.
    """

    unit: str
    begin: int
    elements: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[Hashable, int]] = field(default_factory=list)


def _groups(engine: TrainingEngine) -> list[_Group]:
    sizes, slices, units = engine.sizes(), engine.slices(), engine.units()
    begins = [0, *accumulate(sizes)]
    found = [_Group("", 0)]
    for key, part in sorted(slices.items(), key=lambda pair: (pair[1].subgroup, pair[1].offset)):
        place = part.subgroup, part.offset
        unit = units.get(place, "")
        if found[-1].unit != unit and found[-1].places:
            found.append(_Group(unit, begins[part.subgroup] + part.offset))
        found[-1].unit = unit
        found[-1].places.append(place)
        found[-1].held.append((key, part.elements))
    for group, end in zip(found, [*(after.begin for after in found[1:]), begins[-1]], strict=True):
        group.elements = end - group.begin  # padding counts with the parameters before it
    return found


def _parameters(engine: TrainingEngine) -> tuple[int, ...]:
    first = [0, *accumulate(engine.sizes())]
    begins = sorted(first[part.subgroup] + part.offset for part in engine.slices().values())
    return tuple(end - begin for begin, end in pairwise([0, *begins[1:], first[-1]]))


def _shares(groups: Sequence[_Group], seconds: Mapping[tuple[int, int], float]) -> list[float]:
    spent = [sum(seconds.get(place, 0.0) for place in group.places) for group in groups]
    if not sum(spent):  # no gradient was observed separately
        spent = [float(group.elements) for group in groups]
    return [part / sum(spent) for part in spent]


def as_observed(machine: Machine, rates: Mapping[str, float], workload: Workload, plan: Plan) -> Machine:
    """Correct a machine's speeds of copies and updates, so that a simulation of the first training steps gives the
    speeds that were measured in them.

    The speeds of a `Machine` are those of operations that run alone. The measured operations shared host memory with
    other operations and other ranks, and were slower. If no corrected speed gives the measured one, the measured speed
    itself is used.
    """
    schedule = compile_schedule(build_schedule(workload, plan))
    for name, rate in rates.items():
        shown = _shown(machine, workload, schedule).get(name)
        if shown is None or not shown > 0:
            machine = with_observed(machine, {name: rate})
            continue
        scaled = with_observed(machine, {name: getattr(machine, name).median * rate / shown})
        again = _shown(scaled, workload, schedule)[name]
        near = abs(again / rate - 1) <= SAME_RATE
        machine = scaled if near else with_observed(machine, {name: rate})
    return machine


def _shown(machine: Machine, workload: Workload, schedule: CompiledSchedule) -> dict[str, float]:
    return measured_rates(timeline(schedule, simulate_fast(schedule, machine)), workload, machine)
