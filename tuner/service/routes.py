"""The routes (HTTP paths) of the planning service under /api/v1."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from ebbtide.simulator.estimates.presets import preset_names
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, shortened
from ebbtide.simulator.schedules.strategies import STEPS, STRATEGIES
from ebbtide.tuner.service import requests as ask
from ebbtide.tuner.service import responses
from ebbtide.tuner.service.pool import Result
from ebbtide.tuner.service.quota import Quota, check_ops, check_search_ops, estimated_ops
from ebbtide.tuner.service.report import Run, read_run, summary_of
from ebbtide.tuner.service.requests import MODELS
from ebbtide.tuner.service.resources import Names, Service
from fastapi import APIRouter, Path, Query, Request, Response, Security
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

MACHINE_NAME = re.compile(r"(?=.*\w)[\w .,:()+-]{1,80}")  # it is a part of a path, so it must not consist of dots only
Id = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
PEERS_TRIED = 24  # simulations for an answer's table: the settings of all other systems
FULL_COST = 1500  # cost of a plan search, in simulations


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.Problem} for status in (400, 401, 404, 405, 408, 409, 413, 415, 422, 429, 500, 503, 507)
}


EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "job, run, gone"}
}


def _answered(model: Any, *others: str) -> dict[int | str, dict[str, Any]]:
    content = {kind: {"schema": {"type": "string"}} for kind in others}
    return {200: {"model": model, "content": content} if content else {"model": model}}


async def _unless_gone(request: Request, work: Any) -> Any:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(400, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(result: Result) -> Response:
    kind = "application/json" if result.is_json else "text/csv; charset=utf-8"
    return Response(result.body, media_type=kind)


def routes(service: Service) -> APIRouter:
    """Build the router with all routes of the planning service under /api/v1."""
    # For readers of the schema. On servers with a token, `app.Guard` checks it.
    token = HTTPBearer(
        auto_error=False, description="The token of the server. Only a server that listens beyond loopback has one."
    )
    router = APIRouter(responses=REFUSALS, dependencies=[Security(token)])
    names = Names(service)
    _machines(router, service, names)
    _models(router, service)
    _answers(router, service, names)
    _comparisons(router, service, names)
    _jobs(router, service, names)
    _job(router, service)
    _events(router, service)
    _runs(router, service, names)
    return router


def _machines(router: APIRouter, service: Service, names: Names) -> None:
    @router.get("/machines")
    async def machines() -> responses.Machines:
        """List the machines that the planning server knows by name, with their main facts."""
        known, unreadable = names.machines()
        listed = [_facts_of(name, machine) for name, machine in known.items()]
        refused = [{"name": name, "reason": reason} for name, reason in unreadable.items()]
        return responses.Machines.model_validate({"machines": listed, "unreadable": refused})

    @router.get("/machines/{name}")
    async def machine(name: ask.Name) -> Machine:
        """Return all measured rates and facts of a machine, as in its machine.json."""
        result = names.machine(name)
        if result is None:
            raise HTTPException(404, "machine must be one that GET /api/v1/machines lists")
        return result

    @router.post("/machines", status_code=201)
    async def put_machine(machine: Machine, replace: bool = False) -> responses.Named:
        """Store a measured machine under its name, as `tune profile --push URL` does.

        The status is 409 if another machine has the name, unless ``replace`` is true.
        """
        name = machine.name
        if name in (*preset_names(), service.shown_machine) or not MACHINE_NAME.fullmatch(name) or not name.strip():
            raise RuleError(
                "name must have 1 to 80 characters (letters, digits, spaces and . , : ( ) + -) and must not be "
                f"the name of a preset, but got {shortened(name)}",
                key="name",
            )
        text = machine.model_dump_json()
        if not await asyncio.to_thread(service.store.put_machine, name, text, replace):
            raise HTTPException(
                409, f"name must be a new one, but another machine {name!r} is stored: rename it, or add ?replace=true"
            )
        return responses.Named(name=name)

    @router.delete("/machines/{name}")
    async def forget_machine(name: ask.Name) -> responses.Named:
        # Presets and the machine that the server was started with cannot be removed.
        if not await asyncio.to_thread(service.store.forget, "machines", name):
            raise HTTPException(404, f"machine must be the name of an uploaded machine profile, but got {name!r}")
        return responses.Named(name=name)


def _facts_of(name: str, machine: Machine) -> dict[str, Any]:
    return {
        **{fact: getattr(machine, fact) for fact in responses.MachineFacts.model_fields},
        "name": name,
        "preset": name in preset_names(),
        "multi_node": machine.network_bytes_per_s is not None,
        "estimates": machine.device_flops_per_s is not None,
        "link_bytes_per_s": machine.h2d_bytes_per_s.median,
    }


def _models(router: APIRouter, service: Service) -> None:
    @router.get("/models")
    async def models() -> responses.Models:
        """List the models that the planning server knows by name, and the measured workload that the server
        was started with.
        """
        workload, label = service.examples.get("workload"), service.examples.get("label", "")
        first = service.examples.get("kind") == "shown"
        shown = {} if workload is None else {"name": workload.name, "params": workload.params, "label": label}
        profiled = [responses.Profiled(machine=service.shown_machine, first=first, **shown)] if shown else []
        return responses.Models(models=list(MODELS), workloads=profiled, strategies=list(STRATEGIES))


def _answers(router: APIRouter, service: Service, names: Names) -> None:
    async def computed(request: Request, call: str, posted: ask.Scenario, cost: int) -> Response:
        filled = names.fill(posted)
        check_search_ops(filled, service.quota)
        light = check_ops(estimated_ops(filled), cost, service.quota)
        result = await _unless_gone(request, service.pool.answer(call, _sent(filled), light))
        return _response(result)

    @router.post("/simulate", responses=_answered(responses.Simulated))
    async def simulate(request: Request, posted: ask.Simulate) -> Response:
        """Simulate one training iteration of the request's job, under a strategy or a plan."""
        return await computed(request, "simulate", posted, 6 if posted.timeline else 1)

    @router.post("/answer", responses=_answered(responses.AnswerResponse))
    async def answer(request: Request, posted: ask.Answer) -> Response:
        """Return a verdict on offloading optimizer state, a plan, and a table that compares the plan with other ways to
        train.
        """
        cost = FULL_COST if posted.effort == "full" else 6
        return await computed(request, "answer", posted, cost + (PEERS_TRIED if posted.peers else 0))

    @router.post("/ways-out", responses=_answered(responses.WaysResponse))
    async def ways_out(request: Request, posted: ask.Scenario) -> Response:
        """Return the smallest changes with which the request's training job fits into memory."""
        return await computed(request, "ways-out", posted, FULL_COST)

    @router.post("/what-if", responses=_answered(responses.Grid, "text/csv"))
    async def what_if(request: Request, posted: ask.WhatIf) -> Response:
        """Simulate each strategy at each combination of the given values. Return a table as JSON or CSV.

        A table that is too large for a direct response must be requested as a job.
        """
        _check_cells(posted, service.quota.cells, ". Post it to /api/v1/jobs/what-if instead")
        return await computed(request, "what-if", posted, posted.cells * STEPS)

    @router.post("/goodput", responses=_answered(responses.GoodputResponse))
    async def goodput(posted: ask.Goodput) -> Response:
        """Return the goodput (useful share of training time) with failures, and the best checkpoint interval."""
        return _response(await service.pool.answer("goodput", posted.model_dump(), light=True))


