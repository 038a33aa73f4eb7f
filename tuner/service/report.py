"""The web page of ``tune report``, and the data of uploaded training runs for the planning service's own web page.

The page of ``tune report`` shows a plan and a training run under this plan. It is a single file that loads nothing from
the network. A training run that was uploaded to the planning service is converted into a timeline, and into JSON data.
"""

import base64
import html
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any, Literal, Self, get_args

from ebbtide.simulator.drawing import style_sheet
from ebbtide.simulator.engines.reference import simulate
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Placement, Plan
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.schedule import Lane, OpKind, Span
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.simulator.timeline import MemorySample, Timeline
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.timeline_view import view
from ebbtide.tuner.answer.verdict import headline, role_of
from ebbtide.tuner.progress import ShowProgress
from ebbtide.tuner.service.requests import Name, Planned, PostedPlan, Request, Scenario, Seconds, resolve
from pydantic import BaseModel, Field, ValidationError, model_validator

SHORTEST_S = 1e-6  # shorter measured iterations cannot be drawn
# Order of the modules in the report's single script.
SCRIPTS = ("format.js", "timeline.js", "kinds.js", "memory.js", "table.js", "phases.js", "report.js")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


class PostedSpan(Request):
    """One operation in the measured timeline of a training run that a client uploads to the service.

    See `ebbtide.simulator.timeline.Span`.
    """

    kind: OpKind
    lane: Lane
    start_s: Seconds
    end_s: Seconds
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0

    @model_validator(mode="after")
    def _ends_later(self) -> Self:
        if self.end_s < self.start_s:
            raise RuleError(
                f"a span must end after it starts, but got start_s={self.start_s} and end_s={self.end_s}", key="end_s"
            )
        return self


class PostedSample(Request):
    """One sample of memory use in a training run that a client uploads to the service. See
    `ebbtide.simulator.timeline.MemorySample`.
    """

    t_s: Seconds
    device_bytes: Annotated[int, Field(ge=0, le=2**60)]
    host_bytes: Annotated[int, Field(ge=0, le=2**60)]


class Run(Request):
    """A training run that a client uploads to the service: the measured timeline, and the plan of the run if there is
    one.
    """

    name: Name
    spans: Annotated[list[PostedSpan], Field(min_length=1, max_length=20_000)]
    memory: Annotated[list[PostedSample], Field(max_length=20_000)] = Field(default_factory=list)
    source: Literal["predicted", "measured"] = "measured"
    strategy: Name = "ebbtide"
    plan: PostedPlan | None = None
    measured_on: Annotated[str, Field(max_length=200)] = ""


class ReportCall(BaseModel):
    """A request from the service to one of its worker processes: make the web page about a plan.

    Attributes:
        plan: Plan to show.
        scenario: Training job and machine. If given, the page also shows the job's predicted timelines.
        run: Uploaded training run, as JSON text. If given, the page also shows the run's timeline.
    """

    plan: Plan
    scenario: Scenario | None = None
    run: str | None = None


def html_of_call(call: ReportCall, progress: ShowProgress) -> str:
    """Return the web page about a plan as HTML. Worker processes call this function."""
    # Loads the compiled simulator, which the server itself never needs.
    from ebbtide.tuner.answer.verdict import about

    about_run = ""
    timelines = [] if call.run is None else [timeline_of(Run.model_validate_json(call.run))]
    if call.scenario is not None:
        machine, workload = resolve(call.scenario)
        timelines += _predicted(call.plan, machine, workload)
        about_run = about(workload, machine)
    return report_html(call.plan, timelines, about_run)


def trace(call: Planned, progress: ShowProgress) -> dict[str, Any]:
    """Return a trace for ui.perfetto.dev, with the simulated timelines of DeepSpeed alone and under a plan."""
    stock, planned = _predicted(call.plan, *resolve(call.scenario))
    return stock.perfetto(planned)


def _predicted(plan: Plan, machine: Machine, workload: Workload) -> list[Timeline]:
    # Loads the compiled simulator, which the server itself never needs.
    from ebbtide.tuner.answer.rows import StockTraining, stock_row

    stock = stock_row(StockTraining(workload, machine, plan.limits_on(workload, machine)))
    named = replace(simulate(stock.schedule, machine), strategy=stock.label)
    return [named, _under(plan, workload, machine)]


