"""A self-contained web page about a plan and training under it, and training runs as the service stores them."""

import base64
import html
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import sha256
from importlib.resources import files
from typing import Any, get_args

from ebbtide.simulator.engines.reference import simulate
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Placement, Plan
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.schedules.strategies import build_strategy, stock_offload
from ebbtide.simulator.span import Span
from ebbtide.simulator.timeline import MemorySample, Timeline
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.timeline_view import view
from ebbtide.tuner.answer.verdict import headline
from ebbtide.tuner.placements.planning import about
from ebbtide.tuner.service.client import run_body
from ebbtide.tuner.service.requests import Planned, Run, Scenario
from ebbtide.tuner.service.scenario import resolve
from pydantic import BaseModel, ValidationError

# In the order in which the one script of the report is put together.
SHORTEST_S = 1e-6  # of a run's iteration: nothing shorter can be drawn
SCRIPTS = ("format.js", "timeline.js", "kinds.js", "memory.js", "table.js", "report.js")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


class ReportCall(BaseModel):
    """The input of a worker for a report: the plan, and a training run as it was uploaded."""

    plan: Plan
    scenario: Scenario | None = None
    run: str | None = None


def html_of_call(call: ReportCall, progress: Callable[..., None]) -> str:
    """Return the report page about a plan as HTML, for a worker's call."""
    told = ""
    timelines = [] if call.run is None else [timeline_of(Run.model_validate_json(call.run))]
    if call.scenario is not None:
        timelines += predicted(call.plan, call.scenario)
        machine, workload = resolve(call.scenario)
        told = about(workload, machine)
    return report_html(call.plan, timelines, told)


def trace(call: Planned, progress: Callable[..., None]) -> dict[str, Any]:
    """Return the timelines of stock and of a plan as a trace for ui.perfetto.dev."""
    stock, planned = predicted(call.plan, call.scenario)
    return stock.perfetto(planned)


def predicted(plan: Plan, scenario: Scenario) -> list[Timeline]:
    """Return the simulated timelines of stock DeepSpeed and of a plan."""
    machine, workload = resolve(scenario)
    stock = build_strategy(stock_offload(workload.zero_stage), workload)
    return [simulate(stock, machine), _under(plan, workload, machine)]


def _under(plan: Plan, workload: Workload, machine: Machine) -> Timeline:
    """Return the predicted timeline of the plan."""
    cut = workload.cut_as(plan)
    return simulate(build_strategy("ebbtide", cut, plan=plan), machine)


def timeline_of(run: Run) -> Timeline:
    """Return the timeline of an uploaded training run.

    Raises:
        ValueError: A kind of op or a lane is unknown, or an op ends before it starts.
    """
    spans = []
    for number, s in enumerate(run.spans):
        if s.end_s < s.start_s:
            raise RuleError(
                f"spans.{number} must end after it starts, but got start_s={s.start_s} and end_s={s.end_s}",
                key=f"spans.{number}.end_s",
            )
        kind = _member(OpKind, s.kind, f"spans.{number}.kind")
        lane = _member(Lane, s.lane, f"spans.{number}.lane")
        spans.append(Span(kind, lane, s.start_s, s.end_s, s.subgroup, s.layer, s.iteration))
    memory = tuple(MemorySample(m.t_s, m.device_bytes, m.host_bytes) for m in run.memory)
    return Timeline(tuple(spans), run.source, memory, run.strategy)


