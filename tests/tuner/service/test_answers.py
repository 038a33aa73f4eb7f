"""Tests that the HTTP service gives the same answers as ebbtide's Python API."""

import csv
import io
import json

import pytest
from ebbtide import what_if
from ebbtide.runtime.frontdoor.request import read_request
from ebbtide.simulator import CheckpointPlan, Plan, build_strategy, preset, simulate, workload_from_model
from ebbtide.simulator.analysis.goodput import (
    CheckpointCost,
    CheckpointPrice,
    Failures,
    best_interval_steps,
    expected_goodput,
)
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.answer.instructions import emitted_config
from ebbtide.tuner.answer.rows import stock_beside
from ebbtide.tuner.answer.verdict import role_of
from ebbtide.tuner.placements.decision import QUICK
from ebbtide.tuner.placements.planning import plan as make_plan
from ebbtide.tuner.service import answers, worker
from ebbtide.tuner.service.quota import estimated_ops
from ebbtide.tuner.service.requests import MODELS, Answer, Scenario, Simulate, WhatIf, resolve

from tests.machines import GIB

SIMULATED = {"machine": "h100-node", "model": "Llama 3 8B"}
LLAMA = SIMULATED | {"clip_rate": 1.0}  # with this clip rate, no update begins early


def workload(**about):
    machine = preset("h100-node")
    model = {**MODELS["Llama 3 8B"], "_name_or_path": "Llama 3 8B"}
    about = {"sequence": 2048, "micro_batch": 1, "gradient_accumulation_steps": 1, **about}
    return workload_from_model(model, machine, **about), machine


def test_without_a_config_stock_does_not_depend_on_the_servers_deepspeed(monkeypatch):
    monkeypatch.setattr("ebbtide.simulator.estimates.deepspeed_keys._installed_version", lambda: "0.18.9")
    told = answers.simulate(Simulate(**SIMULATED), lambda *_: None)
    beside = answers.answer(Answer(**LLAMA), lambda *_: None)
    assert told["strategy"] == "zero3_offload"
    assert told["iteration_s"] in [row["iteration_s"] for row in beside["rows"]]


@pytest.mark.parametrize(("margin", "of_plan"), [(0.0, True), (0.3, True), (0.3, False)])
def test_a_plan_is_judged_by_the_limits_that_it_was_made_with(margin, of_plan):
    machine, work = resolve(Scenario(**LLAMA))
    made = make_plan(work, machine, memory_margin=margin, effort=QUICK)
    asked = {**LLAMA, **({} if of_plan else {"machine": "h200"})}
    simulated = answers.simulate(Simulate(**asked, plan=made), lambda *_: None)
    beside = answers.answer(Answer(**asked, plan=made), lambda *_: None)
    machine, work = resolve(Scenario(**asked))
    limits = Limits.of(work, machine, margin=margin if of_plan else None)
    for told in (simulated, beside):
        assert told["limits"]["device_bytes"] == limits.device_bytes
        assert told["limits"]["host_bytes"] == limits.host_bytes
    if of_plan:
        assert simulated["fits"]


@pytest.mark.parametrize("elsewhere", [{"link_bytes_per_s": 3e9}, {"machine": "h200"}, {"accumulation": 4}, {}])
@pytest.mark.parametrize("told", [True, False])
def test_a_plan_from_elsewhere_is_predicted_for_the_request(elsewhere, told):
    asked = {"machine": "rtx4090", "model": "Llama 3.2 1B", "sequence": 1024, "peers": False}
    made = answers.answer(Answer(**asked, timelines=False), lambda *_: None)["plan"]
    sent = Plan.model_validate(made if told else {**made, "prediction": None})
    answer = answers.answer(Answer(**{**asked, **elsewhere}, plan=sent, mtbf_s=10_000), lambda *_: None)
    rows = {row["role"]: row for row in answer["rows"]}
    seconds = rows["plan"]["iteration_s"]
    assert answer["plan"]["prediction"]["iteration_s"] == pytest.approx(seconds, rel=1e-9)
    assert answer["bound_s"] <= seconds
    gain = f"{rows['plan']['speedup_low']:.2g}x to {rows['plan']['speedup_high']:.2g}x"
    assert gain in answer["sentence"] or "Do not" in answer["sentence"]
    assert answer["timelines"]["stock"]["strategy"] == rows["stock"]["strategy"]
    assert any("own prediction is for another" in why for why in answer["plan"]["reasons"]) == bool(told and elsewhere)
    assert (
        answers.answer(Answer(**asked, plan=Plan.model_validate(made)), lambda *_: None)["plan"]["prediction"]
        == made["prediction"]
    )


