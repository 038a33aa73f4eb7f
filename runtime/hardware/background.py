"""A guard that keeps the Python interpreter from ending while daemon threads run PyTorch code.

Without the guard, the process may abort at its end (exit code 134, "terminate called without an active exception"),
even if the user's script has succeeded. The reason is the interpreter's lock. Once the interpreter has begun to end,
Python ends every daemon thread that takes this lock. PyTorch takes the lock in C++ destructors, which must not throw,
so ending the thread there aborts the process.

Therefore daemon threads call PyTorch only inside `native_work` blocks. At its exit, the process waits until no thread
is inside such a block, for at most 30 s.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

LIMIT_S = 30.0  # a thread may be stuck in the kernel, at a drive that hangs


class InterpreterEndsError(RuntimeError):
    """An error: the Python interpreter is ending, so that no background work may begin."""


class _NativeWork:
    """The number of threads that are inside a `native_work` block, and whether more threads may enter such a block.

    No thread may enter once the Python interpreter is ending.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.ending = False


_work = _NativeWork()


@contextlib.contextmanager
def native_work() -> Iterator[None]:
    """Keep the Python interpreter from ending while the code in this ``with`` block runs, for at most 30 s.

    The end of the process waits for the block. The code in the block should therefore not wait for other threads.

    Raises:
        InterpreterEndsError: The interpreter is ending already. The block is not run.
    """
    work = _work
    with work.changed:
        if work.ending and threading.current_thread().daemon:
            raise InterpreterEndsError("the Python interpreter is ending: background work no longer begins")
        work.running += 1
    try:
        yield
    finally:
        with work.changed:
            work.running -= 1
            if work.ending:
                work.changed.notify_all()


_kept: list[object] = []


def free(held: list[object]) -> None:
    """Empty a list on a daemon thread, so that objects to which only the list refers are freed.

    Freeing a tensor runs native code of PyTorch, which a daemon thread must not do while the Python interpreter is
    ending. In this case the objects are kept, and the main thread frees them.
    """
    try:
        with native_work():
            held.clear()
    except InterpreterEndsError:
        _kept.append(held)


@atexit.register
def _wait_for_running_work() -> None:
    work, end_s = _work, time.monotonic() + LIMIT_S
    with work.changed:
        work.ending = True
        while work.running and (left_s := end_s - time.monotonic()) > 0:
            work.changed.wait(left_s)


class _Failure:
    """An object that ends the process with exit code 1 when Python frees it."""

    _exit = staticmethod(os._exit)  # kept here, because the module `os` may be gone when this object is freed

    def __del__(self) -> None:
        self._exit(1)


def fail_at_the_end() -> None:
    """Make this process end with exit code 1, for an error of an ``atexit`` handler, which Python only prints."""
    sys.__dict__["_ebbtide_failure"] = _Failure()


def _forget_the_parents_threads() -> None:
    global _work
    _work = _NativeWork()


os.register_at_fork(after_in_child=_forget_the_parents_threads)
