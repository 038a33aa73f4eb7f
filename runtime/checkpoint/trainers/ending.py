"""A SIGTERM handler that commits the checkpoint in progress before the process ends."""

import ctypes
import functools
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

from ebbtide.runtime.checkpoint.protocol import commit
from ebbtide.runtime.checkpoint.trainers.bystanders import TRAINERS


class Saving(Protocol):
    def finish(self) -> None:
        """Wait until no checkpoint is in progress, or until the writing of a checkpoint makes no more progress."""
        ...


_savers: weakref.WeakSet[Saving] = weakref.WeakSet()
_ending = threading.Lock()  # acquired once, by the thread that ends the process, and never released


def finish_at_sigterm(saving: Saving) -> None:
    """Arrange that SIGTERM commits the checkpoint in progress, within the grace period, before the process ends.

    SIGTERM comes from preemption or from a launcher after a failure. Afterwards the process dies of SIGTERM
    as usual. A script's own SIGTERM handler is kept.
    """
    _savers.add(saving)
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows only the main thread to set handlers
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _at_sigterm)
        _watch()


def _watch() -> None:
    into, out = os.pipe()
    os.set_blocking(out, False)
    others = signal.set_wakeup_fd(out, warn_on_full_buffer=False)
    if others != -1:  # an event loop already uses the descriptor, so only the signal handler can act
        signal.set_wakeup_fd(others)
        os.close(into)
        os.close(out)
        return
    threading.Thread(target=_read_signals, args=(into,), name="ebbtide-sigterm", daemon=True).start()
    _be_stock_in_children()


def _read_signals(descriptor: int) -> None:
    while numbers := os.read(descriptor, 64):
        # Only if this handler is installed, because a trainer's handler may continue training.
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _at_sigterm:
            _end()


@functools.cache
def _be_stock_in_children() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    if signal.getsignal(signal.SIGTERM) is _at_sigterm:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _at_sigterm(number: int, frame: FrameType | None) -> None:
    if _package(signal.getsignal(signal.SIGTERM)) in TRAINERS:
        return  # Lightning's handler runs before this one, ends training itself, and commits the checkpoint
    # In a thread, because the interrupted code may hold a lock that the writers need.
    threading.Thread(target=_end, daemon=True).start()


def _package(handler: Any) -> str:
    module = getattr(handler, "__module__", None) or type(handler).__module__
    return str(module).partition(".")[0]


def _end() -> None:
    commit.tell()
    if not _ending.acquire(blocking=False):
        return
    for saving in list(_savers):
        saving.finish()
    # Python would allow this only in the main thread, which may hang in a collective.
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))  # SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