def test_a_plan_that_does_not_fit_is_not_said_to_be_the_only_one():
    asked = {"machine": "rtx4090", "model": "Llama 3.2 1B", "sequence": 1024, "peers": False, "timelines": False}
    made = answers.answer(Answer(**asked), lambda *_: None)["plan"]
    less = {**asked, "device_memory_bytes": 8 * GIB}
    told = answers.answer(Answer(**less, plan=Plan.model_validate(made), mtbf_s=10_000), lambda *_: None)
    assert told["sentence"].startswith("This plan does not fit: it needs")
    assert told["plan"]["prediction"] is None
    assert answers.answer(Answer(**less), lambda *_: None)["verdict"] == "offload"


def test_a_plan_file_without_the_limit_of_a_memory_is_judged_by_the_usual_limits():
    machine, work = resolve(Scenario(**LLAMA))
    made = make_plan(work, machine, memory_margin=0.01, effort=QUICK)
    for memory, size in made.prediction.limits.items():
        told = made.prediction.model_copy(update={"limits": {memory: size}})
        assert made.model_copy(update={"prediction": told}).limits_on(work, machine) == Limits.of(work, machine)


@pytest.mark.parametrize("size", [10**9, 2 * 10**8, 5 * 10**7])
def test_what_a_question_costs_is_told_from_its_subgroups(size):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"sub_group_size": size}}
    asked = Scenario(**LLAMA, ds_config=config)
    _, work = resolve(asked)
    ops = max(len(build_strategy(name, work).ops) for name in ("zero3_offload", "superoffload"))
    assert ops <= estimated_ops(asked) <= 4 * ops


def test_options_memory_link_and_accumulation_take_effect(server):
    asked = {
        **SIMULATED,
        "strategy": "twin_flow",
        "options": {"ratio": 0.5},
        "accumulation": 4,
        "link_bytes_per_s": 2e10,
        "timeline": True,
    }
    answer = server.post("/simulate", asked).json()
    work, machine = workload(gradient_accumulation_steps=4)
    slower = machine.with_rates(h2d_bytes_per_s=2e10, d2h_bytes_per_s=2e10)
    expected = simulate(build_strategy("twin_flow", work, ratio=0.5), slower)
    assert answer["iteration_s"] == pytest.approx(expected.iteration_s, rel=1e-9)
    assert len(answer["spans"]) == len(expected.spans)
    assert max(m["device_bytes"] for m in answer["memory"]) == expected.device_peak_bytes


