"""Quick answers of the planning service to several questions at once: one setting varied, or all machines compared."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ebbtide.simulator.analysis.best_setting import fastest_plan
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError, worded
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.rows import Row, compare
from ebbtide.tuner.placements.division import ImpossibleError
from ebbtide.tuner.placements.planning import quick_or_roomiest, quick_plan
from ebbtide.tuner.progress import ShowProgress, silently
from ebbtide.tuner.service.answers import TEMPLATES, allowed, answer, freedom, listed
from ebbtide.tuner.service.requests import Answer, PostedPlan, check_plannable, machine_of, resolve
from pydantic import BaseModel


class SweepCall(BaseModel):
    """A request to a worker process: the question at each point of a sweep, or the rule that it breaks there."""

    points: list[Answer | str]
    plans: list[PostedPlan]
    search: bool


class CardsCall(BaseModel):
    """A request to a worker process: the same question about each machine."""

    questions: list[Answer]


@dataclass(frozen=True)
class _SweepPoint:
    machine: Machine
    workload: Workload
    limits: Limits
    freedom: dict[str, Any]

    def best(self, plans: Sequence[Plan]) -> Plan | None:
        found = fastest_plan(plans, *self._job)
        return None if found is None else found[1]

    def rows(self, plan: Plan | None) -> list[Row]:
        chosen = plan or quick_or_roomiest(*self._job, **self.freedom)
        return compare(*self._job, chosen, others=False, compile_=TEMPLATES.compiled, spreads=False)

    @property
    def _job(self) -> tuple[Workload, Machine, Limits]:
        return self.workload, self.machine, self.limits


def sweep(call: SweepCall, progress: ShowProgress) -> dict[str, Any]:
    """Return the ways to train at each point of a sweep, as JSON data.

    A quick search makes a plan at each point. The plans of all points, and the known ones, are tried at all points: a
    plan for a slower link or a smaller memory may be the best one found for a faster or larger one.
    """
    points, plans = [_point(one) for one in call.points], list(call.plans)
    for number, point in enumerate(points):
        progress(number / len(points), f"{number} of {len(points)} points")
        if isinstance(point, _SweepPoint) and call.search:
            with suppress(ImpossibleError):
                plans.append(quick_plan(point.workload, point.machine, point.limits, **point.freedom))
    return {"points": [_point_figures(point, plans) for point in points]}


def _point(asked: Answer | str) -> _SweepPoint | str:
    if isinstance(asked, str):
        return asked
    try:
        check_plannable(asked)
        machine, workload = resolve(asked)
        limits, machine = allowed(asked, workload, machine)
    except RuleError as error:
        return str(error)
    return _SweepPoint(machine, workload, limits, freedom(asked))


def _point_figures(point: _SweepPoint | str, plans: Sequence[Plan]) -> dict[str, Any]:
    if isinstance(point, str):
        return {"rows": [], "refused": worded(point), "plan": None}
    plan = point.best(plans)
    shown = None if plan is None else plan.model_dump(mode="json")
    return {"rows": listed(point.rows(plan), point.workload), "refused": "", "plan": shown}


def cards(call: CardsCall, progress: ShowProgress) -> dict[str, Any]:
    """Return the advised way to train on each machine, with the figures of its own quick answer, as JSON data."""
    rows = []
    for number, question in enumerate(call.questions):
        progress(number / len(call.questions), f"{number} of {len(call.questions)} machines")
        rows.append(_card(question))
    return {"rows": sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0))}


_FIGURES = ("iteration_s", "tokens_per_s", "device_peak_bytes", "host_peak_bytes")


def _card(question: Answer) -> dict[str, Any]:
    try:
        found = answer(question, silently)
    except RuleError as error:  # such as a model with more layers than the machine's ranks can share
        found = {"verdict": "impossible", "sentence": str(error), "rows": [], "machine": None}
    role = {"offload": "plan", "no offload": "no offload", "impossible": None}[found["verdict"]]
    row: dict[str, Any] = next((row for row in found["rows"] if row["role"] == role), {})
    machine = machine_of(question)
    return {
        "machine": question.machine if isinstance(question.machine, str) else question.machine.name,
        "device_name": machine.device_name,
        "gpus": question.gpus,
        "measured": machine.measured_with != "preset",
        "verdict": found["verdict"],
        "role": role,
        "reason": "" if role else worded(found["sentence"]),
        **{name: row.get(name) for name in _FIGURES},
        "device_memory_bytes": machine.device_memory_bytes,
        "host_memory_bytes": machine.host_memory_bytes,
    }
