"""Tests of malicious or broken HTTP requests: the service refuses each with a 4xx status and keeps running."""

import contextlib
import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from ebbtide.simulator import preset
from ebbtide.tuner.service.quota import Quota

LLAMA = {"machine": "h100-node", "model": "Llama 3 8B"}
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = {"model_type": "llama"}
for _ in range(200):
    NESTED = {"a": NESTED}

BODIES = {
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe{}",
    "empty": "",
    "a list": "[]",
    "deep": DEEP,
    "deep in a field": '{"model": ' + DEEP + "}",
    "nested model": json.dumps({"model": NESTED}),
    "NaN": '{"model": "Llama 3 8B", "link_bytes_per_s": NaN}',
    "infinity": '{"model": "Llama 3 8B", "link_bytes_per_s": 1e999}',
    "minus infinity": '{"model": "Llama 3 8B", "link_bytes_per_s": -Infinity}',
    "thousands of digits": '{"model": "Llama 3 8B", "gpus": ' + "9" * 5000 + "}",
    "huge count": json.dumps({**LLAMA, "accumulation": 10**9}),
    "both": json.dumps({**LLAMA, "workload": "x"}),
    "unknown model": json.dumps({"model": "../../etc/passwd"}),
    "a path": json.dumps({"model": "/etc/passwd"}),
    "a machine's path": json.dumps({**LLAMA, "machine": "../machine.json"}),
    "script in a name": json.dumps({**LLAMA, "machine": "<script>alert(1)</script>"}),
    "null byte": json.dumps({**LLAMA, "machine": "h200\0"}),
    "unknown option": json.dumps({**LLAMA, "options": {"__class__": 1}}),
    "an endless schedule": json.dumps({**LLAMA, "strategy": "ebbtide", "options": {"iterations": 10**9}}),
    "many layers": json.dumps({"model": {"layers": 10**8, "hidden": 64, "heads": 1, "vocabulary": 8}}),
    "many experts": json.dumps(
        {"model": {"layers": 1000, "hidden": 64, "heads": 1, "vocabulary": 8, "experts": 10**6}}
    ),
    "a huge model": json.dumps(
        {"model": {"layers": 8, "hidden": 10**8, "heads": 1, "vocabulary": 10**8}, "subgroup_size": 1}
    ),
    "layers as a string": json.dumps({"model": {"layers": "8", "hidden": 64, "heads": 1, "vocabulary": 8}}),
    "a million subgroups": json.dumps({**LLAMA, "subgroup_size": 1000}),
    "a machine of nothing": json.dumps({**LLAMA, "machine": {}}),
}


def memory_bytes(pid):
    """Return the total resident memory of a process and its children, in bytes."""
    total = 0
    for child in (pid, *children(pid)):
        fields = Path(f"/proc/{child}/statm").read_text().split()
        total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("path", ["/simulate", "/answer"])
def test_a_bad_body_is_refused_with_rule_and_key(server, path, case):
    body = BODIES[case]
    if (path == "/answer" and "option" in case) or "schedule" in case:
        path = "/simulate"
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    errors = response.json()["errors"]
    assert errors
    assert all(error["rule"] for error in errors)
    assert all(set(error) == {"key", "rule", "value"} for error in errors)
    assert "Traceback" not in response.text
    assert "/etc/passwd:" not in response.text


def test_rule_value_and_key_are_named(server):
    (error,) = server.post("/simulate", {**LLAMA, "micro_batch": 0}).json()["errors"]
    assert error["key"] == "micro_batch"
    assert "greater than or equal to 1" in error["rule"]
    assert error["value"] == "0"


def test_memory_stays_flat_under_hostile_bodies(server):
    def batter():
        for body in BODIES.values():
            server.client.post("/simulate", content=body, headers={"content-type": "application/json"})

    batter()
    before = memory_bytes(server.process.pid)
    for _ in range(2):
        batter()
    assert memory_bytes(server.process.pid) - before < 64 * 2**20


HUGE_PLANS = {
    "placements": {"placement": [{"placement": "host", "count": 10**12}]},
    "placements as text": {"placement": [{"placement": "host", "count": "1000000000000"}]},
    "a span": {"placement": [{"placement": "host", "count": 4}], "order": {"host": [[0, 10**12]]}},
    "many spans": {"placement": [{"placement": "host", "count": 4}], "order": {"host": [[0, 4000], [4000, 0]] * 1000}},
}


@pytest.mark.parametrize("case", HUGE_PLANS)
@pytest.mark.parametrize("path", ["/simulate", "/runs", "/trace", "/report"])
def test_a_plan_of_more_subgroups_than_memory_is_refused_unread(server, path, case):
    plan = {"subgroup_size": 10, **HUGE_PLANS[case]}
    span = {"kind": "forward", "lane": "device compute", "start_s": 0, "end_s": 1}
    about = {"/simulate": LLAMA, "/runs": {"name": "x", "spans": [span]}, "/trace": {"scenario": LLAMA}, "/report": {}}
    response = server.post(path, {**about[path], "plan": plan})
    assert response.status_code == 422
    assert "at most 4096 subgroups" in response.text


