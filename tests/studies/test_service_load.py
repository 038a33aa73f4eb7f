"""Tests of the study that puts load on the HTTP service, at a small size: all requests are answered, and
killed workers come back.
"""

import json
import random

import pytest

pytest.importorskip("fastapi")

from ebbtide.tuner.service.requests import Simulate

from studies import service_load


def test_questions_differ_and_are_valid():
    rng = random.Random(0)
    asked = [service_load.drawn(rng) for _ in range(50)]
    assert len({json.dumps(question) for question in asked}) == 50
    for question in asked:
        Simulate.model_validate(question)


@pytest.mark.slow
def test_the_study_runs(monkeypatch, tmp_path):
    for name, value in (
        ("JOBS", 1),
        ("KILL_EVERY", 1),
        ("CELLS", 4),
        ("WARM_S", 0.0),
        ("IN_PROCESS_CALLS", 5),
        ("PAGE_MOVES", 2),
        ("WORKERS", 1),
    ):
        monkeypatch.setattr(service_load, name, value)
    service_load.main(["--clients", "2", "--seconds", "5", "--json", str(tmp_path / "r.json")])
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["errors"] == figures["equal/errors"] == 0
    assert figures["requests"] > 2
    assert figures["kills"] == 1
    assert figures["interrupted_attempts"] == 1, "the kill hit no job: it tested nothing"
    assert figures["lost_jobs"] == figures["unseen_attempts"] == 0
    assert figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
