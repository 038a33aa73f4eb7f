"""Tests of the service's HTTP interface: answers that match its OpenAPI schema, health probes, methods, and
databases written by another version.
"""

import re
import socket
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.tuner.cli import main
from ebbtide.tuner.service import responses
from ebbtide.tuner.service.store import Store

from tests.tuner.service.conftest import add_unreadable_machines

LLAMA = {"machine": "rtx4090", "model": "Llama 3.2 1B"}


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/simulate", {**LLAMA, "timeline": True}, responses.Simulated),
        ("/answer", {**LLAMA, "mtbf_s": 3600}, responses.AnswerResponse),
        ("/answer", {**LLAMA, "host_memory_bytes": 2**33}, responses.AnswerResponse),
        ("/ways-out", {**LLAMA, "sequence": 65_536}, responses.WaysResponse),
        ("/what-if", LLAMA, responses.Grid),
        ("/goodput", {"iteration_s": 1, "mtbf_s": 3600, "persist_s": 2}, responses.GoodputResponse),
    ],
)
def test_answers_are_as_the_schema_tells_them(server, path, body, model):
    model.model_validate(server.post(path, body).raise_for_status().json())


def test_lists_are_as_the_schema_tells_them(server):
    runs = responses.Runs.model_validate(server.client.get("/runs").json())
    responses.RunResponse.model_validate(server.client.get(f"/runs/{runs.runs[0].id}").json())
    responses.Models.model_validate(server.client.get("/models").json())
    responses.Machines.model_validate(server.client.get("/machines").json())


def test_openapi_tells_every_answer_and_the_token(server):
    schema = server.client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            (answer,) = (operation["responses"][code] for code in ("200", "201") if code in operation["responses"])
            for kind, content in answer["content"].items():
                told = content.get("schema", {})
                assert kind == "text/html" or told, (path, method, kind)
                assert told.get("additionalProperties") is not True or path.endswith("/request"), (path, method)
            assert path == "/healthz" or operation["security"] == [{"HTTPBearer": []}], path
    assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert "text/event-stream" in schema["paths"]["/api/v1/events"]["get"]["responses"]["200"]["content"]


def test_the_servers_own_process_loads_nothing_that_only_workers_need(server):
    server.client.get(f"/runs/{server.client.get('/runs').json()['runs'][0]['id']}").raise_for_status()
    loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "pydantic_core" in loaded
    assert not [name for name in ("numba", "llvmlite", "scipy") if f"/{name}/" in loaded]


def test_probes_and_methods(server):
    base = server.url
    health = server.client.get(f"{base}/healthz", headers={"host": "10.0.0.7"})
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert server.client.get(f"{base}/docs").status_code == 307
    assert "openapi" in server.client.get(f"{base}/docs.html").text
    head = server.client.head("/machines")
    assert (head.status_code, head.content) == (200, b"")
    for method, path, allowed in (
        ("GET", "/answer", "POST"),
        ("PUT", "/answer", "POST"),
        ("POST", "/runs/x", "DELETE"),
    ):
        refused = server.client.request(method, path, json={} if method == "POST" else None)
        assert refused.status_code == 405, (method, path)
        assert allowed in refused.headers["allow"]
        assert refused.json()["errors"][0]["rule"].startswith("the method for this path must be")
    assert server.client.get("/nowhere").status_code == 404


def test_the_title_of_a_job_tells_what_was_asked(held):
    _, client = held
    first = client.post("/api/v1/jobs/plan", json={**LLAMA, "sequence": 512}).json()
    named = client.post("/api/v1/jobs/plan", json={**LLAMA, "name": "friday, 1 B"}).json()
    assert first["title"] == "Llama 3.2 1B on rtx4090, 512 tokens"
    assert named["title"] == "friday, 1 B"


def test_a_machine_that_cannot_be_read_takes_no_list_away(server):
    told = server.client.get("/machines").raise_for_status().json()
    assert {row["name"] for row in told["unreadable"]} == {"of another version", "torn"}
    assert "gone" in next(row["reason"] for row in told["unreadable"] if row["name"] == "of another version")
    assert "rtx4090" in {row["name"] for row in told["machines"]}
    asked = server.post("/simulate", {**LLAMA, "machine": "of another version"})
    assert (asked.status_code, asked.json()["errors"][0]["key"]) == (422, "machine")
    assert "delete it" in asked.json()["errors"][0]["rule"]
    try:
        for name in ("of another version", "torn"):
            assert server.client.delete(f"/machines/{name}").status_code == 200
        assert server.client.get("/machines").json()["unreadable"] == []
    finally:
        add_unreadable_machines(server.database)


def test_a_damaged_database_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "jobs.db"
    store = Store(path)
    for number in range(200):
        store.put_machine(f"m{number}", "x" * 2000)
    store.close()
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 60_000)
    done = CliRunner().invoke(main, ["serve", "--port", "0", "--db", str(path), "--show", "demo"])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "Give another file, or an older copy" in done.output


def test_a_second_head_that_never_ends_is_let_go(server):
    host, port = re.search(r"//(.*):(\d+)", server.url).groups()
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in client.recv(65_536)
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: ")
        began = time.monotonic()
        while client.recv(65_536):
            assert time.monotonic() - began < 60
