"""A rank that is stopped (SIGSTOP) in the middle of a checkpoint: no hang, nothing half-visible."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.inspect import list_checkpoints, verify
from tests.runtime.checkpoint.conftest import Bench, some_state

ROOT = Path(__file__).parents[3]
RANK_1 = """
    import os, signal, sys
    from runtime.checkpoint.files import Files
    from tests.runtime.checkpoint.conftest import Bench, some_state

    folder, point = sys.argv[1:]

    class Stops(Files):
        def point(self, name):
            if name == point:
                print("stopping", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
                print("going on", flush=True)

    bench = Bench(folder, deadline_s=2.0)
    bench.save(some_state(1), "a", rank=1, world_size=2, nonce="first", step=1)
    print("saved", flush=True)
    try:
        bench.save(some_state(2), "b", rank=1, world_size=2, nonce="second", step=2, files=Stops())
    except Exception as error:
        print("told:", error, flush=True)
"""


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("point", ["job_started", "first_block", "payload_fsynced"])
def test_the_other_rank_is_told_within_the_deadline(tmp_path, child_environment, point):
    folder = tmp_path / "checkpoints"
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK_1), str(folder), point], cwd=ROOT,
        stdout=subprocess.PIPE, text=True, env={**child_environment, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        bench = Bench(folder, deadline_s=60.0)
        bench.save(some_state(1), "a", world_size=2, nonce="first", step=1)
        bench.deadline_s = 2.0
        with pytest.raises(CheckpointError, match=r"missing: rank \[1\]"):
            bench.save(some_state(2), "b", world_size=2, nonce="second", step=2)
        assert state_of(other.pid) == "T", "it was stopped all the while"
        assert [entry.tag for entry in list_checkpoints(folder)] == ["a"]
        os.kill(other.pid, signal.SIGCONT)
        printed, _ = other.communicate(timeout=60)
    finally:
        other.kill()
        other.wait()
    assert printed.splitlines()[:3] == ["saved", "stopping", "going on"]
    assert "told:" in printed, "the rank that slept hears that its checkpoint is void"
    assert [entry.tag for entry in list_checkpoints(folder)] == ["a"]
    assert verify(folder, "a") == []
    assert (folder / "latest").read_text() == "a"
