"""Processes forked from a parent that has already imported DeepSpeed, to save the slow import."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

LIMIT_S = 180.0
TOLD_S = 1.0  # time in which a process writes the stack of each of its threads
TOLD_FROM_S = 5.0  # a process with a shorter limit is not asked for its stacks


def fork(work: Callable[[], None], log: Path) -> int:
    """Fork a process that calls ``work`` and appends its output to the file ``log``. Return its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        work()
        status = 0
    except BaseException:  # the log has the error, and the parent process sees the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Forked:
    """A forked process that appends its output to a log file."""

    def __init__(self, work: Callable[[], None], log: Path) -> None:
        self.log, self.pid = log, fork(work, log)

    def ended(self, within_s: float) -> int:
        """Wait for the process to end, and return its exit status, which is negative for a signal.

        If the process has not ended after ``within_s`` seconds, it is killed with SIGKILL. Its log then
        shows where each of its threads was.
        """
        end = time.monotonic() + within_s
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if not done and time.monotonic() > end:
                if within_s >= TOLD_FROM_S:
                    os.kill(self.pid, signal.SIGUSR1)
                    time.sleep(TOLD_S)
                os.kill(self.pid, signal.SIGKILL)
                done, status = os.waitpid(self.pid, 0)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)

    @property
    def output(self) -> str:
        """Return the last 3000 characters of the log file to which the forked process writes its output."""
        return self.log.read_text()[-3000:] if self.log.exists() else "(no output)"


class Child(Forked):
    """A forked process that runs a training job with a single rank."""

    def __init__(self, work: Callable[[], None], log: Path) -> None:
        self._port = free_port()
        super().__init__(lambda: self._train(work), log)

    def _train(self, work: Callable[[], None]) -> None:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._port),
        )
        work()

    def ended(self, within_s: float) -> int:
        status = super().ended(within_s)
        remove_shared_buffers(self._port)
        return status

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the forked process ends by itself.

        Raises:
            RuntimeError: If the process fails, or has not ended after ``limit_s`` seconds.
        """
        status = self.ended(limit_s)
        if status:
            raise RuntimeError(
                f"a training run must succeed within {limit_s:g} s, but ended with exit status {status} "
                f"({-signal.SIGKILL} if it was still running after {limit_s:g} s). Its output: {self.output}"
            )

    def kill(self) -> None:
        """Kill the forked process with SIGKILL.

        Raises:
            RuntimeError: If the process had already ended, so that the kill had no effect.
        """
        os.kill(self.pid, signal.SIGKILL)
        status = self.ended(LIMIT_S)
        if status != -signal.SIGKILL:
            raise RuntimeError(
                f"the training run must last until the study kills it, but had already ended with exit status "
                f"{status}. Its output: {self.output}"
            )