def _comparisons(router: APIRouter, service: Service, names: Names) -> None:
    async def several(request: Request, call: str, asked: list[ask.Answer], body: dict[str, Any]) -> Response:
        light = len(asked) == 1  # others would exceed the time of a light request on a busy machine
        for one in asked:
            check_search_ops(one, service.quota)
            light &= check_ops(estimated_ops(one), 6 * len(asked), service.quota)
        return _response(await _unless_gone(request, service.pool.answer(call, body, light)))

    @router.post("/sweep", responses=_answered(responses.Swept))
    async def sweep(request: Request, posted: ask.Sweep) -> Response:
        """Answer one question with several values of its settings, each as well as the others allow."""
        points = [point if isinstance(point, str) else names.fill(point) for point in posted.points()]
        asked = [point for point in points if not isinstance(point, str)]
        plans = [plan.model_dump(mode="json") for plan in posted.plans]
        asked_at = [point if isinstance(point, str) else _sent(point) for point in points]
        body = {"points": asked_at, "plans": plans, "search": posted.search}
        return await several(request, "sweep", asked, body)

    @router.post("/cards", responses=_answered(responses.CardsResponse))
    async def cards(request: Request, posted: ask.Cards) -> Response:
        """Compare all machines that the server knows for one model: the advised way to train on each of them."""
        known = {name: machine for name, machine in names.machines()[0].items() if machine.device_flops_per_s}
        for name in posted.machines or ():
            if name not in known:
                raise RuleError(f"machines must be among {', '.join(known)}, but got {name!r}", key="machines")
        known = {name: known[name] for name in posted.machines or known}
        questions = [
            names.fill(ask.Answer.brief(posted, machine=name, gpus=machine.default_gpus))
            for name, machine in known.items()
        ]
        return await several(request, "cards", questions, {"questions": [_sent(one) for one in questions]})


