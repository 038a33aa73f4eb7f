"""Tests of jobs of the HTTP service: a caller can watch and cancel a job, and it survives a killed worker or server."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ebbtide.simulator import Plan, preset, workload_from_model
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.configurations.evaluation import SearchQuestion
from ebbtide.tuner.configurations.space import KNOBS, Configuration
from ebbtide.tuner.placements.planning import predict
from ebbtide.tuner.service import answers, jobs, responses
from ebbtide.tuner.service.pool import Pool, Result
from ebbtide.tuner.service.quota import Quota
from ebbtide.tuner.service.requests import MODELS, SearchJob, Simulate, space_of
from ebbtide.tuner.service.store import Store

from tests.tuner.service.conftest import Server
from tests.tuner.service.test_hostile import children

SMALL = {"machine": "rtx4090", "model": "Llama 3.2 1B"}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100}
GRID = {**SMALL, "strategies": ["zero3_offload"], "changes": {"h2d_bytes_per_s": [1e10 + 1e8 * i for i in range(12)]}}
PLAIN = {"zero_optimization": {"stage": 3}}
PATIENCE_S = 120  # limit for work that takes seconds on a machine with a free core


def ended(server, job, limit_s=300):
    """Follow the events of a job of the service. Return the state of the job once it is done, failed or cancelled."""
    deadline = time.monotonic() + limit_s
    for _, state in server.events(f"/jobs/{job}/events"):
        if state["state"] in ("done", "failed", "cancelled"):
            return state
        assert time.monotonic() < deadline
    raise AssertionError("the stream ended before the job")


FULL = sqlite3.OperationalError("database or disk is full")
DAMAGED = sqlite3.DatabaseError("database disk image is malformed")


@pytest.mark.parametrize(("name", "error"), [("claim", DAMAGED), ("claim", FULL), ("finish", FULL), ("expire", FULL)])
def test_no_job_is_lost_to_a_database_that_cannot_be_used_for_a_while(name, error, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    store, left = Store(tmp_path / "s.db"), [3]
    write = getattr(store, name)

    def full(*arguments):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return write(*arguments)

    monkeypatch.setattr(store, name, full)

    async def call(*_):
        return Result(b"{}")

    async def served():
        pool = SimpleNamespace(jobs=SimpleNamespace(size=1, call=call))
        line = jobs.Jobs(store, pool, Quota(), jobs.Feed())
        line.start()
        job = (await line.submit("plan", {}, "one"))["id"]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            if line.state(job)["state"] == "done" and left[0] < 0:
                break
        await line.stop()
        return line.state(job)["state"]

    assert asyncio.run(served()) == "done"
    assert left[0] < 0
    store.close()


@pytest.mark.parametrize("unreadable", ["CAST(x'ff' AS TEXT)", "'{\"n\": '"])
def test_a_job_whose_request_cannot_be_read_has_failed(unreadable, tmp_path):
    store = Store(tmp_path / "s.db")

    async def call(*_):
        return Result(b"{}")

    async def served():
        pool = SimpleNamespace(jobs=SimpleNamespace(size=1, call=call))
        line = jobs.Jobs(store, pool, Quota(), jobs.Feed())
        posted = [(await line.submit("plan", {}, title))["id"] for title in ("unreadable", "next")]
        with sqlite3.connect(tmp_path / "s.db") as db:
            db.execute(f"UPDATE jobs SET request = {unreadable} WHERE id = ?", posted[:1])
        line.start()
        deadline = time.monotonic() + PATIENCE_S
        while line.state(posted[1])["state"] != "done" and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await line.stop()
        return [line.state(job) for job in posted]

    failed, done = asyncio.run(served())
    assert (failed["state"], done["state"]) == ("failed", "done")
    assert "could not be run: " in failed["note"]
    store.close()


def test_a_job_that_is_cancelled_while_it_is_claimed_is_not_run(tmp_path, monkeypatch):
    store, run = Store(tmp_path / "s.db"), []
    claim = store.claim

    async def call(name, request, _):
        run.append(request["n"])
        return Result(b"{}")

    async def served():
        pool = SimpleNamespace(jobs=SimpleNamespace(size=1, call=call))
        line, loop = jobs.Jobs(store, pool, Quota(), jobs.Feed()), asyncio.get_running_loop()

        def crossed():
            job = claim()
            if job is not None and job["title"] == "cancelled":
                stopped = asyncio.run_coroutine_threadsafe(line.cancel(job["id"]), loop)
                assert stopped.result(30)
            return job

        monkeypatch.setattr(store, "claim", crossed)
        posted = [(await line.submit("plan", {"n": n}, title))["id"] for n, title in enumerate(("cancelled", "run"))]
        line.start()
        while line.state(posted[1])["state"] != "done":
            await asyncio.sleep(0.01)
        await line.stop()
        return line.state(posted[0])["state"]

    assert asyncio.run(served()) == "cancelled"
    assert run == [1]
    store.close()


def test_a_job_behind_one_that_was_forgotten_while_it_was_claimed_is_claimed(tmp_path, monkeypatch):
    store = Store(tmp_path / "s.db")
    gone, next_one = (store.add_job("plan", "{}", title)["id"] for title in ("gone", "next"))
    look = store.job

    def forgotten(job):
        if job == gone and store.finish(gone, "cancelled", ""):
            assert store.forget("jobs", gone)
        return look(job)

    monkeypatch.setattr(store, "job", forgotten)
    assert store.claim()["id"] == next_one
    store.close()


def test_a_job_ends_where_no_worker_can_be_started(tmp_path, monkeypatch):
    async def none(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none)
    store = Store(tmp_path / "s.db")

    async def served():
        pool = Pool(Quota(), light_workers=1)
        line = jobs.Jobs(store, pool, Quota(), jobs.Feed())
        line.start()
        job = (await line.submit("plan", {}, "one"))["id"]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            if line.state(job)["state"] == "failed":
                break
        await line.stop()
        return line.state(job)

    state = asyncio.run(served())
    assert state["state"] == "failed"
    assert "Resource temporarily unavailable" in state["note"]
    store.close()


def test_a_plan_job_is_watched_to_its_end(server):
    job = server.post("/jobs/plan", {**SMALL, "mtbf_s": 14400}).json()
    seen = [state for _, state in server.events(f"/jobs/{job['id']}/events")]
    assert seen[-1]["state"] == "done"
    assert seen[-1]["attempts"] == 1
    result = server.client.get(f"/jobs/{job['id']}/result").json()
    plan = Plan.model_validate(result["plan"])
    machine = preset("rtx4090")
    model = {**MODELS["Llama 3.2 1B"], "_name_or_path": "Llama 3.2 1B"}
    work = workload_from_model(model, machine, sequence=2048, micro_batch=1)
    # The mean over steps that clip and steps that do not.
    expected = predict(work, machine, plan, Limits.of(work, machine))
    assert plan.prediction.iteration_s == pytest.approx(expected.iteration_s)
    assert plan.checkpoint.interval_steps > 0
    # Of two subgroup sizes with times within half a percent, a full search takes the larger one.
    assert plan.prediction.iteration_s <= result["quick_iteration_s"] * (1 + 1e-9)
    responses.PlanResult.model_validate(result)  # as the API's schema describes it


def test_a_grid_job_tells_how_far_it_is(server):
    many = {"h2d_bytes_per_s": [1e10 + 1e7 * i for i in range(40)]}
    job = server.post("/jobs/what-if", {**GRID, "changes": many}).json()
    notes = {state["note"] for _, state in server.events(f"/jobs/{job['id']}/events")}
    assert any("of 40 points" in note for note in notes)
    result = server.client.get(f"/jobs/{job['id']}/result").json()
    assert len(responses.Grid.model_validate(result).rows) == 40


def test_what_is_forgotten_is_gone_unless_it_is_still_open(server):
    job = server.post("/jobs/what-if", {**GRID, "changes": {"clip": [0.5, 1]}}).json()["id"]
    ended(server, job)
    posted = [server.post("/jobs/plan", SMALL) for _ in range(2)]
    assert [one.status_code for one in posted] == [201, 201], [one.text for one in posted]
    waits = posted[-1].json()["id"]
    refused = server.client.delete(f"/jobs/{waits}?forget=true")
    assert refused.status_code == 422
    assert "cancel it first" in refused.text
    left = server.client.delete(f"/jobs/{waits}").json()  # otherwise the search runs, and the next tests wait for it
    assert left["state"] == "cancelled"
    span = {"kind": "forward", "lane": "device compute", "start_s": 0, "end_s": 1}
    run = server.post("/runs", {"name": "once", "spans": [span]}).json()["id"]
    machine = preset("rtx4090").model_copy(update={"name": "mine"})
    server.post("/machines", machine.model_dump(mode="json"))
    for path in (f"/jobs/{job}?forget=true", f"/runs/{run}", "/machines/mine"):
        assert server.client.delete(path).status_code == 200, path
        assert server.client.delete(path).status_code == 404, path
        assert server.client.get(path).status_code == 404, path


def test_a_search_job_finds_what_the_api_finds(server):
    asked = {**SMALL, "global_batch": 4, "free": ["micro_batch", "accumulation", "offload"]}
    job = server.post("/jobs/search", asked).json()
    seen = [state for _, state in server.events(f"/jobs/{job['id']}/events")]
    assert seen[-1]["state"] == "done", seen[-1]["note"]
    result = server.client.get(f"/jobs/{job['id']}/result").json()
    assert responses.SearchResult.model_validate(result).complete
    tried = len(result["outcomes"])
    assert tried >= 6, "three micro-batches, with and without offload"
    assert any(" configurations" in state["note"] for state in seen)
    model = {**MODELS["Llama 3.2 1B"], "_name_or_path": "Llama 3.2 1B"}
    question = SearchQuestion(model, preset("rtx4090"))
    best = question.answer(Configuration(**result["best"]["configuration"]))
    assert result["best"]["tokens_per_s"] == pytest.approx(best.tokens_per_s, rel=1e-9)
    fitting = [o["tokens_per_s"] for o in result["outcomes"] if o["fits"]]
    assert result["best"]["tokens_per_s"] == max(fitting)


@pytest.mark.parametrize(
    "fields",
    [
        {"kernels": "eager"},
        {"flash_attention": False},
        {"fused_loss": True},
        {"recompute_share": 0.5},
        {"tensor_parallel": 2, "gpus": 2},
        {
            "ds_config": {
                "fp16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "zero_optimization": {"stage": 1},
            }
        },
    ],
)
def test_a_search_predicts_as_a_simulation_of_the_same_fields_does(fields):
    asked = {"machine": "h100-node", "model": "Llama 3.2 1B", "sequence": 1024, "gpus": 1, **fields}
    search = SearchJob(**asked, free=["recompute"], offload=False)
    found = answers.search_job(search, lambda *_: None)["best"]
    kept = not found["configuration"]["recompute"]
    if kept:
        asked.pop("recompute_share", None)
    told = answers.simulate(Simulate(**asked, strategy="no_offload", keep_activations=kept), lambda *_: None)
    assert found["tokens_per_s"] == pytest.approx(told["tokens_per_s"], rel=1e-9)


def test_a_search_keeps_the_samples_of_a_step_in_the_deepspeed_config():
    config = {"bf16": {"enabled": True}, "train_batch_size": 6, "zero_optimization": {"stage": 3}}
    asked = {**SMALL, "model": TINY, "gpus": 1, "ds_config": config, "free": ["micro_batch", "accumulation"]}
    outcomes = answers.search_job(SearchJob(**asked, trials=20), lambda *_: None)["outcomes"]
    batches = [(one["configuration"]["micro_batch"], one["configuration"]["accumulation"]) for one in outcomes]
    assert {micro * accumulation for micro, accumulation in batches} == {6}


def test_a_search_varies_all_settings_unless_told_otherwise(server):
    job = server.post("/jobs/search", {**SMALL, "model": TINY, "trials": 4}).json()
    assert ended(server, job["id"])["state"] == "done"
    found = responses.SearchResult.model_validate(server.client.get(f"/jobs/{job['id']}/result").json())
    assert set(found.free) == set(KNOBS)
    assert {*found.outcomes[0].configuration} == {*KNOBS}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"free": ["colour"]}, "micro_batch"),
        ({"trials": 10**6}, "300"),
        ({"model": "Llama 3 70B", "global_batch": 4096}, "global_batch"),
        ({"model": None, "workload": "x"}, "model must be given"),
        ({"ds_config": {"zero_optimization": 3}}, "zero_optimization must be an object"),
    ],
)
def test_a_search_that_cannot_be_is_refused_at_once(server, changes, rule):
    response = server.post("/jobs/search", {**SMALL, **changes})
    assert response.status_code == 422
    assert rule in response.text


def test_a_search_without_a_result_fails_with_the_reason(server):
    job = server.post("/jobs/search", {**SMALL, "global_batch": 7, "micro_batch": 2, "free": ["gpus"]}).json()
    state = ended(server, job["id"])
    assert state["state"] == "failed"
    assert "the global batch must be micro_batch x accumulation x gpus" in state["note"]


LONG = {**GRID, "strategies": ["ebbtide"], "model": "Llama 3 8B", "subgroup_size": 100_000_000}


def test_a_running_job_is_cancelled_and_the_next_one_runs(server):
    changes = {"h2d_bytes_per_s": [1e10 + 1e6 * i for i in range(256)]}
    job = server.post("/jobs/what-if", LONG | {"changes": changes}).json()["id"]
    for _, state in server.events(f"/jobs/{job}/events"):
        if state["state"] == "running":
            break
    assert server.client.delete(f"/jobs/{job}").json()["state"] == "cancelled"
    following = server.post("/jobs/what-if", GRID).json()
    assert ended(server, following["id"])["state"] == "done"
    assert server.client.get(f"/jobs/{job}/result").status_code == 404


def test_a_job_that_cannot_be_done_fails_with_the_reason(server):
    job = server.post("/jobs/plan", {**SMALL, "model": "Llama 3 70B"}).json()
    state = ended(server, job["id"])
    assert state["state"] == "failed"
    assert "GiB" in state["note"]


def _wait_until_gone(processes):
    # A worker ends when its stdin closes. Otherwise it would go on computing without its server.
    assert processes
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline, "workers outlive their server"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Yield a server for the tests that end it."""
    made = Server(tmp_path_factory.mktemp("ended") / "service.db")
    yield made
    if made.process.poll() is None:
        made.stop()


