"""A warning for training processes that wait for another process to compile a DeepSpeed op.

torch guards each build by a file named ``lock``. If a process is killed while it compiles, its lock file
remains, and later processes wait forever without a message.
"""

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("ebbtide")

LOCK = "lock"
_YOUNG_S = 30.0  # a builder takes its lock some time before its compiler runs


def extensions_folder() -> Path:
    """Return torch's folder for built extensions."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def locks(root: Path) -> list[Path]:
    """Return the paths of the lock files of builds of torch extensions, such as DeepSpeed's ops.

    The files are in torch's extensions folder and in its folders per Python version.
    """
    return sorted([*root.glob(f"*/{LOCK}"), *root.glob(f"*/*/{LOCK}")])


def is_stale(lock: Path) -> bool:
    """Return whether the lock file of a torch extension's build was left by a process that has ended."""
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime > _YOUNG_S and not _built_in(lock.parent)
    return False


def _built_in(folder: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder.resolve():
                return True
    return False


def told(lock: Path) -> str:
    """Return a message about a lock file that blocks the build of a torch extension.

    The message says which build it is, since when the lock file exists, and whether to delete the file.
    """
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lock.stat().st_mtime))
    except OSError:
        since = "a moment ago"
    if is_stale(lock):
        state = f"No process on this machine is building the extension any more: delete the file (rm {lock})"
    else:
        state = "The build is running"
    return f"the build of the extension {lock.parent.name} has held its lock file {lock} since {since}. {state}"


@contextlib.contextmanager
def waits_are_told(every_s: float = 10.0) -> Iterator[None]:
    """Warn in the log while the code in this ``with`` block waits for another process to build a torch extension.

    Warn again if the building process has died.
    """
    over = threading.Event()
    threading.Thread(
        target=_watch, args=(threading.get_ident(), over, every_s), name="ebbtide-builds", daemon=True
    ).start()
    try:
        yield
    finally:
        over.set()


def _watch(thread: int, over: threading.Event, every_s: float) -> None:
    said = ""
    while not over.wait(every_s):
        lock = _waited_for(thread)
        if lock is not None and (text := told(lock)) != said:
            logger.warning("waiting for another process that compiles a PyTorch extension: %s", text)
            said = text


def _waited_for(thread: int) -> Path | None:
    running = sys._current_frames().get(thread)
    for frame, _ in traceback.walk_stack(running) if running is not None else ():
        if frame.f_code.co_name == "wait" and Path(frame.f_code.co_filename).name == "file_baton.py":
            return Path(frame.f_locals["self"].lock_file_path)
    return None