def test_stage_parallelism_and_a_deepspeed_config_are_those_of_the_api(server):
    config = {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"sub_group_size": 2e8, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    }
    for asked, name, options in (
        ({"zero_stage": 2, "gpus": 4}, "zero_offload", {}),
        ({"tensor_parallel": 2, "gpus": 2}, "zero3_offload", {}),
        ({"ds_config": config, "gpus": 4}, "twin_flow", {"ratio": 0.5}),
        ({"strategy": "no_offload", "gpus": 4}, "no_offload", {}),
    ):
        answer = server.post("/simulate", {**SIMULATED, **asked}).json()
        shape = {
            "zero_stage": asked.get("zero_stage"),
            "data_parallel": asked["gpus"],
            "tensor_parallel": asked.get("tensor_parallel", 1),
        }
        model = {**MODELS["Llama 3 8B"], "_name_or_path": "Llama 3 8B"}
        machine = preset("h100-node")
        work = workload_from_model(model, machine, asked.get("ds_config"), **shape)
        expected = simulate(build_strategy(name, work, **options), machine)
        assert answer["strategy"] == name
        assert answer["iteration_s"] == pytest.approx(expected.iteration_s, rel=1e-9)
        assert answer["device_peak_bytes"] == expected.device_peak_bytes
        assert answer["host_peak_bytes"] == expected.host_peak_bytes
        assert answer["tokens_per_s"] == pytest.approx(work.tokens_per_iteration / expected.iteration_s)


@pytest.mark.parametrize(
    ("zero", "asked", "rule"),
    [
        ({"sub_group_size": 1}, {}, "subgroup_size must divide"),
        ({"stage": 2}, {"zero_stage": 3}, "zero_optimization.stage is 2"),
        ({"stge": 3}, {}, "must be a key that DeepSpeed knows"),
        ({"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"}}, {}, "offload_param.device"),
    ],
)
def test_a_deepspeed_config_that_cannot_be_planned_for_says_which_key(server, zero, asked, rule):
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    refused = server.post("/answer", {**LLAMA, **asked, "ds_config": config})
    assert refused.status_code == 422
    assert rule in refused.text


def test_an_answer_tells_the_table_the_plan_and_the_sentence(server):
    answer = server.post("/answer", LLAMA).json()
    work, machine = workload()
    rows = {row["role"]: row for row in answer["rows"] if row["role"] != "peer"}
    stock = stock_beside(work, machine, Limits.of(work, machine))
    for role, (name, options) in (("stock", stock), ("no offload", ("no_offload", {}))):
        assert rows[role]["strategy"] == name
        expected = simulate(build_strategy(name, work, **options), machine)
        assert rows[role]["iteration_s"] == pytest.approx(expected.iteration_s, rel=1e-9)
    plan = Plan.model_validate(answer["plan"])
    made = simulate(build_strategy("ebbtide", work, plan=plan), machine)
    assert rows["plan"]["iteration_s"] == pytest.approx(made.iteration_s, rel=1e-9)
    limits = Limits.of(work, machine)
    assert made.device_peak_bytes <= limits.device_bytes
    assert set(answer["memory"]) == {"plan", "stock", "no offload"}
    for role, memories in answer["memory"].items():
        for name in ("device", "host"):
            assert sum(memories[name].values()) == rows[role][f"{name}_peak_bytes"]
    assert plan.prediction.memory == answer["memory"]["plan"]
    assert plan.prediction.limits == {"device": limits.device_bytes, "host": limits.host_bytes}
    assert {role_of(p.strategy) for p in plan.alternatives if p.memory} == {"stock", "no offload"}
    assert plan.prediction.iteration_s == pytest.approx(made.iteration_s)
    speedup = rows["stock"]["iteration_s"] / rows["plan"]["iteration_s"]
    low, high = rows["plan"]["speedup_low"], rows["plan"]["speedup_high"]
    assert f"{speedup:.1f}x ({low:.2g}x to {high:.2g}x) as fast as stock DeepSpeed" in answer["sentence"]
    assert not rows["no offload"]["fits"]
    assert "GPU memory" in rows["no offload"]["reason"]
    assert rows["no offload"]["reason"] in answer["sentence"]
    for role in ("stock", "plan"):
        shown = answer["timelines"][role]["duration_s"]
        assert shown == pytest.approx(rows[role]["iteration_s"], rel=1e-6)
    again = server.post("/answer", {**LLAMA, "plan": answer["plan"], "timelines": False}).json()
    assert {**again, "timelines": answer["timelines"]} == answer, "as the page asks: the plan is that of a first answer"


