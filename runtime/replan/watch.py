"""Watches a running plan: predicted against measured, and a better plan when rates have moved."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from runtime.replan.switch import switch_plan
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.schedule import OpKind
from simulator.timeline import Timeline
from simulator.update.optimizer import ADAM
from simulator.workload import Workload

logger = logging.getLogger("ebbtide")

PERIOD_STEPS = 10
WORTH_SWITCHING = 0.95  # of the current plan's predicted time

_RATES = {
    OpKind.UPDATE_HOST: ("host_adam_params_per_s", 1),
    OpKind.UPDATE_DEVICE: ("device_adam_params_per_s", 1),
    OpKind.STATE_H2D: ("h2d_bytes_per_s", ADAM.visit_bytes),
    OpKind.STATE_D2H: ("d2h_bytes_per_s", ADAM.visit_bytes),
}


def measured_rates(timeline: Timeline, subgroups: tuple[int, ...]) -> dict[str, float]:
    """Median rate of each kind of op in a measured timeline, by the machine's field name.

    Ops that ran beside others are slower than alone: the rates found are those under the present
    plan's contention, which is what a neighbouring plan will meet too.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in _RATES and span.end_s > span.start_s:
            name, per_param = _RATES[span.kind]
            samples[name].append(subgroups[span.subgroup] * per_param / (span.end_s - span.start_s))
    return {name: statistics.median(values) for name, values in samples.items()}


@dataclass
class Watch:
    """Called after every step; looks closer every ``period_steps``. Training thread only."""

    engine: Any
    machine: Machine
    workload: Workload
    replan: bool
    period_steps: int = PERIOD_STEPS
    steps: int = 0
    switches: list[tuple[int, Plan]] = field(default_factory=list)

    def on_step(self) -> None:
        self.steps += 1
        if self.steps % self.period_steps == 0:
            self._look()

    def _look(self) -> None:
        own = self.engine.optimizer._ebbtide
        # Without the step just launched: waiting for its updates would take its overlap away.
        timeline = own.timeline(wait=False)
        rates = measured_rates(timeline, self.workload.subgroups)
        machine = self.machine.with_rates(**rates) if rates else self.machine
        self._log(timeline, own.plan)
        if not self.replan:
            return
        from tuner.placements.quick import quick_plan

        result = quick_plan(self.workload, machine, own.plan)
        # All ranks or none: the others would only wait for a rank that moves its state.
        if anyone(self.engine, result.iteration_s < WORTH_SWITCHING * result.current_s):
            logger.info(
                "switching plans after step %d: %.3f s expected instead of %.3f s",
                self.steps, result.iteration_s, result.current_s,
            )  # fmt: skip
            switch_plan(self.engine, result.plan)
            self.machine = machine
            self.switches.append((self.steps, result.plan))

    def _log(self, timeline: Timeline, plan: Plan) -> None:
        monitor = getattr(self.engine, "monitor", None)
        if monitor is None or not monitor.enabled:
            return
        sample = self.engine.global_samples
        events = [("Train/ebbtide/iteration_s", timeline.iteration_s, sample)]
        if plan.prediction is not None:
            events.append(
                ("Train/ebbtide/predicted_iteration_s", plan.prediction.iteration_s, sample)
            )
        monitor.write_events(events)


def anyone(engine: Any, wish: bool) -> bool:
    """True on every rank if ``wish`` is true on one; a collective call."""
    return bool(engine.optimizer.any_rank(wish))


def watch(engine: Any, machine: Machine, workload: Workload, *, replan: bool) -> Watch:
    """Starts watching an attached engine.

    Raises:
        ValueError: the workload has other subgroups than the engine.
    """
    own = engine.optimizer._ebbtide
    sizes = tuple(state.elements for state in own.executor.states)
    if sizes != workload.subgroups:
        raise ValueError(
            "the workload must be the engine's own, but it has "
            f"{len(workload.subgroups)} subgroups and the engine {len(sizes)} of other sizes: "
            "profile again with `tune profile`"
        )
    watcher = Watch(engine, machine, workload, replan)
    own.watch = watcher
    own.after_step.insert(
        0, watcher.on_step
    )  # before a checkpoint begins, which would be waited for
    return watcher
