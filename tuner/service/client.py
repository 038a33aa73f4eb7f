"""The upload of a measured machine to a server of the planning service, for `tune profile --push`."""

import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ebbtide.simulator.machine import Machine

TOKEN = "EBBTIDE_TOKEN"


class ServiceError(RuntimeError):
    """An error: the planning service refused a request or cannot be reached. The message gives the reason."""


def call(server: str, path: str, body: Any = None, timeout_s: float = 240.0) -> Any:
    """Send one request to a server of the planning service, and return the parsed JSON of its response.

    Args:
        server: URL that `tune serve` prints. If it has no ``#token=``, the token is the environment variable
            ``EBBTIDE_TOKEN``.
        path: Path below ``/api/v1``.
        body: JSON data to post. If None, the request is a GET.

    Raises:
        ServiceError: The server refused the request or was not reached.
    """
    if not server.startswith(("http://", "https://")):
        raise ServiceError(f"url must begin with http:// or https://, but got {server!r}")
    address, _, fragment = server.partition("#token=")
    url, token = address.rstrip("/") + "/api/v1", fragment or os.environ.get(TOKEN)
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, headers), timeout=timeout_s) as response:
            return json.loads(response.read())
    except HTTPError as error:
        raise ServiceError(f"{path}: {_message(error)}") from None
    except (URLError, OSError) as error:
        raise ServiceError(f"no tune serve answers at {url}: {error}") from None


def push_machine(server: str, machine: Machine, replace: bool) -> None:
    """Upload a measured machine to the planning server, which stores the machine under its name."""
    call(server, "/machines?replace=true" if replace else "/machines", machine.model_dump(mode="json"))


def _message(error: HTTPError) -> str:
    try:
        rules = json.loads(error.read())["errors"]
    except (ValueError, KeyError, OSError):
        return f"the server answered {error.code}"
    return "; ".join(
        f"{rule['key']}: {rule['rule']}" + (f" (got {rule['value']})" if rule["value"] else "") for rule in rules
    )
