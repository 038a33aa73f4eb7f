"""Tests of the HTTP service's error messages: they name the field that the caller sent, and no internals
of the service's libraries.
"""

import asyncio
import json
import re
import sqlite3

import numpy as np
import pytest
from ebbtide.simulator import Machine, Plan, Workload, preset
from ebbtide.simulator.analysis import many_plans
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.plan import CheckpointPlan
from ebbtide.simulator.rules import SHOWN, RuleError, broken, cut, explain
from ebbtide.tuner.placements.search import LONG
from ebbtide.tuner.service.pool import RequestQueue, WorkerError
from ebbtide.tuner.service.quota import Quota, check_ops, check_search_ops, estimated_ops
from ebbtide.tuner.service.report import Run
from ebbtide.tuner.service.requests import Answer, Goodput, PlanJob, Scenario, Simulate, resolve
from pydantic import BaseModel, ValidationError

LLAMA = {"machine": "h100-node", "model": "Llama 3 8B"}
MODEL = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100}
HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
MACHINE = preset("h100-node").model_dump(mode="json")
SPAN = {"kind": "forward", "lane": "device compute", "start_s": 0, "end_s": 1}
PLAN = {"subgroup_size": 10, "placement": [{"placement": "host", "count": 2}], "staging_slots": 0}
INTERNALS = (
    "pydantic",
    "Input should",
    "function-",
    "[type=",
    "Traceback",
    "constrained-",
    "NaN",
    "JSON compliant",
    "arg is an empty",
    "unexpected keyword",
    "sqlite",
    "numpy",
)