def test_storage_takes_what_memory_cannot_hold(server):
    asked = {**LLAMA, "host_memory_bytes": 2**35}
    assert server.post("/answer", asked).json()["verdict"] == "impossible"
    ways = server.post("/ways-out", asked).json()["ways"]
    (size,) = (w["changes"]["storage_bytes"] for w in ways if "storage_bytes" in w["changes"])
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
    }
    for more, told in (
        ({"storage_bytes": size, "endurance_bytes": 3e15}, "Drives rated for 3,000 TB last "),
        ({"ds_config": config}, "How long the drives last follows from the bytes that they are rated for"),
    ):
        answer = server.post("/answer", {**asked, **more}).json()
        plan = Plan.model_validate(answer["plan"])
        assert plan.count("stored") > 0
        assert 0 < plan.prediction.storage_bytes <= answer["limits"]["storage_bytes"]
        assert "storage read" in str(answer["timelines"]["plan"])
        assert told in plan.reasons[-1]


def test_the_first_answer_of_a_worker_has_all_parts_of_an_answer():
    tag, body = worker.run(worker.FIRST, worker.calls(), lambda *_: None)
    assert tag == worker.RESULT, body
    answer = json.loads(body)
    assert answer["plan"]
    assert {"plan", "stock", "no offload", "peer"} <= {row["role"] for row in answer["rows"]}
    assert answer["timelines"]["plan"]


def test_a_model_that_fits_is_not_offloaded(server):
    asked = {**LLAMA, "model": "Llama 3.2 1B", "machine": "h200", "accumulation": 16}
    answer = server.post("/answer", asked).json()
    assert answer["verdict"] == "no offload"
    assert answer["sentence"].startswith("Do not offload: it fits")


def test_what_fits_nowhere_says_what_is_missing(server):
    asked = {**LLAMA, "model": "Llama 3 70B", "machine": "rtx4090"}
    answer = server.post("/answer", asked).json()
    assert answer["verdict"] == "impossible"
    assert "GiB" in answer["sentence"]
    assert answer["plan"] is None
    assert not any(row["fits"] for row in answer["rows"])


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "Llama 3.2 1B", "machine": "rtx4090", "sequence": 8192, "micro_batch": 4},
        # Tested here: GPUs and host memory. `tests/tuner/test_ways_out.py` tests larger models.
        {
            "model": "Llama 3.2 1B",
            "machine": "a100-node",
            "device_memory_bytes": 12 * GIB,
            "host_memory_bytes": 6 * GIB,
        },
        # The DeepSpeed config has another value for each of these settings.
        {
            "model": "Llama 3.2 1B",
            "machine": "rtx4090",
            "sequence": 8192,
            "ds_config": {
                "bf16": {"enabled": True},
                "train_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": 3},
            },
        },
        # State in subgroups of another size would need other changes.
        {
            "model": "Llama 3.2 3B",
            "machine": "rtx4090",
            "sequence": 4096,
            "subgroup_size": 10**12,
            "device_memory_bytes": 12 * GIB,
            "host_memory_bytes": 48 * GIB,
        },
    ],
)
def test_where_nothing_fits_each_change_that_is_offered_does(server, asked):
    assert server.post("/answer", asked | {"peers": False}).json()["verdict"] == "impossible"
    ways = server.post("/ways-out", asked).json()["ways"]
    assert ways
    for way in ways:
        answer = server.post("/answer", asked | way["changes"] | {"peers": False}).json()
        assert answer["verdict"] != "impossible", way
        plan = next(row for row in answer["rows"] if row["role"] == "plan")
        assert plan["fits"]
        assert plan["iteration_s"] == pytest.approx(way["iteration_s"], rel=0.02)


