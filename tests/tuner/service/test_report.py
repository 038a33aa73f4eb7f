"""Tests of `tune report`: it writes one file that needs no network, and escapes all texts of a plan."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.simulator import Machine, Plan, Workload, build_strategy, preset, simulate, workload_from_model
from ebbtide.simulator.drawing import COLOURS, GROUPS, style_sheet
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.schedule import KINDS
from ebbtide.simulator.schedules.strategies import STRATEGIES
from ebbtide.simulator.timeline import Timeline
from ebbtide.tuner.answer.rows import PEERS
from ebbtide.tuner.answer.timeline_view import view
from ebbtide.tuner.answer.verdict import headline, role_of
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.planning import quick_plan
from ebbtide.tuner.progress import silently
from ebbtide.tuner.service.report import ReportCall, html_of_call, posted, read_run, read_timelines, report_html, trace
from ebbtide.tuner.service.requests import MODELS, Planned, Scenario, resolve
from ebbtide.tuner.service.server import shipped_example


@pytest.fixture(scope="module")
def timeline():
    machine = preset("h100-node")
    work = workload_from_model(MODELS["Llama 3.2 1B"], machine, micro_batch=1)
    return simulate(build_strategy("zero3_offload", work), machine)


@pytest.fixture(scope="module")
def plan():
    return Plan.load(shipped_example() / "plan.json")


def test_a_trace_is_read_back_as_it_was_written(timeline, tmp_path):
    timeline.to_perfetto(tmp_path / "t.json")
    (read,) = read_timelines((tmp_path / "t.json").read_text())
    assert read.strategy == timeline.strategy
    assert [(s.kind, s.lane, s.subgroup, s.layer, s.iteration) for s in read.spans] == [
        (s.kind, s.lane, s.subgroup, s.layer, s.iteration) for s in timeline.spans
    ]
    assert read.iteration_s == pytest.approx(timeline.iteration_s)
    assert read.device_peak_bytes == timeline.device_peak_bytes


def test_a_posted_run_is_read_back(timeline):
    (read,) = read_timelines(posted(timeline, "r").model_dump_json())
    assert read == timeline


def test_the_page_names_model_and_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["--machine", "rtx4090", "--model", "GPT-2 1.5B", "--sequence", "256"]
    assert CliRunner().invoke(main, ["plan", *common, "-o", "plan.json"]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "plan.json", "-o", "report.html"]).exit_code == 0
    data = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', Path("report.html").read_text(), re.DOTALL).group(1)
    assert json.loads(data)["about"].startswith(
        "GPT-2 1.5B, 1.56 B parameters, on 1 x NVIDIA GeForce RTX 4090 (preset rtx4090"
    )
    plan = Plan.load("plan.json")
    assert plan.model_copy(update={"about": ""}).digest == plan.digest, "a plan's digest depends on its description"


def test_a_run_is_shown_beside_its_plans_prediction(timeline, plan):
    example = shipped_example()
    machine, work = Machine.load(example / "machine.json"), Workload.load(example / "workload.json")
    text = posted(timeline, "r", plan).model_dump_json()
    shown = read_run(text, [preset("h200"), machine], work)
    assert shown["planned"]["strategy"] == "ebbtide"
    assert shown["planned"]["duration_s"] == pytest.approx(plan.prediction.iteration_s, rel=0.05)
    other = work.model_copy(update={"zero_stage": 2})
    for known in [([preset("h200")], work), ([machine], None), ([machine], other)]:
        assert read_run(text, *known)["planned"] is None
    assert read_run(posted(timeline, "r").model_dump_json(), [machine], work)["planned"] is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_timeline_is_named_by_its_role(strategy):
    expected = {"ebbtide": "plan", "no_offload": "no offload", **dict.fromkeys(PEERS, "peer")}
    assert role_of(strategy) == expected.get(strategy, "stock")


@pytest.mark.parametrize(
    "config",
    [
        None,  # Llama 3 8B does not fit with its parameters on the GPU, so that DeepSpeed alone is ZeRO-Infinity
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def test_report_and_trace_call_deepspeed_alone_by_its_name(config):
    scenario = Scenario(model="Llama 3 8B", machine="rtx4090", ds_config=config, host_memory_bytes=2**38)
    if config:
        scenario = scenario.model_copy(update={"model": "Llama 3.2 1B"})
    machine, work = resolve(scenario)
    plan = quick_plan(work, machine, Limits.of(work, machine))
    events = trace(Planned(plan=plan, scenario=scenario), silently)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names[0].startswith("predicted: stock ZeRO-")
    assert "predicted: ebbtide" in names
    text = html_of_call(ReportCall(plan=plan, scenario=scenario), silently)
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.DOTALL).group(1))
    assert [view["role"] for view in data["timelines"]] == ["stock", "plan"]


def test_lanes_are_named_after_what_they_do(timeline):
    for lane in view(timeline)["lanes"]:
        groups = {group for _, _, group, _ in lane["spans"]}
        named = [group for group in GROUPS.values() if lane["name"].split(" ", 1)[-1] == group]
        assert not named or groups <= {*named, "early update"}, lane["name"]
    assert "H2D gradients" in [lane["name"] for lane in view(timeline)["lanes"]]


def test_the_command_writes_a_page_that_needs_nothing_else(tmp_path):
    out = tmp_path / "report.html"
    example = shipped_example()
    result = CliRunner().invoke(
        main, ["report", str(example / "plan.json"), "--run", str(example / "trace.json"), "-o", str(out)]
    )
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert headline(Plan.load(example / "plan.json")) in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy


def test_markup_in_a_plan_stays_text(plan):
    evil = "</script><script>alert(1)</script><!-- {{SCRIPT}}"
    text = report_html(plan.model_copy(update={"reasons": (evil,)}), [])
    assert evil not in text
    assert text.count("<script>") == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"spans": 1}'])
def test_a_run_that_is_none_is_refused(tmp_path, content):
    run = tmp_path / "run.json"
    run.write_text(content)
    plan = shipped_example() / "plan.json"
    result = CliRunner().invoke(main, ["report", str(plan), "--run", str(run), "-o", "/dev/null"])
    assert result.exit_code == 2
    assert "--run must be a trace file that training under a plan has written" in result.output


def test_the_headline_says_what_the_plan_brings(plan):
    interval = {"iteration_s": 1.0, "iteration_low_s": 0.9, "iteration_high_s": 1.1}
    chosen = plan.prediction.model_copy(update={**interval, "lower_bound_s": 0.96})
    stock = chosen.model_copy(update={"strategy": "stock ZeRO-3 offload", "iteration_s": 2.1})
    chosen = chosen.model_copy(update={"limits": {}})
    stock = stock.model_copy(update={"limits": {}})
    plain = chosen.model_copy(
        update={"strategy": "no offload", "iteration_s": 0.5, "note": "needs 48.0 GiB more GPU memory"}
    )
    made = plan.model_copy(update={"prediction": chosen, "alternatives": (stock,)})
    assert headline(made) == "Offload with this plan: 2.1x as fast as stock DeepSpeed, within 5% of a lower bound."
    setting = stock.model_copy(update={"strategy": "stock, offload_param cpu", "iteration_s": 1.5})
    faster = made.model_copy(update={"alternatives": (stock, setting)})
    assert "stock DeepSpeed, 1.5x as fast as DeepSpeed alone with offload_param cpu (1.50 s)" in headline(faster)
    unfit = made.model_copy(update={"alternatives": (stock, setting.model_copy(update={"note": "needs 1 GiB more"}))})
    assert "offload_param" not in headline(unfit)
    both = made.model_copy(update={"alternatives": (stock, plain)})
    assert headline(both) == (
        "Offload with this plan: 2.1x as fast as stock DeepSpeed, within 5% of a lower bound. Not offloading would be "
        "2.0x faster than this plan, but needs 48.0 GiB more GPU memory."
    )
    gib = 2**30
    short = {"note": "needs 28.0 GiB more host memory", "limits": {"device": 20 * gib, "host": 100 * gib}}
    needy = stock.model_copy(update={**short, "host_peak_bytes": 128 * gib})
    told = headline(made.model_copy(update={"alternatives": (needy, plain)}))
    assert told.startswith(
        "Fits with ebbtide (1.00 s per step, within 5% of a lower bound). Stock DeepSpeed does not fit: it needs "
        "28.0 GiB more host memory"
    )
    assert "as fast as stock" not in told
    told = headline(made.model_copy(update={"alternatives": (needy, setting)}))
    assert told.endswith("memory. DeepSpeed alone with offload_param cpu (1.50 s) fits, and this plan is 1.5x as fast.")
    far = plain.model_copy(update={"limits": {"device": 20 * gib}, "device_peak_bytes": 68 * gib})
    assert "Not offloading" not in headline(made.model_copy(update={"alternatives": (stock, far)}))
    fits = plain.model_copy(update={"note": ""})
    made = made.model_copy(update={"alternatives": (stock, fits)})
    assert headline(made).startswith("Do not offload: it fits (500 ms per step), and is 2.0x faster than this plan")
    assert "without a prediction" in headline(plan.model_copy(update={"prediction": None}))


@pytest.mark.parametrize(
    ("seconds", "choice"), [(0.5, "is 2.0x faster"), (0.95, "no difference"), (1.05, "no difference"), (1.2, None)]
)
def test_what_lies_within_the_interval_is_no_difference(plan, seconds, choice):
    spread = {"iteration_s": 1.0, "iteration_low_s": 0.9, "iteration_high_s": 1.1}
    chosen = plan.prediction.model_copy(update={**spread, "lower_bound_s": 0.96, "limits": {}})
    plain = chosen.model_copy(update={"strategy": "no offload", "iteration_s": seconds})
    told = headline(plan.model_copy(update={"prediction": chosen, "alternatives": (plain,)}))
    assert told.startswith("Do not offload: it fits" if choice else "Offload with this plan")
    assert (choice or "") in told
    lacking = plain.model_copy(update={"note": "needs 1.0 GiB more GPU memory"})
    told = headline(plan.model_copy(update={"prediction": chosen, "alternatives": (lacking,)}))
    assert ("needs 1.0 GiB more" in told) is (choice == "is 2.0x faster")


def test_an_empty_timeline_is_drawn_as_nothing():
    from ebbtide.tuner.answer.timeline_view import view

    assert view(Timeline((), "measured"))["lanes"] == []


def test_of_a_runs_iterations_a_typical_one_is_shown():
    from ebbtide.simulator import Lane, OpKind, Span
    from ebbtide.tuner.answer.timeline_view import window

    ends = [1.0, 3.0, 4.0, 9.0, 10.5]  # durations of 2, 1, 5 and 1.5: 2.5 on average without the first
    spans = tuple(Span(OpKind.BACKWARD, Lane.COMPUTE, end - 0.5, end, iteration=i) for i, end in enumerate(ends))
    assert window(Timeline(spans, "measured")) == (9.0, 10.5)


def test_every_group_of_ops_and_kind_of_memory_has_a_colour_on_the_page():
    static = Path(str(files("ebbtide.tuner.service") / "static"))
    sheet, script = (static / "style.css").read_text(), (static / "timeline.js").read_text()
    drawn = re.findall(r'"([\w ]+)"', script[script.index("GROUPS = [") : script.index("];")])
    assert drawn == list(COLOURS), "legends have one order"
    classes = {f"g-{group.replace(' ', '-')}" for group in drawn} | {f"k-{kind}" for kind in KINDS}
    colours = {name: re.search(rf"\.{name} {{ fill: var\((--[\w-]+)\)", sheet) for name in classes}
    assert [name for name, colour in colours.items() if colour is None] == []
    assert [name for name, colour in colours.items() if colour and f"{colour[1]}:" not in style_sheet()] == []
    assert "--c-forward:" not in sheet, "colours are in one table"