def _under(plan: Plan, workload: Workload, machine: Machine) -> Timeline:
    cut = workload.cut_as(plan)
    return simulate(build_strategy("ebbtide", cut, plan=plan), machine)


def timeline_of(run: Run) -> Timeline:
    """Return the timeline of a training run that was uploaded to the service."""
    spans = tuple(Span(**dict(span)) for span in run.spans)
    memory = tuple(MemorySample(**dict(sample)) for sample in run.memory)
    return Timeline(spans, run.source, memory, run.strategy)


def summary_of(run: Run) -> dict[str, Any]:
    """Return the summary of an uploaded training run for the web page's list of runs, with predicted and
    measured seconds per iteration.

    Raises:
        ValueError: The upload is not a valid run.
    """
    timeline = timeline_of(run)
    if timeline.iteration_s < SHORTEST_S:
        raise RuleError(
            f"the spans of a run must give an iteration time of at least {SHORTEST_S:g} s, but give "
            f"{timeline.iteration_s:g} s. Check that start_s and end_s of the spans are in seconds",
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
    """Return a stored training run as JSON data for the web page: the measured timeline, the plan, and the
    plan's predicted timeline if it is known.

    Args:
        workload: Measured workload that the server was started with. If the run's plan was made for this workload and
            for one of ``machines``, the result includes the plan's predicted timeline.
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
    """Convert a timeline into the form that the service accepts as an upload of a training run."""
    return Run.model_validate(
        {
            "name": name,
            "source": timeline.source,
            "strategy": timeline.strategy,
            "measured_on": measured_on,
            "spans": [asdict(span) for span in timeline.spans],
            "memory": [asdict(sample) for sample in timeline.memory],
            "plan": None if plan is None else plan.model_dump(mode="json"),
        }
    )


def read_timelines(text: str) -> list[Timeline]:
    """Read timelines from a trace that `Timeline.to_perfetto` wrote, or from an upload to the service.

    Raises:
        ValueError: The text is neither a trace nor an upload.
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
            "a timeline must be a trace file that ebbtide wrote (for example with `tune simulate --trace`), or a "
            f"training run in the JSON format of POST /api/v1/runs, but: {explain(error, model=Run)}"
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


def report_html(plan: Plan, timelines: list[Timeline], about_run: str = "") -> str:
    """Return a web page about a plan as HTML in a single file, which loads nothing from the network.

    The browser may run only the page's own script and style, which the page names by their hashes.

    Args:
        timelines: Timelines of training under the plan, measured or predicted. The first measured
            one is compared with the plan's prediction.
        told: Description of the trained model and the machine. If empty, the one in the plan's file is used.
    """
    static = files("ebbtide.tuner.service") / "static"
    text = {name: (static / name).read_text(encoding="utf-8") for name in (*SCRIPTS, "style.css", "report.html")}
    script = (static / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    script += "".join(_EXPORT.sub("", _IMPORT.sub("", text[name])) for name in SCRIPTS)
    style = (static / "uplot" / "uPlot.min.css").read_text(encoding="utf-8") + style_sheet() + text["style.css"]
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    fields = {
        "POLICY": html.escape(policy),
        "STYLE": style,
        "SCRIPT": script,
        "HEADLINE": html.escape(headline(plan)),
        "DATA": _data(plan, timelines, about_run or plan.about),
    }
    # In one pass, so that inserted text is never searched for placeholders.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda m: fields[m.group(1)], text["report.html"])


def _data(plan: Plan, timelines: list[Timeline], about: str) -> str:
    measured = next((t for t in timelines if t.source == "measured"), None)
    data = {
        "plan": plan.model_dump(mode="json"),
        "digest": plan.digest,
        "about": about,
        "date": datetime.now().astimezone().date().isoformat(),
        "others": [{"role": role_of(other.strategy), "fits": other.fits} for other in plan.alternatives],
        "counts": {kind: plan.count(kind) for kind in get_args(Placement)},
        "measured": None if measured is None else {"iteration_s": measured.iteration_s, **measured.phases()},
        "timelines": [view(timeline) for timeline in timelines],
    }
    # So a plan's texts cannot end the script element by "</script>" or begin a comment by "<!--".
    return json.dumps(data).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
