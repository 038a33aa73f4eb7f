"""Watches a running plan: predicted against measured, and a better plan when rates have moved."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from runtime.replan.switch import switch_plan
from simulator.engines.reference import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.schedule import OpKind
from simulator.schedules.ebbtide import build_schedule
from simulator.schedules.strategies import shared_plan
from simulator.timeline import Timeline
from simulator.update.footprint import plan_bytes
from simulator.update.optimizer import ADAM
from simulator.workload import Workload

logger = logging.getLogger("ebbtide")

PERIOD_STEPS = 10
WORTH_SWITCHING = 0.95  # of the current plan's predicted time
SHARES = tuple(i / 10 for i in range(11))

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


def better_plan(
    workload: Workload,
    machine: Machine,
    current: Plan,
    *,
    device_bytes: int | None = None,
    resident_shares: tuple[float, ...] | None = None,
) -> tuple[Plan, float, float]:
    """The best evenly spread plan within a limit of device memory.

    Args:
        device_bytes: what the plan may take of the device; None: what ``current`` takes.
        resident_shares: shares of resident subgroups to try; None: the current plan's.

    Returns:
        (plan, its predicted iteration_s, the current plan's). ``current`` itself if none is
        better. The full search is the tuner's; this one is small enough for a training loop.
    """
    now_s = _predict(workload, machine, current)
    best, best_s = current, now_s
    limit = _device_bytes(workload, current) if device_bytes is None else device_bytes
    shares = resident_shares or (current.count("resident") / len(workload.subgroups),)
    for residents, visits in product(shares, SHARES):
        if residents + visits > 1:
            continue
        slots = max(current.staging_slots, 2) if visits else 0
        base = current.model_copy(
            update={"staging_slots": slots, "prefetch": min(current.prefetch, slots)}
        )
        plan = shared_plan(workload, visits, residents, base)
        if _device_bytes(workload, plan) <= limit:
            seconds = _predict(workload, machine, plan)
            if seconds < best_s:
                best, best_s = plan, seconds
    return best, best_s, now_s


def _predict(workload: Workload, machine: Machine, plan: Plan) -> float:
    return simulate(build_schedule(workload, plan), machine).iteration_s


def _device_bytes(workload: Workload, plan: Plan) -> int:
    """Device memory that the plan takes: residents, slots, gradients that stay."""
    return plan_bytes(
        workload.subgroups, plan.placements, plan.staging_slots, workload.optimizer_state,
        workload.grad_bytes_per_param, workload.wire_bytes,
    ).device_bytes  # fmt: skip


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
        optimizer = self.engine.optimizer
        own = optimizer._ebbtide
        timeline = optimizer.timeline()
        rates = measured_rates(timeline, self.workload.subgroups)
        machine = self.machine.with_rates(**rates) if rates else self.machine
        self._log(timeline, own.plan)
        if not self.replan:
            return
        plan, best_s, now_s = better_plan(self.workload, machine, own.plan)
        # All ranks or none: the others would only wait for a rank that moves its state.
        if anyone(self.engine, best_s < WORTH_SWITCHING * now_s):
            logger.info(
                "switching plans after step %d: %.3f s expected instead of %.3f s",
                self.steps, best_s, now_s,
            )  # fmt: skip
            switch_plan(self.engine, plan)
            self.machine = machine
            self.switches.append((self.steps, plan))

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
    import deepspeed.comm as dist

    flag = torch.tensor([wish], dtype=torch.uint8, device=engine.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


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
    own.on_step.append(watcher.on_step)
    return watcher
