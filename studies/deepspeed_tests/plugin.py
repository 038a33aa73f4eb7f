"""A pytest plugin that prepares each of DeepSpeed's tests for ebbtide and writes down its result.

Pytest loads it by ``-p studies.deepspeed_tests.plugin``. Its settings (`Orders`) are in an environment variable.
"""

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "EBBTIDE_DEEPSPEED_TESTS"
TRIES = 2  # number of attempts for a test that does not end
WORST = ("failed", "skipped", "passed")


@dataclass(frozen=True, slots=True)
class Orders:
    """Settings of one run of DeepSpeed's tests: the variant, the result folder and the time limit."""

    arm: str
    folder: str  # folder of the results and of the notes
    for_s: float  # time after which no test begins
    commit: str  # commit of ebbtide

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def results(self) -> Path:
        return Path(self.folder) / "results.jsonl"

    @property
    def notes(self) -> Path:
        return Path(self.folder) / "notes.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def settled(orders: Orders) -> set[str]:
    """Return the names of the DeepSpeed tests that this pytest run can skip.

    They have ended in an earlier run, or have hung too often.
    """
    of_arm = [line for line in lines(orders.results) if line["arm"] == orders.arm]
    begun = Counter(line["case"] for line in of_arm if "outcome" not in line)
    ended = {line["case"] for line in of_arm if "outcome" in line}
    return ended | {case for case, times in begun.items() if times >= TRIES}


class Reporter:
    """A pytest plugin object that writes the result of each of DeepSpeed's tests to a file."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.begun_s = time.monotonic()
        self.case: Any = None
        self.outcomes: list[tuple[str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        there = settled(self.orders)
        items[:] = [item for item in items if item.nodeid not in there]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        from studies.deepspeed_tests.attaching import begin

        self.outcomes, begun_s = [], time.time()
        self.case = begin(item.nodeid, self.orders.arm, str(self.orders.notes))
        self._write(case=item.nodeid)
        result = yield
        worst = min(self.outcomes, key=lambda pair: WORST.index(pair[0]))
        self._write(case=item.nodeid, outcome=worst[0], why=worst[1], begun_s=begun_s)
        if time.monotonic() - self.begun_s > self.orders.for_s:
            item.session.shouldstop = "time is up: the same command goes on from here"
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        said = "" if report.passed else str(getattr(report, "longreprtext", report.longrepr))
        if isinstance(report.longrepr, tuple):  # for a skipped test: (file, line, reason)
            said = report.longrepr[2]
        self.outcomes.append((report.outcome, said[-600:]))

    def _write(self, **line: Any) -> None:
        with self.orders.results.open("a") as file:
            kept = {"arm": self.orders.arm, "commit": self.orders.commit, "at_s": time.time()}
            file.write(json.dumps({**kept, **line}) + "\n")


def pytest_configure(config: Any) -> None:
    reporter = Reporter(Orders(**json.loads(os.environ[VARIABLE])))
    config.pluginmanager.register(reporter)
    multiprocessing.set_forkserver_preload(["studies.deepspeed_tests.warm"])
    from unit.common import DistributedExec  # DeepSpeed's class that starts the ranks of a test

    DistributedExec.__getstate__ = lambda test: {**vars(test), "_case": reporter.case}