def test_an_answer_says_how_to_train_with_it(server, tmp_path):
    given = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    asked = {**LLAMA, "gpus": 4, "ds_config": given, "peers": False}
    alone = server.post("/answer", asked).json()
    assert (alone["verdict"], alone["use"]["deepspeed"]) == ("no offload", given)
    assert alone["use"]["command"].startswith("torchrun --nproc-per-node 4 ")
    asked["device_memory_bytes"] = 2**34
    answer = server.post("/answer", asked).json()
    told, plan = answer["use"], Plan.model_validate(answer["plan"])
    emitted = emitted_config(plan, "plan.json", given, "bf16")
    assert told["deepspeed"] == emitted | {"ebbtide": {"plan": "plan.json"}}
    plan.save(tmp_path / "plan.json")
    assert read_request(told["deepspeed"]["ebbtide"], tmp_path).plan == plan
    assert told["command"].startswith("tune run -- torchrun --nproc-per-node 4 ")
    asked |= {"gpus": 16}
    assert "--nnodes 4 " in server.post("/answer", asked).json()["use"]["command"]


def test_a_profiled_workload_tells_no_other_batch(server):
    work, machine = workload()
    fields = {"machine": machine, "workload": work}
    asked = {name: noun.model_dump(mode="json") for name, noun in fields.items()}
    told = server.post("/ways-out", asked).json()
    assert told["ways"] == []
    assert told["another_way"].count("LoRA") == 1


def test_a_model_config_may_be_sent(server):
    config = {**MODELS["Llama 3 8B"], "rope_scaling": {"type": "linear"}}
    sent = server.post("/simulate", {"machine": "h100-node", "model": config}).json()
    named = server.post("/simulate", SIMULATED).json()
    assert sent["iteration_s"] == named["iteration_s"]


def test_a_wrong_number_in_a_models_config_is_refused(server):
    model = {**MODELS["Llama 3 8B"], "intermediate_size": [1]}
    wrong = server.post("/simulate", {"machine": "h100-node", "model": model})
    assert wrong.status_code == 422
    assert "must be a whole number" in wrong.json()["errors"][0]["rule"]


def test_layers_and_parameters_are_counted_as_the_models_makers_do(server):
    told = server.post("/answer", LLAMA | {"gpus": 4, "peers": False}).json()["workload"]
    assert told["layers"] == 32
    assert told["model_params"] == 8_030_261_248
    assert told["params"] == 8_030_261_248 // 4


def test_what_if_as_json_and_csv(server):
    asked = {
        **LLAMA,
        "strategies": ["zero3_offload", "superoffload"],
        "gpu_memory_bytes": [40 * GIB, 80 * GIB],
        "changes": {"h2d_bytes_per_s": [2e10, 5e10]},
    }
    rows = server.post("/what-if", asked).json()["rows"]
    work, machine = workload()
    table = what_if(
        work, machine, ["zero3_offload", "superoffload"], [40 * GIB, 80 * GIB], h2d_bytes_per_s=[2e10, 5e10], n_jobs=1
    )
    assert [row["iteration_s"] for row in rows] == pytest.approx(list(table["iteration_s"]))
    assert [row["fits"] for row in rows] == list(table["fits"])
    text = server.post("/what-if", {**asked, "format": "csv"})
    assert text.headers["content-type"].startswith("text/csv")
    assert len(list(csv.DictReader(io.StringIO(text.text)))) == len(rows)


def test_goodput(server):
    asked = {"iteration_s": 2.0, "stall_s": 1.0, "persist_s": 30.0, "mtbf_s": 14400.0}
    answer = server.post("/goodput", asked).json()
    cost, failures = CheckpointCost(1.0, persist_s=30.0), Failures(14400.0, 60.0)
    best = best_interval_steps(2.0, cost, failures)
    assert answer["best_interval_steps"] == best
    assert answer["goodput"] == expected_goodput(2.0, cost, failures, best)


