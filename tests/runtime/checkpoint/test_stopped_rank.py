"""Tests of a rank that is stopped by SIGSTOP during a checkpoint save: the other rank does not hang, and
no incomplete checkpoint becomes visible.
"""

import os
import signal
import threading
import time

import pytest
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify

from tests.runtime.checkpoint.conftest import Bench, some_state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="rank 1 is a forked process")


class Stops(Files):
    def __init__(self, at, say):
        self.at, self.say = at, say

    def point(self, name):
        if name == self.at:
            self.say("stopping")
            # Sent to this thread. If it were sent to the process, another thread might take it, and this thread would
            # continue.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            self.say("going on")


def rank_1(folder, point, log):
    """Fork a process that saves checkpoints as rank 1 and stops itself by SIGSTOP at ``point`` of its second
    save. Return its process id.

    A forked process needs no new imports, so it starts quickly.
    """
    pid = os.fork()
    if pid:
        return pid
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(text):
        os.write(descriptor, f"{text}\n".encode())

    try:
        bench = Bench(folder, deadline_s=60.0)
        bench.save(some_state(1), "a", rank=1, world_size=2, nonce="first", step=1)
        say("saved")
        files = Stops(point, say)
        bench.save(some_state(2), "b", rank=1, world_size=2, nonce="second", step=2, files=files)
    except BaseException as error:  # the parent process reads it
        say(f"told: {error}")
    finally:
        os._exit(0)


# No point after which the job's own thread continues to its vote.
@pytest.mark.parametrize("point", ["staging_made", "first_block", "payload_fsynced"])
def test_the_other_rank_is_told_within_the_deadline(tmp_path, point):
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    bench = Bench(folder, deadline_s=60.0)
    job = bench.begin(some_state(1), "a", world_size=2, nonce="first", step=1)
    pid = rank_1(folder, point, log)  # before this process starts threads
    try:
        job.start()
        assert job.wait(60)
        assert job.failure is None
        bench.deadline_s = 0.5
        with pytest.raises(CheckpointError, match=r"ranks \[1\] did not report"):
            bench.save(some_state(2), "b", world_size=2, nonce="second", step=2)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # waits until the process is stopped
        assert [entry.tag for entry in list_checkpoints(folder)] == ["a"]
        os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(ended(pid)) == 0
    finally:
        if running(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    told = log.read_text().splitlines()
    assert told[:3] == ["saved", "stopping", "going on"]
    assert told[3].startswith("told:"), "the stopped rank must report that its checkpoint failed"
    assert [entry.tag for entry in list_checkpoints(folder)] == ["a"]
    assert verify(folder, "a") == []
    assert (folder / "latest").read_text() == "a"


def ended(pid, limit_s=60):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    raise AssertionError("rank 1 hangs")


def running(pid):
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
