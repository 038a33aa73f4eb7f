"""A process that is told to end first commits the checkpoint it is writing."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

from runtime.checkpoint.trainers.bystanders import TRAINERS


class Saving(Protocol):
    def finish(self) -> None:
        """Returns when no checkpoint is in flight; raises nothing."""
        ...


_savers: weakref.WeakSet[Saving] = weakref.WeakSet()
sigterm_came = threading.Event()


def finish_at_sigterm(saving: Saving) -> None:
    """At SIGTERM (preemption, a launcher that gives up) the checkpoint in flight is committed, as
    far as the grace period goes; then the process dies of SIGTERM as it would have.

    Where the script handles SIGTERM itself, its handler stays.
    """
    _savers.add(saving)
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets the main thread alone set handlers
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _at_sigterm)


def _at_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    if _package(signal.getsignal(signal.SIGTERM)) in TRAINERS:
        return  # Lightning puts its own before ours, and ends training itself, which commits
    sigterm_came.set()
    # In a thread: what this handler interrupted may hold a lock that the writers need.
    threading.Thread(target=_finish_and_die, args=(os.getpid(),), daemon=True).start()


def _package(handler: Any) -> str:
    module = getattr(handler, "__module__", None) or type(handler).__module__
    return str(module).partition(".")[0]


def _finish_and_die(pid: int) -> None:
    for saving in list(_savers):
        saving.finish()
    # Python would let the main thread alone do this, which may be inside a collective for ever.
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))  # SIG_DFL
    os.kill(pid, signal.SIGTERM)
