"""The option ``plan="auto"``: measure the first steps under a simple plan, then make a better plan and switch to it.

Under the first plan the CPU updates every subgroup. If host memory is too small for all state and a drive
is configured, the rest of the state is on the drive. Results are already bit-identical to stock DeepSpeed,
and the steps give the times of forward and backward.
"""

import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.allocated import SwitchError
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.stored import free_host_bytes
from ebbtide.runtime.hardware.launcher import rank, world_size
from ebbtide.runtime.replan.hint import memory_of, tell_faster
from ebbtide.runtime.replan.measuring import by_the_first, gathered, measured_machine, nodes_and_ranks
from ebbtide.runtime.replan.observed import WATCHED_STEPS, as_observed, measured_rates, observed_workload, with_observed
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Plan, PlanError, Way
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import PASSES, PASSES_UNDER_PLANS, STEPS, Workload

if TYPE_CHECKING:
    from ebbtide.tuner.placements.planning import QuickPlan

logger = logging.getLogger("ebbtide")

EFFORT = 0.2  # share of a full search's evaluations, because training waits for the search once
DEVICE_MEMORY_MARGIN = 0.1  # share of GPU memory that is left for activations that grow later

Planned = TypeVar("Planned")


def host_plan(
    subgroup_size: int, count: int, location: ParameterLocation = "device", *, overlap_forward: bool = False
) -> Plan:
    """Return a plan that updates every subgroup on the CPU, for the first training steps, which are measured.

    Without ``overlap_forward``, no update lengthens the measured time of the next forward. Set it for a plan that stays
    in use after the measurement.
    """
    return Plan(
        subgroup_size=subgroup_size,
        ways=(Way("host", location),) * count,
        staging_slots=0,
        overlap_forward=overlap_forward,
    )


def plan_later(session: Session, machine: Machine | None, describe: Callable[[], Mapping[str, Any]]) -> None:
    """Arrange that the first `WATCHED_STEPS` training steps are measured, and that a better plan is then made and used.

    Args:
        machine: The machine's rates. If None, they are measured once per node, or read from the profiler's cache.
        describe: Called on the first rank after the measured steps. See `ebbtide.runtime.zero.described`.
    """
    machine = machine if machine is not None else measured_machine(_folders(session.plan))
    logger.info("measuring the first %d steps, with all updates on the CPU. A plan is made from them", WATCHED_STEPS)
    if not session.engine.update_rule().own_step:  # the next plan may update on the GPU
        session.executor.prepare_device()
    session.recorder.watch()
    # First, so that it runs before a checkpoint begins.
    session.after_step.insert(0, _Automatic(session, machine, describe).on_step)


@dataclass
class _Automatic:
    """A counter of the first training steps, which are measured for ``plan="auto"``. After the last of
    them, its method `on_step` makes a new plan from the measured times and switches to it.
    """

    session: Session
    machine: Machine
    describe: Callable[[], Mapping[str, Any]]
    steps: int = 0

    def on_step(self) -> None:
        if self.session.set_aside is not None:
            self.session.recorder.forget_step()
            return
        self.steps += 1
        if self.steps != WATCHED_STEPS:
            return
        own = self.session
        timeline = own.timeline()
        current, machine = own.plan.model_copy(update={"overlap_forward": own.overlaps}), self.machine
        seen = attempted(lambda: _seen(own))
        own.recorder.unwatch()
        if None in gathered(seen) or seen is None:  # if one rank failed to observe, no rank plans
            switch_together(own, current)
            return
        workload = _agreed(seen, own)
        rates = _medians(gathered(measured_rates(timeline, workload, self.machine)))
        if current.stores:
            machine = machine.storing_in(_folders(current))
        machine = attempted(lambda: as_observed(machine, rates, workload, own.plan)) or with_observed(machine, rates)
        device_bytes, host_bytes = map(
            min, zip(*gathered((_free_device_bytes(own.device), free_host_bytes())), strict=True)
        )
        logger.info("making a plan for this model")
        room = attempted(lambda: memory_of(workload, own, device_bytes, host_bytes))
        result = attempted(
            lambda: by_the_first(lambda: better_plan(workload, machine, current, device_bytes, host_bytes))
        )
        if result is not None and result.iteration_s < result.current_s:
            logger.info(
                "training switches to a faster plan: %.3f s per iteration expected, and %.3f s with the plan so far",
                result.iteration_s,
                result.current_s,
            )
            current = result.plan
        elif result is not None:
            logger.info("training keeps its plan: %.3f s per iteration expected", result.current_s)
        switched = switch_together(own, current)
        if result is not None:
            own.expected_s = result.iteration_s if switched else result.current_s
            if rank() == 0 and room is not None:
                ran = workload.planned
                seconds = {"computed_s": ran.forward_s + ran.backward_s, "expected_s": own.expected_s}
                attempted(lambda: tell_faster(self.describe, {**room, **seconds, "machine": machine}))


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


def better_plan(workload: Workload, machine: Machine, current: Plan, free_device: int, free_host: int) -> "QuickPlan":
    from ebbtide.tuner.placements.planning import quicker_plan

    held = footprint(workload, current)
    return quicker_plan(
        workload,
        machine,
        current,
        device_bytes=held["device"] + free_device,
        host_bytes=held["host"] + free_host,
        effort=EFFORT,
    )


def _seen(session: Session) -> Workload:
    return observed_workload(
        session.engine,
        session.recorder.passes(),
        session.recorder.step_issue_s,
        location="host" if "host" in session.plan.parameter_locations else "device",
        ranks=world_size(),
    )


def _agreed(mine: Workload, session: Session) -> Workload:
    nodes, ranks = nodes_and_ranks()
    own = _seconds(mine)
    agreed = _medians(gathered(own))
    layers = tuple(
        layer.model_copy(
            update={name: getattr(layer, name) * agreed[name] / own[name] for name in _PASSES if own.get(name)}
        )
        for layer in mine.layers
    )
    fields: dict[str, Any] = {n: seconds for n, seconds in agreed.items() if n in own and n not in _PASSES}
    fields |= {"ranks_per_node": ranks, "nodes": nodes, "layers": layers}
    return mine.model_copy(update={**fields, "clip_rate": session.pausing.clip_rate if mine.clip else 0.0})


_PASSES = (*PASSES, *PASSES_UNDER_PLANS)


def _seconds(workload: Workload) -> dict[str, float]:
    times = {name: getattr(workload, name) for name in ("step_gather_s", "module_issue_s", *STEPS)}
    times |= {name: sum(getattr(layer, name) or 0.0 for layer in workload.layers) for name in _PASSES}
    return {name: seconds for name, seconds in times.items() if seconds is not None}


def _medians(rates: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rates if name in r) for name in set().union(*rates)}


def _folders(plan: Plan) -> list[str]:
    return list(plan.drives) if plan.stores else []


def _free_device_bytes(device: Device) -> int:
    if device.name != "cuda":
        return 0  # host memory is used as device memory, so moving state there gains nothing
    free, total = torch.cuda.mem_get_info()
    reusable = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return max(0, int(free + reusable - DEVICE_MEMORY_MARGIN * total))
