"""The protection of a checkpoint in progress from other code in this process that reads or deletes checkpoints, such as
a trainer's code.

To such code, a checkpoint in progress must look as if it had been written already. Python reports every file that is
opened, listed or removed, and every program that is started, to audit hooks (PEP 578). The hook of this module makes a
reader of an unfinished checkpoint wait until the commit. If a trainer deletes an older checkpoint meanwhile, ebbtide
first makes hard links to its files, so that the data is not lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.runtime.checkpoint.protocol.folders import holds_checkpoint
from ebbtide.runtime.checkpoint.protocol.rotation import NOTES, settle_below
from ebbtide.runtime.checkpoint.trainers import deleted_first, trainers_folder

if TYPE_CHECKING:
    from ebbtide.runtime.checkpoint.stream.job import BackgroundSave

# These trainers look for checkpoint files right after a save, and delete older checkpoints.
TRAINERS = ("transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric")

_READS = {"open", "os.truncate", "shutil.copyfile", "shutil.copytree"}
_LISTS = {"os.listdir", "os.scandir"}
_MOVES = {"os.rename", "shutil.move", "os.remove", "os.rmdir"}
_STARTS = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn"}
_DELETES = {"shutil.rmtree"}
_MAKES = {"os.mkdir"}
_HEARD = _READS | _LISTS | _MOVES | _STARTS | _DELETES | _MAKES

_mine = threading.local()
_lock = threading.Lock()
_jobs: list[BackgroundSave] = []
_settled: dict[str, int] = {}  # folder that was checked -> its modification time then
_stat_names = ("stat", "lstat", "access")
watching = False  # True after a call of `watch`. `ebbtide.runtime.frontdoor.hook` then leaves listings to this module


def foreign_trainer() -> str | None:
    """Return the trainer library (one of `TRAINERS`) whose code is on the present call stack, or None."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in TRAINERS:
            return package
    return None


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Mark the code that this thread runs inside the ``with`` block as ebbtide's own.

    While a checkpoint is being written, other code of this process waits for the checkpoint's commit before it opens or
    lists the checkpoint's files. Marked code does not wait.
    """
    before = getattr(_mine, "busy", False)
    _mine.busy = True
    try:
        yield
    finally:
        _mine.busy = before


def guard(job: BackgroundSave) -> None:
    """Make other code of this process, such as a trainer, wait for a checkpoint's commit before using its files.

    Call `release` to end this effect.
    """
    watch()
    with _lock:
        _jobs.append(job)
        _watch_stat()


def release(job: BackgroundSave) -> None:
    with _lock:
        if job in _jobs:
            _jobs.remove(job)
        if not _jobs:
            _unwatch_stat()


def others_in_flight(job: BackgroundSave) -> bool:
    """Return whether another training engine of this process is also writing a checkpoint."""
    with _lock:
        return any(other is not job for other in _jobs)


@functools.cache
def watch() -> None:
    """Install the audit hook that notices when code of this process opens, lists or deletes files."""
    global watching
    sys.addaudithook(_heard)
    watching = True


def wait_for_jobs(folder: Path | None = None) -> None:
    """Wait until no engine of this process is writing a checkpoint, in ``folder`` if it is given.

    Only ebbtide's own code needs this call (see `ours`). Other code waits in an audit hook when it opens a file.
    """
    with _lock:
        jobs = list(_jobs)
    for job in jobs:
        if folder is None or _real(job.attempt.save_dir) == _real(folder):
            job.wait()


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event not in _HEARD or getattr(_mine, "busy", False):
        return
    if threading.current_thread().name.startswith("ebbtide-"):
        return
    with ours():
        if event in _LISTS:
            _settle_once(args[0])
        if event in _MAKES and foreign_trainer() == "transformers":
            trainers_folder.being_made(Path(os.path.abspath(os.fsdecode(args[0]))))
        if event in _DELETES and not _jobs and (path := _path(args)) is not None:
            deleted_first.keep(path)
        for job in _jobs.copy():  # a copy, because jobs that end remove themselves
            if _concerns(event, args, job):
                job.wait()


def _settle_once(directory: Any) -> None:
    if not isinstance(directory, (str, bytes, os.PathLike)) and directory is not None:
        return  # a file descriptor
    name = os.path.abspath(os.fsdecode(directory) if directory is not None else ".")
    with contextlib.suppress(OSError):
        changed = os.stat(name).st_mtime_ns
        if _settled.get(name) == changed or name.startswith(sys.prefix):
            return
        if any(job.attempt.save_dir.is_relative_to(name) for job in _jobs):
            return
        settle_below(Path(name))
        _settled[name] = changed


def _concerns(event: str, args: tuple[Any, ...], job: BackgroundSave) -> bool:
    if event in _STARTS:
        # Only programs with the folder in their arguments, because DeepSpeed itself starts programs in every step.
        folder = job.attempt.save_dir
        arguments = str(args[:3])
        return not job.placed and (str(folder) in arguments or str(_real(folder)) in arguments)
    path = _path(args)
    if path is None:
        return False
    if event in _DELETES:
        return _deletes(path, job)
    folder = _real(job.attempt.save_dir)
    target = folder / job.attempt.tag
    if event in _MOVES and target.is_relative_to(path):
        return True
    if job.placed and event not in _MOVES:
        # The checkpoint already has its final name. But a listing of the folder would show the note, which disappears
        # with the commit, and code such as `Path.rglob` could fail on it.
        return event in _LISTS and path == folder
    if path.is_relative_to(target) or path == folder / "latest":
        return True
    return event in _LISTS and path == folder


def _deletes(path: Path, job: BackgroundSave) -> bool:
    if _real(job.attempt.save_dir).is_relative_to(path):
        return True  # everything is deleted, including the checkpoint that is being written
    if not path.is_dir() or NOTES in path.parts or not holds_checkpoint(path):
        return False
    try:
        job.note.keep(path)
    except OSError:  # the file system has no hard links
        return True
    return False


@functools.lru_cache(16)
def _real(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _path(args: tuple[Any, ...]) -> Path | None:
    path = args[0] if args else None
    if path is None:
        path = "."
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    try:
        return Path(os.path.realpath(os.fsdecode(path)))
    except (OSError, ValueError):
        return None


# Audit hooks do not see `os.stat` and similar functions, and readers often call `os.path.exists` first. These functions
# are wrapped only while a checkpoint is being written.


def _watch_stat() -> None:
    for name in _stat_names:
        function = getattr(os, name)
        if not hasattr(function, "_ebbtide"):
            setattr(os, name, _waiting(function))


def _unwatch_stat() -> None:
    for name in _stat_names:
        original = getattr(getattr(os, name), "_ebbtide", None)
        if original is not None:
            setattr(os, name, original)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            _heard("open", (path,))
        return function(path, *args, **kwargs)

    wrapped._ebbtide = function  # type: ignore[attr-defined]
    return wrapped