def _sent(asked: ask.Scenario) -> dict[str, Any]:
    return asked.model_dump(mode="json", exclude_defaults=True)


def _check_cells(posted: ask.WhatIf, most: int, instead: str = "") -> None:
    if posted.cells > most:
        raise RuleError(
            f"changes, strategies and gpu_memory_bytes must have at most {most} combinations of values, but have "
            f"{posted.cells}{instead}",
            key="changes",
        )
    if any(not math.isfinite(v) for values in posted.changes.values() for v in values):
        raise RuleError(
            "changes (new values of machine and workload fields) must contain only finite numbers", key="changes"
        )


def _jobs(router: APIRouter, service: Service, names: Names) -> None:
    @router.post("/jobs/plan", status_code=201)
    async def plan(posted: ask.PlanJob) -> responses.JobState:
        """Start a background job that searches for the best plan for a training job."""
        return await _submit(service, names, posted, "plan")

    @router.post("/jobs/what-if", status_code=201)
    async def what_if(posted: ask.WhatIfJob) -> responses.JobState:
        """Start a background job that simulates a grid of cases.

        Each given strategy is simulated for each combination of the given GPU memory sizes and of the values given for
        fields of the machine or the workload.
        """
        _check_cells(posted, service.quota.job_cells)
        return await _submit(service, names, posted, "what-if")

    @router.post("/jobs/search", status_code=201)
    async def search(posted: ask.SearchJob) -> responses.JobState:
        """Start a background job that searches for the fastest training configuration of a model."""
        return await _submit(service, names, posted, "search")


def _job(router: APIRouter, service: Service) -> None:
    @router.get("/jobs")
    async def jobs(limit: Annotated[int, Query(ge=1, le=500)] = 100) -> dict[str, list[responses.JobState]]:
        """List the planning service's background jobs, the newest first."""
        return {"jobs": [responses.JobState(**job) for job in service.store.jobs(limit)]}

    @router.get("/jobs/{job}")
    async def job(job: Id) -> responses.JobState:
        """Return the state of a background job of the planning service, with every attempt to run the job."""
        return responses.JobState(**_known(service.jobs.state(job), "job"))

    @router.get("/jobs/{job}/request")
    async def request_of(job: Id) -> dict[str, Any]:
        """Return the request that started a background job."""
        results: dict[str, Any] = json.loads(_known(service.store.request(job), "job"))
        return results

    @router.get(
        "/jobs/{job}/result",
        responses=_answered(responses.PlanResult | responses.SearchResult | responses.Grid, "text/csv"),
    )
    async def result(job: Id) -> Response:
        """Return the result of a background job that has finished."""
        body, is_json = _known(service.store.result(job), "job that is done")
        return _response(Result(body, is_json))

    @router.delete("/jobs/{job}")
    async def cancel(job: Id, forget: bool = False) -> responses.JobState:
        state = responses.JobState(**_known(service.store.job(job), "job"))
        if not forget:
            await service.jobs.cancel(job)
            return responses.JobState(**_known(service.store.job(job), "job"))
        if not await asyncio.to_thread(service.store.forget, "jobs", job):
            raise RuleError(
                f"only a job that has ended can be forgotten, but this one is {state.state}: cancel it first",
                key="forget",
            )
        await service.feed.tell("gone", {"id": job})
        return state


def _events(router: APIRouter, service: Service) -> None:
    @router.get("/jobs/{job}/events", response_class=StreamingResponse, responses=EVENTS)
    async def events_of(job: Id) -> Response:
        """Stream the state of a background job as server-sent events: first the present state, then each
        change until the job ends.
        """
        _known(service.store.job(job), "job")
        return _stream(service, _job_events(service, job))

    @router.get("/events", response_class=StreamingResponse, responses=EVENTS)
    async def events() -> Response:
        """Stream events of the planning service as server-sent events: each change of any background job,
        and each uploaded training run.
        """
        return _stream(service, _all_events(service))


async def _submit(service: Service, names: Names, posted: ask.Scenario, kind: str) -> responses.JobState:
    filled = names.fill(posted)
    check_search_ops(filled, service.quota)
    body = _checked(filled, service.quota)
    return responses.JobState(**await service.jobs.submit(kind, body, getattr(posted, "name", None) or _title(posted)))


TITLED = {
    "gpus": "{} GPU{}",
    "micro_batch": "micro-batch {}",
    "accumulation": "accumulation {}",
    "sequence": "{} tokens",
    "zero_stage": "ZeRO-{}",
    "global_batch": "{} sample{} a step",
    "robust": "robust",
}


