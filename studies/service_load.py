"""The what-if service under load, and killed in the middle of jobs.

    python -m studies.service_load --clients 50 --seconds 60 --json service_load.json

Clients ask without a pause, each over a connection of its own, for one simulated iteration of an
8 B model. No two requests are equal: GPUs, micro-batch, sequence, strategy, link and memory are
drawn anew each time (``p50_ms``, ``p95_ms``, ``p99_ms``). Then equal requests, which the service
answers from its memory (``equal/...``), and the same calls without a service, in one process
(``in_process/...``). Server and clients share the machine's cores.

``page/...``: from a slider's move to the new picture, measured by the page in a headless Chromium,
where there is one (else NaN).

Then jobs: the server is killed with SIGKILL while some run and others wait, again and again, and
started anew on the same database. ``lost_jobs`` were acknowledged and ended without a whole result, or
are unknown; ``waiting_jobs`` still ran or waited when no job had ended for 300 s; ``unseen_attempts``
were started without being counted.
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

from ebbtide.tuner.service.client import Client as ServiceClient

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
WORKERS = min(8, os.cpu_count() or 1)  # as the service has by itself
JOBS_LIMIT_S = 300.0  # without any job that ends
OPEN = ("queued", "running")


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a random request to the service that differs from all others."""
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
    """The service ``tune serve`` in a separate process."""

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
            raise RuntimeError(f"the server must tell its address first, but told {line!r}")
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
        """Send a request to the service and return its answer. Use GET, or POST if there is a body."""
        return ServiceClient(f"http://{self.address}", timeout_s=600).call(path, body)


class Client:
    """A keep-alive connection to the service, which sends the next request after each answer."""

    def __init__(self, server: Server, question: Callable[[], dict[str, Any]]) -> None:
        self._server, self._question = server, question
        self.latencies_s: list[float] = []
        self.errors: list[str] = []

    async def run(self, from_s: float, until_s: float) -> None:
        """Send requests until ``until_s``. Requests sent before ``from_s`` are not counted."""
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
    """Return the latency percentiles in milliseconds, the answers per second, and the errors under load."""
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
    """Return p50, p95 and p99 of the given times, in milliseconds."""
    if len(seconds) < 2:
        return {f"p{p}_ms": math.nan for p in (50, 95, 99)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}_ms": cuts[p - 1] * 1e3 for p in (50, 95, 99)}


def in_process(rng: random.Random) -> dict[str, float]:
    """Return the latency percentiles of the same requests, answered by a function call."""
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
    """Submit jobs, kill the server repeatedly while some run, wait for all, and count lost jobs."""
    acknowledged, kills = [], 0
    for number in range(1, JOBS + 1):
        changes = {"h2d_bytes_per_s": [rng.uniform(1e10, 6e10) for _ in range(CELLS)]}
        grid = {"machine": MACHINE, "model": MODEL, "strategies": ["ebbtide"], "changes": changes}
        acknowledged.append(server.call("/jobs/what-if", grid)["id"])
        if number % KILL_EVERY == 0:
            kills += _kill_while_running(server)
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


def _kill_while_running(server: Server) -> int:
    """Wait until a job runs, so that the kill hits it. Then kill the server and restart it."""
    deadline_s = time.perf_counter() + JOBS_LIMIT_S
    while not any(job["state"] == "running" for job in server.call("/jobs")["jobs"]):
        if time.perf_counter() > deadline_s:
            raise RuntimeError("no job ran within the time: nothing to kill")
        time.sleep(0.01)
    server.kill()
    server.start()
    return 1


def _wait_for(server: Server, jobs: Sequence[str]) -> dict[str, Any]:
    """Return the states at the end of all jobs, or when none has ended for `JOBS_LIMIT_S`."""
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
    """Run all measurements of the service in turn, and return the figures."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "service.db")
        try:
            for _ in range(2 * WORKERS):  # every worker has started
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
    parser.add_argument("--clients", type=int, default=50, help="at once (50)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (60)")
    args = parser.parse_args(argv)
    if args.clients < 1 or args.seconds <= 0:
        parser.error(f"--clients must be >= 1 and --seconds > 0, but got {args.clients} and {args.seconds}")
    figures = measure(args.clients, args.seconds)
    publish("service_load", args.json, figures)


if __name__ == "__main__":
    main()