def test_a_body_beyond_the_limit_is_not_even_read(server):
    response = server.client.post(
        "/simulate", content=b" " * (Quota.body_bytes + 1), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413

    def endless():  # a body without a length, in chunks
        for _ in range(40):
            yield b" " * 2**16

    response = server.client.post("/simulate", content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_a_form_of_another_site_is_refused(server):
    response = server.client.post("/simulate", content="model=x", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    response = server.client.get("/machines", headers={"host": "evil.example"})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../app.py",
        "/uplot/../../app.py",
        "/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/app.py",
        "/%00",
    ],
)
def test_no_path_leaves_the_page(server, path):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.split(b" ", 2)[1] in (b"404", b"400")
    assert b"root:" not in answer


def test_a_grid_too_large_is_refused_before_it_starts(server):
    changes = {"h2d_bytes_per_s": [1e10] * 256, "d2h_bytes_per_s": [1e10] * 256}
    for path in ("/what-if", "/jobs/what-if"):
        response = server.post(path, {**LLAMA, "changes": changes})
        assert response.status_code == 422
        assert "combinations of values" in response.json()["errors"][0]["rule"]


def test_a_name_is_text_wherever_it_comes_back(server):
    fields = preset("h200").model_dump(mode="json")
    fields["name"] = "<img src=x onerror=alert(1)>"
    server.post("/machines", fields)
    listed = server.client.get("/machines")
    assert listed.headers["content-type"] == "application/json"
    assert listed.headers["x-content-type-options"] == "nosniff"


def test_a_light_answer_does_not_wait_for_a_heavy_one(server):
    from concurrent.futures import ThreadPoolExecutor

    heavy = {
        **LLAMA,
        "strategies": ["ebbtide"],
        "subgroup_size": 200_000_000,
        "changes": {"h2d_bytes_per_s": [1e10 + 1e7 * i for i in range(6)]},
    }
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/what-if", heavy)
        server.post("/simulate", {**LLAMA, "link_bytes_per_s": 3.1e10})
        assert not slow.done()  # answered while the heavy request still runs, so that no clock is needed
        assert slow.result().status_code == 200


def test_the_page_allows_no_inline_script_and_no_other_host(server):
    page = server.client.get(server.url + "/")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "http:" not in page.text.replace("http://www.w3.org", "")
    assert "style=" not in page.text
    assert "<script>" not in page.text


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """Yield a client of a server of the HTTP service that requires a token."""
    with served(tmp_path_factory.mktemp("strict"), Quota()) as client:
        yield client


@pytest.fixture
def impatient(tmp_path):
    """Yield a client of a server of the HTTP service that waits 0.1 s for a request's header or body."""
    with served(tmp_path, Quota(head_s=0.1, body_s=0.1)) as client:
        yield client


@contextlib.contextmanager
def served(folder, quota):
    """Run a server of the HTTP service in a thread of this process, and yield a client. The server requires a
    token. It starts no worker processes, since it computes nothing.
    """
    import asyncio
    import threading

    import uvicorn
    from ebbtide.tuner.service.resources import Service
    from ebbtide.tuner.service.server import config
    from ebbtide.tuner.service.store import Store

    store = Store(folder / "s.db")
    service = Service(store, quota=quota, token="right-token", light_workers=1)
    settings = config(service, "127.0.0.1", 0)
    settings.lifespan = "off"
    running = uvicorn.Server(settings)
    listening = running.config.bind_socket()
    listening.listen()  # a client that comes before the server is ready waits in line
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listening])))
    thread.start()
    host, port = listening.getsockname()
    with httpx.Client(base_url=f"http://{host}:{port}/api/v1", timeout=60) as client:
        yield client
    running.should_exit = True
    thread.join()
    store.close()


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "right-token", "Basic x", "Bearer right-toke", "Bearer right-tokenx"]
)
def test_without_the_token_nothing_is_told(strict, header):
    headers = {"authorization": header} if header else {}
    for path in ("/machines", "/jobs", "/events", "/openapi.json"):
        response = strict.get(path, headers=headers)
        assert response.status_code == 401
        assert "h200" not in response.text
    assert strict.post("/simulate", json=LLAMA, headers=headers).status_code == 401


def test_with_the_token_it_is(strict):
    headers = {"authorization": "Bearer right-token"}
    assert strict.get("/machines", headers=headers).status_code == 200
    page = strict.get(str(strict.base_url.copy_with(path="/")))
    assert page.status_code == 200  # the page has no data, and asks for the token


def test_a_slow_client_is_let_go(impatient):
    head = b"POST /api/v1/simulate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
    head += b"Authorization: Bearer right-token\r\nContent-Type: application/json\r\n\r\n{"
    address = impatient.base_url.host, impatient.base_url.port
    for sent in (head, b"GET / HTTP/1.1\r\nHost", b""):
        with socket.create_connection(address, 60) as slow:
            slow.sendall(sent)
            assert b" 408 " in slow.recv(65536)  # the server's time limit ends it, not that of this test


def test_a_stalled_client_holds_nobody_up(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nHost")
        assert server.post("/simulate", LLAMA).status_code == 200