@pytest.fixture
def mortal(started):
    """Return a running server that a test may kill. If an earlier test has ended it, start it again on the same
    database. Cancel all its jobs.
    """
    if started.process.poll() is not None:
        started.start()
    for job in started.client.get("/jobs").json()["jobs"]:
        started.client.delete(f"/jobs/{job['id']}")
    return started


@pytest.mark.slow
def test_a_killed_server_loses_no_job_and_counts_every_attempt(mortal):
    answers = [mortal.post("/jobs/what-if", GRID) for _ in range(3)]
    told = [answer.text for answer in answers if answer.status_code != 201]
    assert not told, (told, mortal.errors.read_text())
    jobs = [answer.json()["id"] for answer in answers]
    for _, state in mortal.events(f"/jobs/{jobs[1]}/events"):
        if state["state"] == "running":
            break
    workers = children(mortal.process.pid)
    mortal.kill()
    _wait_until_gone(workers)
    mortal.start()
    states = [ended(mortal, job) for job in jobs]
    assert {state["state"] for state in states} == {"done"}
    interrupted = [s for s in states if s["attempts"] > 1]
    assert interrupted, "the kill hit no running job: it tested nothing"
    for state in states:
        assert len(state["history"]) == state["attempts"]
        assert state["history"][-1]["outcome"] == "done"
        rows = mortal.client.get(f"/jobs/{state['id']}/result").json()["rows"]
        assert len(rows) == 12


