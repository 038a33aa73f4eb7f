"""A monitor that compares the predicted with the measured times of a running plan.

If copies or updates run faster or slower than assumed, the monitor can switch to a better plan.
"""

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.switching import SwitchError
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import Workload

if TYPE_CHECKING:
    from ebbtide.tuner.placements.quick import QuickPlan

logger = logging.getLogger("ebbtide")

PERIOD_STEPS = 10
OTHER_RATE = 0.05  # relative difference below which a measured rate does not cause a new search
WORTH_SWITCHING = 0.95  # fraction of the current plan's predicted time that a new plan must beat

Planned = TypeVar("Planned")
Show = Callable[[Timeline, Plan], None]

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


def attempted(plan: Callable[[], Planned]) -> Planned | None:
    """Return the result of ``plan()``, a function that makes a plan. If the function fails, log the error
    and return None.

    Training must go on even if no plan can be made.
    """
    try:
        return plan()
    except Exception:  # an error while observing must not end training
        logger.warning(
            "ebbtide: planning from observed steps failed. Training goes on with the current plan. Please report this.",
            exc_info=True,
        )
        return None


def switch_together(session: Session, plan: Plan) -> bool:
    """Switch all ranks to their new plans, or none of them, and return whether they have switched. This is a collective
    call.

    If a rank cannot start its plan, for example because its memory is short, all ranks continue with the plans that ran
    before, and the rank logs a warning. Only ``overlap_forward`` is then the new plan's.

    Raises:
        BackgroundError, CheckpointError, DamagedError, LostPlanError: Training on this rank cannot continue.
    """
    back = session.plan.model_copy(update={"overlap_forward": plan.overlap_forward})
    failed = False
    try:
        session.switch(plan)
    except BaseException as error:
        failed = isinstance(error, SwitchError | StorageError | PlanError) and not isinstance(error, DamagedError)
        if not failed:
            session.engine.any_rank(True)  # the other ranks wait for this rank's answer
            raise
        logger.warning("ebbtide: training continues under the plan so far, because the new one cannot start: %s", error)
    if not session.engine.any_rank(failed):
        return True
    if not failed or session.plan.overlap_forward != back.overlap_forward:
        session.switch(back)
    return False


@dataclass
class Watch:
    """A comparison of a running plan's measured times with its predictions, made every ``period_steps`` steps.

    Its method `on_step` is called after every step. Only the training thread uses it.

    Attributes:
        show: Function to call with the measured timeline and the plan.
    """

    session: Session
    machine: Machine
    workload: Workload
    replan: bool
    show: Show
    period_steps: int = PERIOD_STEPS
    steps: int = 0
    _searched: tuple[Machine, Plan] | None = None  # the rates and the plan of the latest search that did not fail

    def on_step(self) -> None:
        if self.session.set_aside is not None:
            return
        self.steps += 1
        if self.steps % self.period_steps == 0:
            self._look()

    def _search(self, machine: Machine) -> "QuickPlan | None":
        from ebbtide.tuner.placements.quick import quick_plan

        plan = self.session.plan
        result = attempted(lambda: quick_plan(self.workload, machine, plan))
        if result is not None:
            self._searched = machine, plan
        return result

    def _known(self) -> Machine:
        """Return the machine with the rates that the latest search for the running plan used."""
        if self._searched is not None and self._searched[1] == self.session.plan:
            return self._searched[0]
        return self.machine

    def _look(self) -> None:
        own = self.session
        # Without the latest step: waiting for its updates would end their overlap with the next forward.
        timeline = own.timeline(wait=False)
        self.show(timeline, own.plan)
        if not self.replan:
            return
        rates = measured_rates(timeline, self.workload, self.machine)
        machine = with_observed(self.machine, rates)
        result = self._search(machine) if _differ(rates, self._known(), machine) else None
        better = result is not None and result.iteration_s < WORTH_SWITCHING * result.current_s
        # All ranks or none, because the others would wait for a rank that moves its state.
        if own.engine.any_rank(better):
            if result is not None:
                logger.info(
                    "new plan after step %d: %.3f s per iteration expected instead of %.3f s",
                    self.steps,
                    result.iteration_s,
                    result.current_s,
                )
            if switch_together(own, own.plan if result is None else result.plan):
                self.machine = machine


def _differ(names: Iterable[str], one: Machine, other: Machine) -> bool:
    """Return whether one of the named rates differs between two machines by more than `OTHER_RATE`."""
    pairs = [(getattr(one, n).median, getattr(other, n).median) for n in names if n in Machine.model_fields]
    return any(abs(b - a) > OTHER_RATE * a for a, b in pairs)


def watch(session: Session, machine: Machine, workload: Workload, *, replan: bool, show: Show) -> Watch:
    """Start to compare a running plan's measured times with its predictions, and return the object that does so.

    Args:
        machine: Profile of the machine, from which the times are predicted.
        replan: If True, switch to a better plan if the measured speeds of copies and updates differ from those in
            ``machine``. No plan is searched for while they differ by at most `OTHER_RATE` from those of the latest
            search.
        show: Function to call with each measured timeline and the plan.

    Raises:
        ValueError: The subgroups of the workload differ from the engine's.
    """
    sizes = session.engine.sizes()
    if sizes != workload.subgroups:
        raise ValueError(
            "workload must have the engine's subgroups, but its "
            f"{len(workload.subgroups)} subgroups are not the engine's {len(sizes)}: "
            "profile again with `tune profile`"
        )
    watcher = Watch(session, machine, workload, replan, show)
    session.watch = watcher
    # First, so that it runs before a checkpoint begins, which it would have to wait for.
    session.after_step.insert(0, watcher.on_step)
    return watcher
