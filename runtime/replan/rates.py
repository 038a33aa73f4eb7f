"""The speeds of a machine's copies and updates, as measured while a plan runs."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import Workload

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
