"""Tests of the studies' worker processes, which are forked from a process with all imports done."""

import signal
import time

from studies.bench import forked


def hang_here(reached):
    reached.touch()
    time.sleep(60)


def test_a_process_that_hangs_is_ended_and_tells_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "TOLD_FROM_S", 0.0)
    child = forked.Forked(lambda: hang_here(tmp_path / "reached"), tmp_path / "log")
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
    assert child.ended(0.1) == -signal.SIGKILL
    assert "in hang_here" in child.log.read_text()
