"""The what-if service (`tune serve`) under load, and killed in the middle of jobs.

    python -m studies.service_load --clients 50 --seconds 60 --json service_load.json

- ``p50_ms``, ``p95_ms``, ``p99_ms``: Percentiles of the answer time, while each client sends requests over its own
  connection without pauses. A request asks for one simulated iteration of a model with 8 B parameters. No two
  requests are equal, because GPUs, micro-batch, sequence, strategy, link and memory are drawn at random.
- ``equal/...``: Answer times if all clients send the same request, which the service answers from its cache.
- ``in_process/...``: Times of the function that computes the answers, called without a service.
- ``page/...``: Time from the move of a slider on the service's web page to the updated picture, measured by the page
  in a headless Chromium. NaN without Chromium.

The server and the clients share the machine's cores.

Last, the server is killed with SIGKILL several times while some jobs run and others wait, and is started again with
the same database.

- ``lost_jobs``: Number of accepted jobs that the server no longer knows, or that ended without a whole result.
- ``waiting_jobs``: Number of jobs that have not ended. The study stops waiting if no job has ended for 300 s.
- ``unseen_attempts``: Number of jobs with a history that lacks one of the job's starts.
"""

import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ebbtide.tuner.service.client import call

from studies.bench.console import publish, study_parser
from studies.bench.page_moves import page_moves