def _title(posted: ask.Scenario) -> str:
    trained = posted.workload if posted.model is None else posted.model
    if isinstance(trained, dict):
        trained = str(trained.get("_name_or_path") or trained.get("name") or "a model")
    names = [source if isinstance(source, str) else getattr(source, "name", "") for source in (trained, posted.machine)]
    chosen = [
        words.format(value, "s" * (value != 1))
        for field, words in TITLED.items()
        if field in posted.model_fields_set and (value := getattr(posted, field))
    ]
    return ", ".join([" on ".join(names), *chosen])[:160]


def _known(found: Any, what: str) -> Any:
    if found is None:
        raise HTTPException(404, f"there is no {what} with this id")
    return found


def _stream(service: Service, events: AsyncIterator[bytes]) -> Response:
    if service.feed.streams >= service.quota.streams:
        raise HTTPException(429, f"at most {service.quota.streams} event streams may be open, and that many are open")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


async def _all_events(service: Service) -> AsyncIterator[bytes]:
    service.feed.streams += 1
    try:
        events = service.feed.listen()  # before the client gets its first answer, so that it misses no event
        yield b": open\n\n"
        async for event in events:
            yield b": still here\n\n" if event is None else _event(*event)
    finally:
        service.feed.streams -= 1


async def _job_events(service: Service, job: str) -> AsyncIterator[bytes]:
    service.feed.streams += 1
    try:
        events = service.feed.listen()  # before the state is read, so that no change in between is missed
        state = service.jobs.state(job)
        while state is not None:
            yield _event("job", state)
            if state["state"] not in ("queued", "running"):
                return
            state = None
            async for event in events:
                if event is None:
                    yield b": still here\n\n"
                elif event[0] == "job" and event[1]["id"] == job:
                    ended = event[1]["state"] not in ("queued", "running")
                    state = service.store.job(job) if ended else event[1]
                    break
    finally:
        service.feed.streams -= 1


def _runs(router: APIRouter, service: Service, names: Names) -> None:
    @router.post("/runs", status_code=201)
    async def post_run(run: Run) -> responses.RunSummary:
        """Store the measured timeline of a training run, and the plan to compare it with if one is given."""
        summary = await asyncio.to_thread(summary_of, run)
        stored = await asyncio.to_thread(service.store.add_run, run.name, summary, run.model_dump_json())
        await service.feed.tell("run", stored)
        return responses.RunSummary.model_validate(stored)

    @router.get("/runs")
    async def runs(limit: Annotated[int, Query(ge=1, le=500)] = 100) -> responses.Runs:
        """List summaries of uploaded training runs, the newest first."""
        return responses.Runs.model_validate({"runs": service.store.runs(limit)})

    @router.get("/runs/{run}", responses=_answered(responses.RunResponse))
    async def run(run: Id) -> Response:
        """Return an uploaded training run: its summary, its plan, and its measured and predicted timelines."""
        text = _known(service.store.run(run), "run")
        workload = service.examples.get("workload")
        found = await asyncio.to_thread(read_run, text, names.machines()[0].values(), workload)
        return _response(Result(json.dumps(found).encode(), True))

    @router.delete("/runs/{run}")
    async def forget_run(run: Id) -> responses.Identified:
        _known(await asyncio.to_thread(service.store.forget, "runs", run) or None, "run")
        await service.feed.tell("gone", {"id": run})
        return responses.Identified(id=run)

    @router.post("/trace", responses=_answered(responses.Trace))
    async def trace(posted: ask.Planned) -> Response:
        """Return simulated timelines for ui.perfetto.dev: of DeepSpeed alone, and under a plan."""
        body = {
            "plan": posted.plan.model_dump(mode="json"),
            "scenario": _checked(names.fill(posted.scenario), service.quota),
        }
        return _response(await service.pool.heavy.call("trace", body))

    @router.post("/report", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def report(posted: ask.Report) -> Response:
        """Return a self-contained web page about a plan and, if one is given, an uploaded training run."""
        run = None if posted.run is None else _known(service.store.run(posted.run), "run")
        body = {"plan": posted.plan.model_dump(mode="json"), "run": run}
        if posted.scenario is not None:
            body["scenario"] = _checked(names.fill(posted.scenario), service.quota)
        result = await service.pool.heavy.call("report", body)
        disposition = {"content-disposition": 'attachment; filename="report.html"'}
        return Response(result.body, media_type="text/html; charset=utf-8", headers=disposition)


def _checked(filled: ask.Scenario, quota: Quota) -> dict[str, Any]:
    check_ops(estimated_ops(filled), 1, quota)
    return filled.model_dump(mode="json", exclude_defaults=True)