CASES = [
    ("/simulate", {**LLAMA, "link_bytes_per_s": 1}, "link_bytes_per_s"),
    ("/simulate", {**LLAMA, "device_memory_bytes": 1}, "device_memory_bytes"),
    ("/simulate", {**LLAMA, "gpus": 0}, "gpus"),
    ("/simulate", {**LLAMA, "gpus": "many"}, "gpus"),
    ("/simulate", {**LLAMA, "gpu": 1}, "gpu"),
    ("/simulate", {**LLAMA, "tensor_parallel": 7}, "tensor_parallel"),
    ("/simulate", {**LLAMA, "machine": ""}, "machine"),
    ("/simulate", {**LLAMA, "machine": 5}, "machine"),
    ("/simulate", {**LLAMA, "machine": "nowhere"}, "machine"),
    ("/simulate", {**LLAMA, "machine": {**MACHINE, "cpu_cores": 0}}, "machine.cpu_cores"),
    ("/simulate", {**LLAMA, "machine": {k: v for k, v in MACHINE.items() if k != "cpu_cores"}}, "machine.cpu_cores"),
    ("/simulate", {**LLAMA, "machine": {**MACHINE, "rank_shares": {"0": {}}}}, "machine.rank_shares"),
    (
        "/simulate",
        {**LLAMA, "machine": {**MACHINE, "h2d_bytes_per_s": {**MACHINE["h2d_bytes_per_s"], "q1": 1e30}}},
        "machine.h2d_bytes_per_s.median",
    ),
    ("/simulate", {"machine": "h200"}, "model"),
    ("/simulate", {**LLAMA, "model": "GPT-5"}, "model"),
    ("/simulate", {**LLAMA, "model": {k: v for k, v in MODEL.items() if k != "layers"}}, "model"),
    ("/simulate", {**LLAMA, "model": {**MODEL, "hidden": "64"}}, "model.hidden"),
    ("/simulate", {**LLAMA, "model": {"model_type": "x"}}, "model.model_type"),
    ("/simulate", {**LLAMA, "model": {"model_type": "mistral"}}, "model.num_key_value_heads"),
    ("/simulate", {**LLAMA, "model": {**HF, "model_type": "phi", "qk_layernorm": True}}, "model.qk_layernorm"),
    ("/simulate", {**LLAMA, "model": {"model_type": "llava", "text_config": HF}}, "model.text_config"),
    ("/simulate", {**LLAMA, "model": {**MODEL, "wings": 2}}, "model.wings"),
    ("/simulate", {**LLAMA, "ds_config": {"zero_optimization": {"stage": 9}}}, "ds_config.zero_optimization.stage"),
    ("/simulate", {**LLAMA, "ds_config": {"train_batch_size": "x"}}, "ds_config.train_batch_size"),
    ("/simulate", {**LLAMA, "strategy": "magic"}, "strategy"),
    ("/simulate", {**LLAMA, "micro_batch": True}, "micro_batch"),
    ("/simulate", {**LLAMA, "ds_config": {}}, "ds_config"),
    ("/simulate", {**LLAMA, "ds_config": HF}, "ds_config"),
    ("/simulate", {**LLAMA, "model": {"train_batch_size": 4}}, "model"),
    (
        "/simulate",
        {**LLAMA, "model": {**HF, "quantization_config": {"load_in_4bit": True}}},
        "model.quantization_config",
    ),
    ("/simulate", {**LLAMA, "model": {**HF, "vocab_size": 10**15}}, "model.vocab_size"),
    ("/simulate", {**LLAMA, "model": {**HF, "num_hidden_layers": 0}}, "model.num_hidden_layers"),
    ("/simulate", {**LLAMA, "model": {**HF, "num_attention_heads": 7}}, "model.num_attention_heads"),
    ("/simulate", {**LLAMA, "strategy": "twin_flow", "options": {"ratio": 2}}, "options.ratio"),
    ("/simulate", {**LLAMA, "strategy": "twin_flow", "options": {"workload": 1}}, "options.workload"),
    ("/simulate", {**LLAMA, "strategy": "twin_flow", "options": {"name": 1}}, "options.name"),
    ("/simulate", {**LLAMA, "plan": {**PLAN, "prefetch": 3}}, "plan.prefetch"),
    ("/simulate", {**LLAMA, "plan": PLAN}, "plan.ways"),
    ("/simulate", {**LLAMA, "subgroup_size": 1}, "subgroup_size"),
    ("/what-if", {**LLAMA, "changes": {"wings": [1]}}, "changes.wings"),
    ("/what-if", {**LLAMA, "changes": {"h2d_bytes_per_s": [1]}}, "changes.h2d_bytes_per_s"),
    ("/what-if", {**LLAMA, "strategies": ["magic"]}, "strategies"),
    ("/what-if", {**LLAMA, "gpu_memory_bytes": [4e10], "device_memory_bytes": 8e10}, "device_memory_bytes"),
    ("/goodput", {"iteration_s": 1, "mtbf_s": 0}, "mtbf_s"),
    ("/goodput", {"iteration_s": 1, "mtbf_s": 10, "persist_s": 1e9, "interval_steps": 1}, "persist_s"),
    ("/jobs/search", {**LLAMA, "model": None, "workload": "x"}, "model"),
    ("/runs", {"name": "x", "spans": [{**SPAN, "end_s": -1}]}, "spans.0.end_s"),
    ("/runs", {"name": "x", "spans": [SPAN, {**SPAN, "kind": "nap"}]}, "spans.1.kind"),
    ("/runs", {"name": "x", "spans": [{**SPAN, "start_s": 2}]}, "spans.0.end_s"),
    ("/machines", {**MACHINE, "name": "a" * 100}, "name"),
]


@pytest.mark.parametrize(("path", "body", "key"), CASES)
def test_an_error_names_the_field_that_was_sent(server, path, body, key):
    response = server.post(path, body)
    assert response.status_code == 422, response.text
    first = response.json()["errors"][0]
    assert first["key"] == key, first
    assert not [word for word in INTERNALS if word in response.text]


@pytest.mark.parametrize(
    ("body", "rule", "value"),
    [
        ({"micro_batch": True}, "must be a number", "True"),
        (
            {"strategy": "twin_flow", "options": {"ratio": "x"}},
            "each value in options must be a number, true or false, but got 'x'",
            "'x'",
        ),
        ({"machine": "<b>"}, "the name in the field machine must consist of letters, digits", "'<b>'"),
        ({"strategy": "magic"}, "", "'magic'"),
        ({"model": {**HF, "vocab_size": 10**15}}, "at most 999,999,999", "1000000000000000"),
    ],
)
def test_an_error_tells_the_limit_and_the_value(server, body, rule, value):
    (first, *_) = server.post("/simulate", {**LLAMA, **body}).json()["errors"]
    assert rule in first["rule"]
    assert first["value"] == value