MODEL, MACHINE = "Llama 3 8B", "h100-node"
STRATEGIES = (
    "zero3_offload",
    "zero3_offload_async",
    "twin_flow",
    "deep_optimizer_states",
    "superoffload",
    "no_offload",
    "ebbtide",
)
JOBS, CELLS, KILL_EVERY = 30, 6, 6  # points of each job, submissions between kills
WARM_S = 3.0
IN_PROCESS_CALLS = 200
PAGE_MOVES = 60
WORKERS = min(8, os.cpu_count() or 1)  # the service's own default
JOBS_LIMIT_S = 300.0  # time without a job that ends
OPEN = ("queued", "running")


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a random request that asks ebbtide's HTTP service for a simulation of one training iteration.

    Two calls practically never return the same request.
    """
    return {
        "machine": MACHINE,
        "model": MODEL,
        "strategy": rng.choice(STRATEGIES),
        "gpus": rng.choice((1, 2, 4)),
        "micro_batch": rng.randint(1, 8),
        "sequence": 512 * rng.randint(1, 16),
        "link_bytes_per_s": rng.uniform(1e10, 6e10),
        "device_memory_bytes": rng.uniform(24e9, 160e9),
    }


class Server:
    """ebbtide's HTTP service ``tune serve`` in a separate process, which can be killed and started again."""

    def __init__(self, database: Path) -> None:
        self.database = database
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "ebbtide.tuner.cli", "serve", "--port", "0"]
        command += ["--workers", str(WORKERS), "--db", str(self.database)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("open http://"):
            raise RuntimeError(
                f"the first line that `tune serve` prints must begin with 'open http://', but is {line!r}. "
                "If the line is empty, `tune serve` has ended: see its error above"
            )
        self.address = line.split()[1].removeprefix("http://").rstrip("/")
        self.host, _, port = self.address.partition(":")
        self.port = int(port)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def call(self, path: str, body: Any = None) -> Any:
        """Send a request to ebbtide's HTTP service and return the service's answer."""
        # The method is POST if the request has a body, otherwise GET.
        return call(f"http://{self.address}", path, body, timeout_s=600)


class Client:
    """A client of ebbtide's HTTP service with one connection, which sends the next request after each answer."""

    def __init__(self, server: Server, question: Callable[[], dict[str, Any]]) -> None:
        self._server, self._question = server, question
        self.latencies_s: list[float] = []
        self.errors: list[str] = []

    async def run(self, from_s: float, until_s: float) -> None:
        """Send requests to ebbtide's HTTP service until the time ``until_s``.

        Answers to requests that were sent before ``from_s`` are not measured, as a warm-up.
        """
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        while (started_s := time.perf_counter()) < until_s:
            body = json.dumps(self._question()).encode()
            head = (
                f"POST /api/v1/simulate HTTP/1.1\r\nHost: {self._server.address}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status, answer = await _response(reader)
            ended_s = time.perf_counter()
            if status != 200 or json.loads(answer)["iteration_s"] <= 0:
                self.errors.append(f"{status}: {answer[:200]!r}")
            elif started_s >= from_s:
                self.latencies_s.append(ended_s - started_s)
        writer.close()


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    sizes = [line for line in lines if line.lower().startswith("content-length:")]
    size = int(sizes[0].partition(":")[2])
    return int(lines[0].split()[1]), await reader.readexactly(size)


async def load(server: Server, clients: int, seconds: float, question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Put ebbtide's HTTP service under load from several clients, and return the measurements as a dict.

    They are the latencies, the answers per second and the errors. Latencies are the 50th, 95th and 99th
    percentile in milliseconds.
    """
    started_s = time.perf_counter()
    asking = [Client(server, question) for _ in range(clients)]
    from_s = started_s + WARM_S
    done = await asyncio.gather(*(client.run(from_s, from_s + seconds) for client in asking), return_exceptions=True)
    errors = [error for client in asking for error in client.errors]
    errors += [repr(end) for end in done if end is not None]
    latencies = sorted(s for client in asking for s in client.latencies_s)
    return {
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        **percentiles(latencies),
        "requests_per_s": len(latencies) / seconds,
        "requests": len(latencies),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentile, in milliseconds, of a list of times given in seconds."""
    if len(seconds) < 2:
        return {f"p{p}_ms": math.nan for p in (50, 95, 99)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}_ms": cuts[p - 1] * 1e3 for p in (50, 95, 99)}


def in_process(rng: random.Random) -> dict[str, float]:
    """Return the latencies of what-if requests that a direct function call answers, to compare with the HTTP service.

    The requests are drawn at random as for the service. The latencies are the 50th, 95th and 99th
    percentile in milliseconds.
    """
    from ebbtide.tuner.service.answers import simulate
    from ebbtide.tuner.service.requests import Simulate

    seconds = []
    for number in range(IN_PROCESS_CALLS + 20):
        request = Simulate.model_validate(drawn(rng))
        started_s = time.perf_counter()
        simulate(request, lambda *_: None)
        if number >= 20:
            seconds.append(time.perf_counter() - started_s)
    return percentiles(seconds)


def kill_during_jobs(server: Server, rng: random.Random) -> dict[str, Any]:
    """Submit jobs to ebbtide's HTTP service, kill the server several times while jobs are running, and count the lost
    jobs.
    """
    acknowledged, kills = [], 0
    for number in range(1, JOBS + 1):
        changes = {"h2d_bytes_per_s": [rng.uniform(1e10, 6e10) for _ in range(CELLS)]}
        grid = {"machine": MACHINE, "model": MODEL, "strategies": ["ebbtide"], "changes": changes}
        acknowledged.append(server.call("/jobs/what-if", grid)["id"])
        if number % KILL_EVERY == 0:
            _kill_while_running(server)
            kills += 1
    states = _wait_for(server, acknowledged)
    done = {job for job, state in states.items() if state["state"] == "done"}
    waiting = sum(state["state"] in OPEN for state in states.values())
    results = [len(server.call(f"/jobs/{job}/result")["rows"]) for job in done]
    interrupted = sum(
        attempt["outcome"] == "the server ended" for state in states.values() for attempt in state["history"]
    )
    return {
        "jobs": JOBS,
        "kills": kills,
        "lost_jobs": JOBS - waiting - sum(rows == CELLS for rows in results),
        "waiting_jobs": waiting,
        "interrupted_attempts": interrupted,
        "unseen_attempts": sum(state["attempts"] != len(state["history"]) for state in states.values()),
        "most_attempts": max(state["attempts"] for state in states.values()),
    }


def _kill_while_running(server: Server) -> None:
    deadline_s = time.perf_counter() + JOBS_LIMIT_S
    while not any(job["state"] == "running" for job in server.call("/jobs")["jobs"]):
        if time.perf_counter() > deadline_s:
            raise RuntimeError(
                f"no job started within {JOBS_LIMIT_S:g} s. This test needs a running job, to kill the server meanwhile"
            )
        time.sleep(0.01)
    server.kill()
    server.start()


def _wait_for(server: Server, jobs: Sequence[str]) -> dict[str, Any]:
    before, deadline_s = len(jobs) + 1, 0.0
    while True:
        states = {job: server.call(f"/jobs/{job}") for job in jobs}
        waiting = sum(state["state"] in OPEN for state in states.values())
        if waiting < before:
            before, deadline_s = waiting, time.perf_counter() + JOBS_LIMIT_S
        if not waiting or time.perf_counter() > deadline_s:
            return states
        time.sleep(0.2)


def measure(clients: int, seconds: float) -> dict[str, Any]:
    """Run all measurements of ebbtide's what-if service in turn, and return their results as a dict."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "service.db")
        try:
            for _ in range(2 * WORKERS):  # more calls than workers, so that every worker has started
                server.call("/simulate", drawn(rng))
            moves = page_moves(f"http://{server.address}", PAGE_MOVES)
            different = asyncio.run(load(server, clients, seconds, lambda: drawn(rng)))
            same = drawn(rng)
            equal = asyncio.run(load(server, clients, min(10.0, seconds), lambda: same))
            jobs = kill_during_jobs(server, rng)
        finally:
            server.stop()
    return {
        "clients": clients,
        "seconds": seconds,
        **different,
        **{f"equal/{key}": value for key, value in equal.items()},
        **{f"in_process/{key}": value for key, value in in_process(rng).items()},
        **{f"page/{key}": value for key, value in percentiles(moves).items()},
        "page/moves": len(moves),
        **jobs,
        "cores": len(os.sched_getaffinity(0)),
        "what": f"simulate of {MODEL} on {MACHINE}; no two requests equal, no pause between them; "
        "equal/: one request again and again, answered from the cache",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("service_load", __doc__)
    parser.add_argument(
        "--clients", type=int, default=50, help="number of clients that send requests at the same time (default: 50)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds for which the clients send requests (default: 60)"
    )
    args = parser.parse_args(argv)
    if args.clients < 1 or args.seconds <= 0:
        parser.error(f"--clients must be >= 1 and --seconds > 0, but got {args.clients} and {args.seconds}")
    figures = measure(args.clients, args.seconds)
    publish("service_load", args.json, figures)


if __name__ == "__main__":
    main()
