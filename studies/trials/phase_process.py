"""A process that runs one phase (part) of a study, reports its progress and can be made to wait.

Engines of different kinds never share a process. Otherwise pinned memory, threads or a warm allocator of one engine
would affect the times of another.
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
_QUIET_S = 5.0
_TOLD = "ebbtide: "  # begins a line on stderr that a user must see, such as what a process waits for
_parent: Connection | None = None  # in the child process: the connection to its parent


class PhaseError(RuntimeError):
    """An error in a process that runs one phase (part) of a study. The message has the end of the process's log."""


@dataclass(frozen=True)
class PhaseProgress:
    """The progress of one phase (part) of a study: ``done`` of ``total`` units of work, and a note on what runs now."""

    done: int
    total: int
    note: str = ""


def warm_up(modules: Sequence[str]) -> None:
    """Import modules once for all phases (parts) of a study, before the process of the first phase starts.

    A server process imports the modules and forks the processes of the phases. With CUDA, which does not survive a
    fork, nothing is done here, and the process of each phase imports the modules itself.
    """
    if _start_method() == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def _start_method() -> str:
    import torch

    return "spawn" if torch.cuda.is_available() else "forkserver"


class PhaseProcess:
    """A process that runs one phase (part) of a study, ``work(**arguments)``, and prints to a log file.

    Only one thread may use this object. If its ``with`` block is left early, the process is killed.

    Args:
        work: A function that the process can import by its name.

    Attributes:
        waits: True if the process waits at a `pause`, as of the last report that `progress` has read.
    """

    def __init__(self, work: Callable[..., object], arguments: Mapping[str, Any], log: Path):
        context: Any = multiprocessing.get_context(_start_method())
        self._port = free_port()  # port for the child's own job, in case it becomes the only rank of one
        self.log, self.waits = log, False
        log.write_text("")
        self._child, theirs = context.Pipe()
        environment = {**os.environ, "MASTER_PORT": str(self._port)}  # the server process still has its original port
        self._process = context.Process(target=_run, args=(work, dict(arguments), log, environment, theirs))
        self._process.start()
        theirs.close()  # otherwise the pipe would stay open when the child ends

    def __enter__(self) -> "PhaseProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
        self._child.close()
        remove_shared_buffers(self._port)  # a killed child cannot remove them itself

    def progress(self, tell: Callable[[str], None] = lambda _: None) -> Iterator[PhaseProgress]:
        """Yield the progress reports of a process that runs one phase (part) of a study.

        The reports end when the process ends, or when it pauses until the parent process calls `go_on`.

        Args:
            tell: Called with what ebbtide says on the process's stderr, if no report comes for some seconds.
        """
        told = 0
        while True:
            try:
                while not self._child.poll(_QUIET_S):
                    lines = [s for s in self.log.read_text(errors="replace").splitlines() if s.startswith(_TOLD)]
                    for line in lines[told:]:
                        tell(line)
                    told = len(lines)
                report = self._child.recv()
            except (EOFError, ConnectionResetError):
                return
            if report is None:
                self.waits = True
                return
            yield report

    def go_on(self) -> None:
        """Let a process that runs one phase (part) of a study continue."""
        # The process has called `pause` and waits for this call.
        self.waits = False
        self._child.send(None)

    @property
    def running(self) -> bool:
        return bool(self._process.is_alive())

    def kill(self) -> int:
        """Send SIGKILL to the process that runs one phase (part) of a study, and return the exit status of the process.

        The process gets no time to clean up.
        """
        self._process.kill()
        self._process.join()
        return int(self._process.exitcode)

    def finish(self) -> None:
        """Wait until a process that runs one phase (part) of a study ends.

        Raises:
            PhaseError: If the process ends with an exit status other than 0.
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
    finally:  # here, because processes of multiprocessing do not run atexit functions
        remove_shared_buffers(int(environment["MASTER_PORT"]))


def report(done: int, total: int, note: str = "") -> None:
    """Report the progress of one phase (part) of a study to the parent process, if there is one."""
    if _parent is not None:
        _parent.send(PhaseProgress(done, total, note))


def pause() -> None:
    """Wait until the parent process lets this process of a study continue. Without a parent, return immediately."""
    if _parent is not None:
        _parent.send(None)
        _parent.recv()
