"""Fixtures that start a real HTTP server of the service in a separate process, as `tune serve` does."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cheap_start.short_search import SHORT

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[3]
CHEAP_START = str(ROOT / "tests" / "cheap_start")


class Server:
    """A `tune serve` process on a free port. It can be killed and started again on the same database."""

    def __init__(self, database, *arguments, token=None):
        self.database, self.arguments = database, arguments
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([CHEAP_START, str(ROOT)]), SHORT: "1"}
        if token:
            self.environment["EBBTIDE_TOKEN"] = token
        self.start()

    def start(self):
        command = [sys.executable, "-m", "ebbtide.tuner.cli", "serve", "--port", "0", "--workers", "1"]
        command += ["--db", str(self.database), *map(str, self.arguments)]
        self.errors = Path(f"{self.database}.errors")
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=self.environment
            )
        line = self.process.stdout.readline()
        assert line.startswith("open http://"), line
        self.url = line.split()[1].partition("#")[0].rstrip("/")
        self.client = httpx.Client(base_url=self.url + "/api/v1", timeout=240)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.client.close()
        self.process.terminate()
        self.process.wait(120)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def events(self, path):
        """Yield the kind and data of each server-sent event at a path of the service."""
        with self.client.stream("GET", path) as response:
            kind = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])


def add_unreadable_machines(database):
    """Add two machine descriptions that the service cannot read to its database, which is created if it is missing. One
    has a field of another version of ebbtide, and one is cut off.
    """
    from ebbtide.simulator import preset
    from ebbtide.tuner.service.store import Store

    if not database.exists():
        Store(database).close()
    fields = {**preset("rtx4090").model_dump(mode="json"), "name": "of another version", "gone": 1}
    with sqlite3.connect(database) as db:
        db.execute("INSERT OR REPLACE INTO machines VALUES ('of another version', ?, 1e12)", (json.dumps(fields),))
        db.execute("INSERT OR REPLACE INTO machines VALUES ('torn', '{\"name\": ', 1e12)")
    db.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Yield a running server whose page shows the example shipped with the package, and whose database has two
    machines that cannot be read.
    """
    from ebbtide.tuner.service.server import shipped_example

    database = tmp_path_factory.mktemp("service") / "service.db"
    add_unreadable_machines(database)
    started = Server(database, "--show", shipped_example())
    yield started
    started.stop()


@pytest.fixture
def held(tmp_path):
    """Return an instance of the HTTP service in this process and an HTTP client for it. The service starts no worker
    processes, and runs no jobs.
    """
    from ebbtide.tuner.service.app import create_app
    from ebbtide.tuner.service.resources import Service
    from ebbtide.tuner.service.store import Store
    from fastapi.testclient import TestClient

    service = Service(Store(tmp_path / "x.db"), hosts=("testserver",))
    return service, TestClient(create_app(service))