HALF = json.dumps({"model": {**MODEL, "name": "\ud800"}})


@pytest.mark.parametrize("path", ["/simulate", "/jobs/plan"])
def test_half_a_character_is_refused(server, path):
    response = server.client.post(path, content=HALF, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert "valid Unicode" in response.text


@pytest.mark.parametrize("end_s", [0, 5e-324])
def test_a_run_too_short_to_be_drawn_is_refused(server, end_s):
    response = server.post("/runs", {"name": "x", "spans": [{**SPAN, "end_s": end_s}]})
    assert response.status_code == 422
    assert response.json()["errors"][0]["key"] == "spans"


@pytest.mark.parametrize("name", ["..", ".", "<script>x", "=cmd|x", "\u202ea", "  ", "a/b", "../../etc"])
def test_a_machine_that_nobody_could_ask_for_is_refused(server, name):
    response = server.post("/machines", {**MACHINE, "name": name})
    assert response.status_code == 422
    assert response.json()["errors"][0]["key"] == "name"


def test_a_pushed_machine_takes_neither_the_examples_name_nor_anothers(server):
    shown = server.client.get("/models").json()["workloads"][0]["machine"]
    example = server.client.get(f"/machines/{shown}").json()
    name = example["name"]
    assert shown == f"{name} (example)"
    try:
        assert server.post("/machines", {**example, "cpu_cores": 77}).status_code == 201
        assert server.client.get(f"/machines/{shown}").json() == example
        assert server.post("/machines", {**example, "cpu_cores": 77}).status_code == 201, "pushed again"
        clash = server.post("/machines", {**example, "cpu_cores": 78})
        assert clash.status_code == 409
        assert "replace=true" in clash.json()["errors"][0]["rule"]
        assert server.client.get(f"/machines/{name}").json()["cpu_cores"] == 77
        assert server.post("/machines?replace=true", {**example, "cpu_cores": 78}).status_code == 201
        assert server.client.get(f"/machines/{name}").json()["cpu_cores"] == 78
    finally:
        server.client.delete(f"/machines/{name}")
    assert server.post("/machines", {**example, "name": shown}).status_code == 422


def test_what_nobody_has_foreseen_has_the_common_form_and_headers(tmp_path, monkeypatch):
    from ebbtide.tuner.service.app import create_app
    from ebbtide.tuner.service.resources import Service
    from ebbtide.tuner.service.store import Store
    from fastapi.testclient import TestClient

    service = Service(Store(tmp_path / "x.db"), hosts=("testserver",))
    monkeypatch.setattr(service.store, "runs", lambda _: 1 / 0)
    response = TestClient(create_app(service)).get("/api/v1/runs")
    assert response.status_code == 500
    assert response.json()["errors"][0]["rule"].startswith("the request failed")
    assert "content-security-policy" in response.headers


WRITES = [("/machines", MACHINE | {"name": "m"}), ("/runs", {"name": "x", "spans": [SPAN]}), ("/jobs/plan", LLAMA)]


@pytest.mark.parametrize(("path", "body"), WRITES)
def test_a_full_disk_is_told_as_one_and_ends(held, path, body):
    service, client = held
    writer = service.store._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count={pages}")
    filled = {**body, "machine": MACHINE} if path == "/jobs/plan" else body
    for _ in range(20):  # until the existing pages are full
        response = client.post(f"/api/v1{path}?replace=true", json=filled)
        if response.status_code != 201:
            break
        filled = {**filled, "name": f"{filled.get('name', 'n')}1"}
    assert response.status_code == 507, response.text
    assert "disk is full" in response.json()["errors"][0]["rule"]
    writer.execute("PRAGMA max_page_count=100000")
    assert client.post(f"/api/v1{path}", json=filled).status_code == 201


@pytest.mark.parametrize(("path", "body"), WRITES)
def test_a_database_that_fails_is_not_the_requests_fault(held, monkeypatch, path, body):
    service, client = held

    def broken_disk(*_):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(service.store, "_transaction", broken_disk)
    response = client.post(f"/api/v1{path}", json=body)
    assert response.status_code == 503, response.text
    assert not [word for word in INTERNALS if word in response.text]


def test_a_hosts_name_is_the_same_in_capitals(server):
    port = server.url.rpartition(":")[2]
    assert server.client.get("/models", headers={"host": f"LOCALHOST:{port}"}).status_code == 200


@pytest.mark.parametrize("mtbf_s", [5e-324, 1e-300])
def test_numbers_beyond_what_can_be_computed_are_refused_in_our_words(server, mtbf_s):
    for path, body in (("/goodput", {"iteration_s": 1e9, "mtbf_s": mtbf_s}), ("/answer", {**LLAMA, "mtbf_s": mtbf_s})):
        response = server.post(path, body)
        assert response.status_code in (200, 422), response.text
        assert not [word for word in INTERNALS if word in response.text]


def _slips(model):
    # Names of up to five letters are left out.
    return [(f"{name[:-2]}{name[-1]}", name) for name in model.model_fields if len(name) > 5]


@pytest.mark.parametrize("model", [Scenario, Answer, PlanJob, Goodput, Machine, Workload, Plan, Run, CheckpointPlan])
def test_a_slip_in_any_field_is_told_with_the_name_that_is_meant(model):
    for slip, name in _slips(model):
        with pytest.raises(ValidationError) as caught:
            model.model_validate({slip: 1})
        row = next(row for row in broken(caught.value, {slip: 1}, model) if row.key == slip)
        assert f"did you mean '{name}'" in row.rule, row


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/answer", {**LLAMA, "sequnce": 1}, "'sequence'"),
        ("/jobs/plan", {**LLAMA, "machine": {**MACHINE, "cpu_core": 1}}, "'cpu_cores'"),
        ("/machines", {**MACHINE, "cpu_core": 1}, "'cpu_cores'"),
        ("/simulate", {**LLAMA, "plan": {**PLAN, "prefech": 1}}, "'prefetch'"),
        ("/simulate", {**LLAMA, "strategy": "zero3_ofload"}, "'zero3_offload'"),
        ("/simulate", {**LLAMA, "strategy": "twin_flow", "options": {"ratoi": 1}}, "'ratio'"),
        ("/what-if", {**LLAMA, "changes": {"h2d_bytes_per_sec": [1e9]}}, "'h2d_bytes_per_s'"),
        ("/what-if", {**LLAMA, "strategies": ["zero3_ofload"]}, "'zero3_offload'"),
        ("/simulate", {**LLAMA, "machine": "h1000-node"}, "'h100-node'"),
        ("/simulate", {**LLAMA, "model": "Lama 4 8B"}, "'Llama 3 8B'"),
    ],
)
def test_each_request_suggests_the_name_that_is_meant(server, path, body, meant):
    (first, *_) = server.post(path, body).json()["errors"]
    assert meant in first["rule"], first


