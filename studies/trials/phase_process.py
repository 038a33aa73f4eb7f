"""A phase of a study in a process of its own, which tells how far it is and can be told to wait.

Engines of different kinds never share a process: what one leaves behind (pinned memory, threads,
a warm allocator) would be in the other's figures.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

_TAIL_LINES = 25
_parent: Connection | None = None  # in the child: who listens


class PhaseError(RuntimeError):
    """A phase ended badly; the message has the end of its log."""


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` pieces of work, and what it is busy with."""

    done: int
    total: int
    note: str = ""


def warm_up(modules: Sequence[str]) -> None:
    """Import modules once for all phases of this process: to be called before the first one.

    In the background, in a server that runs nothing else and forks the phases. Not where there is
    CUDA, which does not survive a fork: there each phase imports what it needs.
    """
    if _start_method() == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def _start_method() -> str:
    import torch

    return "spawn" if torch.cuda.is_available() else "forkserver"


class PhaseProcess:
    """Runs ``work(**arguments)``; what it prints goes to a log file.

    Owned by one thread. The child is killed when the ``with`` block is left early.

    Args:
        work: a function that the child can import by its name.

    Attributes:
        waits: the child is at a `pause`, as far as `progress` has come.
    """

    def __init__(self, work: Callable[..., object], arguments: Mapping[str, Any], log: Path):
        context: Any = multiprocessing.get_context(_start_method())
        self._port = free_port()  # of the child's own job, should it become the only rank of one
        self.log, self.waits = log, False
        log.write_text("")
        self._child, theirs = context.Pipe()
        environment = {**os.environ, "MASTER_PORT": str(self._port)}  # the server has that of old
        self._process = context.Process(target=_run, args=(work, dict(arguments), log, environment, theirs))
        self._process.start()
        theirs.close()  # else the end of the child would not be the end of the pipe

    def __enter__(self) -> "PhaseProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
        self._child.close()
        remove_shared_buffers(self._port)  # a killed child could not

    def progress(self) -> Iterator[Progress]:
        """Yield the child's reports, until it ends or waits for `go_on`."""
        while True:
            try:
                report = self._child.recv()
            except (EOFError, ConnectionResetError):
                return
            if report is None:
                self.waits = True
                return
            yield report

    def go_on(self) -> None:
        """Continue the child that waits at a `pause`."""
        self.waits = False
        self._child.send(None)

    @property
    def running(self) -> bool:
        return bool(self._process.is_alive())

    def kill(self) -> int:
        """SIGKILL: nothing in the child gets a chance to tidy up. Returns its exit status."""
        self._process.kill()
        self._process.join()
        return int(self._process.exitcode)

    def finish(self) -> None:
        """Waits for the end.

        Raises:
            PhaseError: the child did not exit with 0.
        """
        self._process.join()
        status = self._process.exitcode
        if status != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise PhaseError(f"exit status {status}; the end of {self.log}:\n{tail}")


def _run(
    work: Callable[..., object],
    arguments: Mapping[str, Any],
    log: Path,
    environment: dict[str, str],
    parent: Connection,
) -> None:
    """The child: its output belongs to the log, its end of the pipe to `report` and `pause`."""
    global _parent
    _parent = parent
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    try:
        work(**arguments)
    finally:  # here: a process of multiprocessing's ends without what atexit was told
        remove_shared_buffers(int(environment["MASTER_PORT"]))


def report(done: int, total: int, note: str = "") -> None:
    """Called in the child: tells the parent, if there is one that listens."""
    if _parent is not None:
        _parent.send(Progress(done, total, note))


def pause() -> None:
    """Called in the child: what comes next starts when the parent says so, if there is one.

    Raises:
        EOFError: the parent has ended.
    """
    if _parent is not None:
        _parent.send(None)
        _parent.recv()
