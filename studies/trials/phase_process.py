"""A phase of a study in a process of its own, which tells how far it is.

Engines of different kinds never share a process: what one leaves behind (pinned memory, threads,
a warm allocator) would be in the other's figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from runtime.hardware.launcher import free_port, remove_shared_buffers

_VARIABLE = "EBBTIDE_PROGRESS_FD"
_TAIL_LINES = 25


class PhaseError(RuntimeError):
    """A phase ended badly; the message has the end of its log."""


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` pieces of work, and what it is busy with."""

    done: int
    total: int
    note: str = ""


class PhaseProcess:
    """Starts ``python -m MODULE ARGUMENTS``; its output goes to a log file.

    Owned by one thread. The child is killed when the ``with`` block is left early.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        reader, writer = os.pipe()
        self._port = free_port()  # of the child's own job, should it become the only rank of one
        environment = {**os.environ, _VARIABLE: str(writer), "MASTER_PORT": str(self._port)}
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, *arguments],
                stdout=output, stderr=subprocess.STDOUT, env=environment, pass_fds=[writer],
            )  # fmt: skip
        os.close(writer)  # else the end of the child would not be the end of the pipe
        self._reports: TextIO = os.fdopen(reader)

    def __enter__(self) -> PhaseProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        self._reports.close()
        remove_shared_buffers(self._port)  # a killed child could not

    def progress(self) -> Iterator[Progress]:
        """What the child reports, until it ends."""
        for line in self._reports:
            yield Progress(**json.loads(line))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        """SIGKILL: nothing in the child gets a chance to tidy up. Returns its exit status."""
        self._process.send_signal(signal.SIGKILL)
        return self._process.wait()

    def finish(self) -> None:
        """Waits for the end.

        Raises:
            PhaseError: the child did not exit with 0.
        """
        status = self._process.wait()
        if status != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise PhaseError(f"exit status {status}; the end of {self.log}:\n{tail}")


def report(done: int, total: int, note: str = "") -> None:
    """Called in the child: tells the parent, if there is one that listens."""
    descriptor = os.environ.get(_VARIABLE)
    if descriptor is None:
        return
    line = json.dumps({"done": done, "total": total, "note": note}) + "\n"
    os.write(int(descriptor), line.encode())
