"""The HTTP server of the planning service. Slow clients are disconnected after a time limit."""

import asyncio
import logging
from importlib.resources import files
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import uvicorn
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.rules import FLAGS
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import headline
from ebbtide.tuner.service.app import create_app
from ebbtide.tuner.service.report import posted, read_timelines, summary_of
from ebbtide.tuner.service.resources import Service
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OWN_EXAMPLE = "make demo, then make serve"
BACKLOG = 1024
LOG = logging.getLogger("uvicorn.error")


def protocol(head_s: float) -> type[HttpToolsProtocol]:
    """Return a class for uvicorn that disconnects a client if it does not send a request's head in time.

    Args:
        head_s: Time limit in seconds.
    """

    class Patient(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio sets TCP_NODELAY only on sockets that name their protocol, which uvicorn's sockets do not. Without
            # it, the second packet of an answer waits 40 ms for the client's delayed acknowledgement.
            transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            self._head_timer: asyncio.TimerHandle | None = None
            self._await_head()

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = asyncio.get_running_loop().call_later(head_s, self._give_up)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:  # these are the first bytes of another request
                self._await_head()
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._rest()
            super().on_headers_complete()

        def _rest(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

    return Patient


def config(service: Service, host: str, port: int) -> uvicorn.Config:
    """Return the settings of uvicorn, the web server, for the service.

    A single server process is enough, since only one process may write to the database, and worker
    processes do all computations.
    """
    return uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        http=protocol(service.quota.head_s),
        limit_concurrency=service.quota.connections,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
        server_header=False,
        ws="none",
    )


class _ServerOfFeeds(uvicorn.Server):
    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: Any = None) -> None:
        await self._service.feed.close()
        await super().shutdown(sockets)


def run(service: Service, host: str, port: int) -> None:
    """Run the service's HTTP server until it is interrupted or terminated."""
    server = _ServerOfFeeds(service, config(service, host, port))
    socket = server.config.bind_socket()
    socket.listen(BACKLOG)  # before the address is printed, so that an immediate client waits instead of being refused
    shown = f"[{host}]" if ":" in host else host
    secret = f"#token={service.token}" if service.token else ""
    FLAGS.set(False)  # clients have no flags
    print(f"open http://{shown}:{socket.getsockname()[1]}/{secret}  (Ctrl-C ends it)", flush=True)
    server.run(sockets=[socket])


def load_example(service: Service, folder: Path) -> None:
    """Load a training run from a folder as the first example on the service's web page: the run's machine, workload and
    timeline.

    Raises:
        OSError: A file is missing.
        ValueError: A file cannot be used.
    """
    machine = Machine.load(folder / "machine.json")
    workload = Workload.load(folder / "workload.json")
    label = f"{machine.device_name or machine.name}, {machine.cpu_cores} cores"
    if machine.unified_memory:
        label += ", no GPU"
    elif machine.device_kind == "emulated":
        label += ", no GPU: the device is emulated"
    shipped = folder == shipped_example()
    if shipped:
        label += f" (an example that comes with ebbtide; yours: {OWN_EXAMPLE})"
    kind = "example" if shipped else "shown"
    service.examples = {"machine": machine, "workload": workload, "label": label, "kind": kind}
    plan = None
    try:
        plan = Plan.load(folder / "plan.json")
        LOG.info("%s", headline(plan))
    except PlanError as error:
        LOG.warning("%s. The web page makes a new plan instead", error)
    trace = folder / "trace.json"
    name = f"{workload.name}, {folder.name}"
    known = {row["name"] for row in service.store.runs(1000)}
    if not trace.exists() or name in known:
        return
    for timeline in read_timelines(trace.read_text(encoding="utf-8")):
        if timeline.source == "measured":
            shown = posted(timeline, name, plan, label)
            service.store.add_run(name, summary_of(shown), shown.model_dump_json())


def shipped_example() -> Path:
    """Return the folder of a small measured training run that is part of the installed package."""
    return Path(str(files("ebbtide.tuner.service") / "example"))