@pytest.mark.parametrize(("machine", "model"), [("RTX 4090", "Llama 3 8B"), ("4090", "llama-3-8b")])
def test_names_are_known_in_any_spelling(server, machine, model):
    response = server.post("/simulate", {"machine": machine, "model": model})
    assert response.status_code == 200, response.text
    assert response.content == server.post("/simulate", {"machine": "rtx4090", "model": "Llama 3 8B"}).content


def test_values_are_cut():
    class File(BaseModel):
        count: int

    with pytest.raises(ValidationError) as caught:
        File.model_validate({"count": "x" * 50_000})
    assert explain(caught.value).count("x") < SHOWN
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate_json("x" * 50_000)
    assert len(explain(caught.value)) < SHOWN
    assert len(cut("x" * 50_000)) < 1100
    assert len(str(RuleError("x" * 50_000))) < 1100


def test_of_alternatives_the_nearest_is_told():
    given = {"model": "Llama 3 8B", "machine": {"name": "x", "cpu_cores": "many"}}
    with pytest.raises(ValidationError) as caught:
        Scenario.model_validate(given)
    rows = {row.key: row for row in broken(caught.value, given)}
    assert rows["machine.cpu_cores"].sentence == "machine.cpu_cores must be a whole number, but got 'many'"
    assert "machine" not in rows