def test_failures_cost_time_and_the_plan_says_how_often_to_save(server):
    answers = [server.post("/answer", {**LLAMA, "mtbf_s": hours * 3600.0, "peers": False}).json() for hours in (1, 24)]
    often, seldom = (answer["goodput"]["by_role"] for answer in answers)
    asked = {**LLAMA, "mtbf_s": 3600.0, "peers": False, "plan": answers[0]["plan"]}
    assert server.post("/answer", asked).json() == answers[0], "a plan that has an interval keeps it"
    assert often["plan"]["goodput"] < seldom["plan"]["goodput"] < 1
    assert often["plan"]["interval_steps"] < seldom["plan"]["interval_steps"]
    assert often["plan"]["stall_s"] < often["stock"]["stall_s"]
    assert often["plan"]["goodput"] > often["stock"]["goodput"]
    plan = Plan.model_validate(answers[0]["plan"])
    assert plan.checkpoint.interval_steps == often["plan"]["interval_steps"]
    row = next(row for row in answers[0]["rows"] if row["role"] == "plan")
    assert plan.prediction.host_peak_bytes == row["host_peak_bytes"]
    work, machine = workload()
    unsaved = plan.model_copy(update={"checkpoint": CheckpointPlan()})
    simulation = CheckpointPrice(work, unsaved, machine)
    cost = simulation.cost(plan.checkpoint.model_copy(update={"interval_steps": 0}))
    goodput = expected_goodput(simulation.iteration_s, cost, Failures(3600.0, 60.0), plan.checkpoint.interval_steps)
    assert often["plan"]["goodput"] == pytest.approx(goodput)
    waits_s = work.checkpoint_bytes / machine.storage_write_bytes_per_s.median
    assert often["stock"]["stall_s"] == pytest.approx(waits_s, rel=0.05)


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_failures_that_leave_no_time_to_train_are_refused_before_a_search(server, effort):
    response = server.post("/answer", {**LLAMA, "mtbf_s": 4.0, "effort": effort, "peers": False})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["key"] == "mtbf_s"
    assert "must leave time to train between failures" in error["rule"]


def test_a_machine_that_was_pushed_can_be_asked_about(server):
    fields = preset("h100-node").with_rates(h2d_bytes_per_s=5e9).model_dump(mode="json")
    fields["name"] = "our node 7"
    assert server.post("/machines", fields).status_code == 201
    names = [m["name"] for m in server.client.get("/machines").json()["machines"]]
    assert "our node 7" in names
    slow = server.post("/simulate", {**SIMULATED, "machine": "our node 7"}).json()
    fast = server.post("/simulate", SIMULATED).json()
    assert slow["iteration_s"] > fast["iteration_s"]
    refused = server.post("/machines", {**fields, "name": "h200"})
    assert refused.status_code == 422


def test_stocks_timeline_is_that_of_its_row_where_parameters_leave_the_device(server):
    # The downloaded trace shows the same strategy. DeepSpeed alone is faster with the parameters in host memory.
    asked = {"model": "Llama 3.2 3B", "machine": "rtx4090", "sequence": 2048, "peers": False}
    answer = server.post("/answer", asked).json()
    (stock,) = [row for row in answer["rows"] if row["role"] == "stock"]
    assert stock["label"].endswith("offload_param cpu")
    spans = answer["timelines"]["stock"]["duration_s"]
    assert spans == pytest.approx(stock["iteration_s"], rel=0.02)
    scenario = {name: asked[name] for name in ("model", "machine", "sequence")}
    events = server.post("/trace", {"plan": answer["plan"], "scenario": scenario}).json()["traceEvents"]
    shown = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert shown == [f"predicted: {stock['label']}", "predicted: ebbtide"]


@pytest.mark.parametrize(("stage", "stock"), [(2, "zero_offload"), (3, "zero3_offload")])
def test_a_what_if_without_strategies_compares_those_of_the_zero_stage(stage, stock):
    told = answers.what_if(WhatIf(**LLAMA, zero_stage=stage), lambda *_: None)
    assert [row["strategy"] for row in told["rows"]] == [stock, "ebbtide"]
