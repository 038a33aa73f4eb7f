"""The ``tune serve`` command: the planning service over HTTP and its web page."""

import errno
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

import click
from ebbtide.tuner.commands.options import guarded
from ebbtide.tuner.files import BadInputError, check_folder
from ebbtide.tuner.lazy_group import Command

TOKEN = "EBBTIDE_TOKEN"


@click.command(cls=Command, epilog="Example: tune serve --show runs/demo; then open http://127.0.0.1:8377")
@click.option(
    "--port",
    default=8377,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="Port to listen on. 0: any free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help=f"Address to listen on. Outside of loopback, clients need a token: {TOKEN}, or a generated one.",
)
@click.option(
    "--allow-host",
    multiple=True,
    help="Additional host name under which clients reach the server, e.g. of a reverse proxy.",
)
@click.option("--db", default="ebbtide.db", show_default=True, help="SQLite file for jobs, runs and machines.")
@click.option(
    "--show",
    help="Folder with machine.json, workload.json, plan.json and trace.json that the web page shows at first. With the "
    "value demo: the folder runs/demo if it is complete, otherwise a small example that comes with ebbtide.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    help="Number of processes for short API requests, such as a simulation (default: one per core, at most 8).",
)
@guarded
def serve(port: int, host: str, allow_host: tuple[str, ...], db: str, show: str | None, workers: int | None) -> None:
    """Start a server that answers what-if questions about training, over HTTP and on a web page."""
    try:
        from ebbtide.tuner.service.resources import LOOPBACK, Service
        from ebbtide.tuner.service.server import run
        from ebbtide.tuner.service.store import Store
    except ImportError as error:
        raise BadInputError(
            f"tune serve needs the extra [serve]: pip install './ebbtide[serve]', but got {error}"
        ) from None
    check_folder("--db", db)
    token = os.environ.get(TOKEN) or None
    _check_token(token)
    _check_port(host, port)
    if host not in LOOPBACK and token is None:
        token = secrets.token_urlsafe(24)
    own = "*" if host in ("0.0.0.0", "::") else host  # noqa: S104
    hosts = tuple(name.lower() for name in (*LOOPBACK, *allow_host, own))
    service = Service(Store(db), token=token, hosts=hosts, light_workers=workers)
    if show is not None:
        _load(service, show)
    run(service, host, port)


def _check_token(token: str | None) -> None:
    if token is not None and not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
        raise BadInputError(
            f"{TOKEN} may hold letters, digits and . _ ~ + / = - only, because an HTTP header carries it. "
            "The value that is set holds others. Set another one, e.g. of `openssl rand -hex 16`."
        )


def _check_port(host: str, port: int) -> None:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is in use by another program" if taken else f"cannot be listened on ({error.strerror})"
            raise BadInputError(f"port {port} of {host} {why}. Give another one with --port, or --port 0.") from None


def _load(service: Any, show: str) -> None:
    from ebbtide.tuner.service.server import load_example, shipped_example

    folder = Path(show)
    if show == "demo" and not folder.is_dir():
        demo = Path("runs/demo")
        # An interrupted demo leaves only some of its files.
        whole = all((demo / f"{name}.json").exists() for name in ("machine", "workload", "trace"))
        folder = demo if whole else shipped_example()
    try:
        load_example(service, folder)
    except (OSError, ValueError) as error:
        raise BadInputError(
            "--show must be a folder with a machine.json and a workload.json that this ebbtide "
            f"can read, but got {folder}: {error}"
        ) from None