def test_a_server_that_ends_ends_its_streams(mortal):
    # The service stops at once although clients read its event streams, and closes them.
    server = mortal
    changes = {"h2d_bytes_per_s": [1e10 + 1e6 * i for i in range(256)]}
    job = server.post("/jobs/what-if", LONG | {"changes": changes}).json()["id"]
    with server.client.stream("GET", "/events") as one, server.client.stream("GET", f"/jobs/{job}/events") as other:
        both = [response.iter_lines() for response in (one, other)]
        for lines in both:
            next(lines)
        server.process.terminate()
        for lines in both:
            for _ in lines:  # to the end of the stream. A stream that is cut off raises an error
                pass
    server.process.wait(PATIENCE_S)
    assert "Traceback" not in server.errors.read_text()
    assert "timeout" not in server.errors.read_text()


WITHOUT_A_READER = """
import os
from types import SimpleNamespace
from ebbtide.tuner.service import worker
read, written = os.pipe()
os.close(read)
asked = SimpleNamespace(model_validate=lambda body: body)
table = {"x": (asked, lambda body, progress: progress(0.5, "half"))}
worker.run({"call": "x", "body": {}}, table, worker._Progress(os.fdopen(written, "wb")))
raise SystemExit("the worker goes on without its server")
"""


def test_a_worker_whose_server_has_ended_says_nothing():
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_READER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("fields", "offload"),
    [({}, "optimizer"), ({"ds_config": PLAIN}, "none"), ({"ds_config": PLAIN, "offload": True}, "optimizer")],
)
def test_a_search_offloads_as_its_deepspeed_config_says(fields, offload):
    asked = SearchJob(machine="h100-node", model="Llama 3.2 1B", free=["micro_batch"], **fields)
    assert space_of(asked, preset("h100-node")).base.offload == offload
