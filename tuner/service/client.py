"""A Python client of the planning service ``tune serve``. It needs only the standard library."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.timeline import Timeline

TOKEN = "EBBTIDE_TOKEN"
ENDED = ("done", "failed", "cancelled")


class ServiceError(RuntimeError):
    """An error: the planning service refused a request or cannot be reached. The message gives the reason."""


class Client:
    """A client of one server of the planning service.

        >>> service = Client("http://127.0.0.1:8377")                            # doctest: +SKIP
        >>> service.simulate(machine="h200", model="Llama 3 8B")["iteration_s"]  # doctest: +SKIP
        >>> plan = service.plan(machine="h200", model="Llama 3 8B")              # doctest: +SKIP

    Args:
        url: URL that `tune serve` prints.
        token: Token that the server requires if it listens on more than the local machine. If None, the
            environment variable ``EBBTIDE_TOKEN``.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 240.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServiceError(f"url must begin with http:// or https://, but got {url!r}")
        address, _, fragment = url.partition("#token=")
        self._url = address.rstrip("/") + "/api/v1"
        self._token = token or fragment or os.environ.get(TOKEN)
        self._timeout_s = timeout_s

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send one request to the planning server, and return the parsed JSON of its response.

        Raises:
            ServiceError: The server refused the request or was not reached.
        """
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, headers, method=method)
        try:
            with urlopen(request, timeout=self._timeout_s) as response:
                return json.loads(response.read())
        except HTTPError as error:
            raise ServiceError(f"{path}: {_message(error)}") from None
        except (URLError, OSError) as error:
            raise ServiceError(f"no tune serve answers at {self._url}: {error}") from None

    def simulate(self, **scenario: Any) -> dict[str, Any]:
        """Simulate one training iteration on the planning server.

        The arguments are the fields of ``POST /api/v1/simulate``.
        """
        return dict(self.call("/simulate", scenario))

    def answer(self, **scenario: Any) -> dict[str, Any]:
        """Ask the planning server for advice on offloading a training job's optimizer state, and for a
        plan.

        The arguments are the fields of ``POST /api/v1/answer``.
        """
        return dict(self.call("/answer", scenario))

    def plan(self, **scenario: Any) -> Plan:
        """Search for the best training plan in a background job of the planning server, wait for the job's
        end, and return the plan.

        Raises:
            ServiceError: The job failed or was cancelled.
        """
        return Plan.model_validate(self.job("plan", scenario)["plan"])

    def job(self, kind: str, request: Mapping[str, Any], poll_s: float = 0.5) -> Any:
        """Submit a background job to the planning server, wait for its end, and return its result."""
        job = self.call(f"/jobs/{kind}", dict(request))
        while (state := self.call(f"/jobs/{job['id']}"))["state"] not in ENDED:
            time.sleep(poll_s)
        if state["state"] != "done":
            raise ServiceError(f"job {job['id']} {state['state']}: {state['note']}")
        return self.call(f"/jobs/{job['id']}/result")

    def push_machine(self, machine: Machine, replace: bool = False) -> None:
        """Upload a measured machine to the planning server, which stores the machine under its name.

        Raises:
            ServiceError: Another machine has the name, and ``replace`` is false.
        """
        self.call("/machines?replace=true" if replace else "/machines", machine.model_dump(mode="json"))

    def post_run(self, name: str, timeline: Timeline, plan: Plan | None = None, measured_on: str = "") -> str:
        """Upload the timeline of a training run to the planning server, and return the id that the run gets.

        Args:
            name: Name of the run.
            timeline: Measured timeline.
            plan: Plan that the run trained under, if any.
            measured_on: Description of the machine.
        """
        return str(self.call("/runs", run_body(name, timeline, plan, measured_on))["id"])


def run_body(name: str, timeline: Timeline, plan: Plan | None = None, measured_on: str = "") -> dict[str, Any]:
    """Return a training run's timeline as JSON data that the planning server accepts as an upload."""
    return {
        "name": name,
        "source": timeline.source,
        "strategy": timeline.strategy,
        "measured_on": measured_on,
        "spans": [asdict(span) for span in timeline.spans],
        "memory": [asdict(sample) for sample in timeline.memory],
        "plan": None if plan is None else plan.model_dump(mode="json"),
    }


def _message(error: HTTPError) -> str:
    try:
        rules = json.loads(error.read())["errors"]
    except (ValueError, KeyError, OSError):
        return f"the server answered {error.code}"
    return "; ".join(
        f"{rule['key']}: {rule['rule']}" + (f" (got {rule['value']})" if rule["value"] else "") for rule in rules
    )