def _member(kind: Any, value: str, key: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise RuleError(f"{key} must be one of {known}, but got {value!r}", key) from None


def summary_of(run: Run) -> dict[str, Any]:
    """Return the row of an uploaded training run in the list of runs, with predicted and measured times.

    Raises:
        ValueError: See `timeline_of`.
    """
    timeline = timeline_of(run)
    if timeline.iteration_s < SHORTEST_S:
        raise RuleError(
            f"spans must last {SHORTEST_S:g} s at least, but an iteration of them lasts {timeline.iteration_s:g}",
            "spans",
        )
    prediction = run.plan.prediction if run.plan else None
    return {
        "source": run.source,
        "strategy": run.strategy,
        "measured_on": run.measured_on,
        "iteration_s": timeline.iteration_s,
        "predicted_s": prediction.iteration_s if prediction else None,
        "spans": len(run.spans),
    }


def read_run(text: str, machines: Iterable[Machine] = (), workload: Workload | None = None) -> dict[str, Any]:
    """Return a stored run as the page shows it.

    Args:
        machines: the machines that the server knows.
        workload: the profiled workload that the server knows. If the run's plan was made for it, and for one
            of ``machines``, the plan's predicted timeline is shown beside the run's.
    """
    run = Run.model_validate_json(text)
    timeline, plan = timeline_of(run), run.plan
    planned = None
    if plan is not None and workload is not None and workload.fingerprint == plan.workload_fingerprint:
        machine = next((m for m in machines if m.fingerprint == plan.machine_fingerprint), None)
        planned = None if machine is None else view(_under(plan, workload, machine))
    return {
        "name": run.name,
        **summary_of(run),
        "phases": timeline.phases(),
        "view": view(timeline),
        "planned": planned,
        "plan": None if run.plan is None else run.plan.model_dump(mode="json"),
    }


def posted(timeline: Timeline, name: str, plan: Plan | None = None, measured_on: str = "") -> Run:
    """Return a timeline in the form of an uploaded training run."""
    return Run.model_validate(run_body(name, timeline, plan, measured_on))


def read_timelines(text: str) -> list[Timeline]:
    """Read timelines from a trace that `Timeline.to_perfetto` wrote, or from a run as the service takes it.

    Raises:
        ValueError: The text is neither of them.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a timeline must be JSON, but: {error}") from None
    if isinstance(document, dict) and "traceEvents" in document:
        return _from_perfetto(document["traceEvents"])
    try:
        return [timeline_of(Run.model_validate(document))]
    except ValidationError as error:
        raise ValueError(
            "a timeline must be a trace of tune simulate, the demo or the runtime, or a run as "
            f"POST /api/v1/runs takes it, but: {explain(error, model=Run)}"
        ) from None


def _from_perfetto(events: list[dict[str, Any]]) -> list[Timeline]:
    lanes = list(Lane)
    names: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    memory: dict[int, list[MemorySample]] = {}
    try:
        for event in events:
            pid, phase = event["pid"], event["ph"]
            if phase == "M" and event["name"] == "process_name":
                names[pid] = event["args"]["name"]
            elif phase == "X":
                start_s = event["ts"] / 1e6
                layer = re.search(r" l(\d+)$", event["name"])
                spans.setdefault(pid, []).append(
                    Span(
                        OpKind(event["cat"]),
                        lanes[event["tid"] - 1],
                        start_s,
                        start_s + event["dur"] / 1e6,
                        event["args"]["subgroup"],
                        int(layer.group(1)) if layer else -1,
                        event["args"]["iteration"],
                    )
                )
            elif phase == "C":
                used = event["args"]
                memory.setdefault(pid, []).append(MemorySample(event["ts"] / 1e6, used["device"], used["host"]))
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"a trace must be one that Timeline.to_perfetto wrote, but: {error!r}") from None
    return [
        Timeline(
            tuple(held),
            "measured" if names.get(pid, "").startswith("measured") else "predicted",
            tuple(memory.get(pid, ())),
            names.get(pid, "").partition(": ")[2] or "ebbtide",
        )
        for pid, held in spans.items()
    ]


def report_html(plan: Plan, timelines: list[Timeline], told: str = "") -> str:
    """Return a web page about a plan in one file, which needs no network.

    The page allows only its own script and style, by their hashes.

    Args:
        timelines: Timelines of training under the plan, measured or predicted. The first measured one is
            compared with the plan's prediction.
        told: Description of the trained model and the machine. If empty, the one in the plan's file.
    """
    static = files("ebbtide.tuner.service") / "static"
    text = {name: (static / name).read_text(encoding="utf-8") for name in (*SCRIPTS, "style.css", "report.html")}
    script = (static / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    script += "".join(_EXPORT.sub("", _IMPORT.sub("", text[name])) for name in SCRIPTS)
    style = (static / "uplot" / "uPlot.min.css").read_text(encoding="utf-8") + text["style.css"]
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    fields = {
        "POLICY": html.escape(policy),
        "STYLE": style,
        "SCRIPT": script,
        "HEADLINE": html.escape(headline(plan)),
        "DATA": _data(plan, timelines, told or plan.about),
    }
    # In one pass: what is put in is never searched for another placeholder.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda m: fields[m.group(1)], text["report.html"])


def _data(plan: Plan, timelines: list[Timeline], about: str) -> str:
    measured = next((t for t in timelines if t.source == "measured"), None)
    data = {
        "plan": plan.model_dump(mode="json"),
        "digest": plan.digest,
        "about": about,
        "date": datetime.now().astimezone().date().isoformat(),
        "fits": [other.fits for other in plan.alternatives],
        "counts": {kind: plan.count(kind) for kind in get_args(Placement)},
        "measured": None if measured is None else {"iteration_s": measured.iteration_s, **measured.phases()},
        "timelines": [view(timeline) for timeline in timelines],
    }
    # No "</script>" and no "<!--" can stand in it, whatever a plan's texts say.
    return json.dumps(data).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