def test_an_answer_is_tried_again_when_its_worker_ends():
    lane, asked = RequestQueue("light", 1, 0, 60.0, 4, Quota()), {"machine": "h100-node", "model": MODEL}
    killed = []

    def kill(_):
        for worker in lane._all:
            if worker.alive and len(killed) < most:
                killed.append(worker)
                worker.kill()

    async def both():
        nonlocal most
        try:
            result = await lane.call("answer", asked, kill)
            assert json.loads(result.body)["plan"]
            assert len(killed) == 1, "no worker was killed: nothing was tested"
            most = 3
            with pytest.raises(WorkerError, match="short of memory"):
                # So that it is not computed before the worker is killed.
                await lane.call("answer", {**asked, "model": "Llama 3 8B"}, kill)
            assert len(killed) == 3
        finally:
            lane.close()
            for worker in lane._all:
                await worker._process.wait()

    most = 1
    asyncio.run(both())


def _most_accumulation(scenario, quota):
    with pytest.raises(RuleError) as caught:
        check_search_ops(scenario, quota)
    return int(re.search(r"at most (\d+)", str(caught.value)).group(1))


def _arrays(sweep):
    # Return the numpy arrays of a plan sweep (`PlanSweep`), whose memory a test adds up. These are the sweep's own
    # arrays, and the scratch arrays that sweeps of a thread share.
    own = [*vars(sweep).values(), *vars(many_plans._SCRATCH).values()]
    return [kept for kept in own if isinstance(kept, np.ndarray)]


@pytest.mark.parametrize("model", ["Llama 3 70B", "Qwen3 4B"])
def test_the_longest_step_that_is_searched_fits_into_a_worker(model):
    quota = Quota()
    asked = Answer(machine="h100-node", model=model, accumulation=4096)
    most = _most_accumulation(asked, quota)
    longest = asked.model_copy(update={"accumulation": most})
    check_search_ops(longest, quota)
    machine, workload = resolve(longest)
    sweeps = [PlanSweep(workload, machine, iterations=n) for n in (LONG, 3)]
    for sweep in sweeps:
        sweep.evaluate(np.zeros(len(workload.subgroups), dtype=np.int8))
    held = {id(kept): kept.nbytes for sweep in sweeps for kept in _arrays(sweep)}
    assert sum(held.values()) < 0.4 * quota.worker_bytes, "sweeps hold too much memory"
    assert most >= 64, "long steps are common where memory is short"


@pytest.mark.parametrize("path", ["/answer", "/ways-out", "/jobs/plan", "/jobs/what-if", "/what-if"])
@pytest.mark.parametrize(
    "long",
    [
        {"accumulation": 4096},
        {"ds_config": {"gradient_accumulation_steps": 4096, "bf16": {"enabled": True}}},
        {"ds_config": {"train_batch_size": 2048, "train_micro_batch_size_per_gpu": 1}},
    ],
)
def test_too_long_a_step_is_refused_before_any_work(held, monkeypatch, path, long):
    service, client = held
    monkeypatch.setattr(service.pool, "answer", None)
    monkeypatch.setattr(service.jobs, "submit", None)
    (first, *_) = client.post(f"/api/v1{path}", json={**LLAMA, **long}).json()["errors"]
    assert first["key"] == "accumulation"
    assert re.search(r"at most \d+ for this model on this server, but got (4096|2048)", first["rule"])


def test_a_long_step_without_a_search_is_answered(held):
    simulated = Simulate(**LLAMA, accumulation=1024)
    check_search_ops(simulated, Quota())
    assert check_ops(estimated_ops(simulated), 1, Quota()) is False
