"""Messages about builds of DeepSpeed's ops, and the choice of their ninja.

torch guards each build by a file named ``lock``. If a process is killed while it compiles, its lock file
remains, and later processes wait forever without a message.
"""

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOCK = "lock"
QUIET_S = 2.0  # a build that takes longer is told


def extensions_folder() -> Path:
    """Return torch's folder for built extensions."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def locks(root: Path) -> list[Path]:
    """Return the paths of the lock files of builds of torch extensions, such as DeepSpeed's ops."""
    return sorted([*root.glob(f"*/{LOCK}"), *root.glob(f"*/*/{LOCK}")])


def is_stale(lock: Path) -> bool:
    """Return whether the lock file of a torch extension's build was left by a process that has ended."""
    with contextlib.suppress(OSError):
        # Nobody but root sees what other users' processes hold.
        return os.geteuid() in (0, lock.stat().st_uid) and not _is_held(lock)
    return False


def _is_held(lock: Path) -> bool:
    # torch holds the file open until it has built. Compilers run in its folder, and go on if torch is killed.
    file = lock.resolve()
    held = {"cwd": str(file.parent), "fd/*": str(file)}
    for pattern, path in held.items():
        for link in Path("/proc").glob(f"[0-9]*/{pattern}"):
            with contextlib.suppress(OSError):
                if str(link.readlink()) == path:
                    return True
    return False


def lock_text(lock: Path) -> str:
    """Return a message about a lock file that blocks the build of a torch extension.

    The message says which build it is, since when the lock file exists, and whether to delete the file.
    """
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lock.stat().st_mtime))
    except OSError:
        since = "a moment ago"
    if is_stale(lock):
        state = (
            "No process on this machine is building the extension any more. Unless another machine that shares this "
            f"folder builds it, delete the file (rm {lock})"
        )
    else:
        state = "The build is running"
    return f"the build of the extension {lock.parent.name} has held its lock file {lock} since {since}. {state}"


def own_ninja_first() -> None:
    """Put the folder of this Python first on PATH, unless its ninja is the one that torch would call anyway."""
    # Each version of ninja discards the log of another one, and then compiles all ops again. Without an activated
    # environment, torch would call the system's ninja, or find none.
    own = Path(sys.executable).parent / "ninja"
    if own.exists() and shutil.which("ninja") != str(own):
        os.environ["PATH"] = os.pathsep.join(filter(None, [str(own.parent), os.environ.get("PATH")]))


def tell_builds(cpp_extension: Any, rank: Callable[[], int]) -> None:
    """Make ``torch.utils.cpp_extension``, with which DeepSpeed compiles its ops, say when it compiles or waits.

    Args:
        rank: `ebbtide.runtime.hardware.launcher.rank`. Rank 0 says this. The function is not imported here, because a
            process that has not imported ebbtide may be unable to (`ebbtide.runtime.frontdoor.hook`).
    """
    original = cpp_extension.load
    if hasattr(original, "_ebbtide_tells"):
        return

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with slow_builds_logged(kwargs.get("name") or args[0]) if rank() == 0 else contextlib.nullcontext():
            return original(*args, **kwargs)

    load._ebbtide_tells = True  # type: ignore[attr-defined]
    cpp_extension.load = load


@contextlib.contextmanager
def slow_builds_logged(name: str, every_s: float = 10.0) -> Iterator[None]:
    """Say on stderr what takes so long, while the code in this ``with`` block has torch load the extension ``name``.

    The extension is compiled, or another process that compiles it is waited for. Say also if that process has died.
    """
    over = threading.Event()
    watched = (threading.get_ident(), over, name, every_s)
    threading.Thread(target=_watch, args=watched, name="ebbtide-builds", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(thread: int, over: threading.Event, name: str, every_s: float) -> None:
    said, wait_s = "", QUIET_S
    while not over.wait(wait_s):
        lock, wait_s = _waited_for(thread), every_s
        text = f"the kernel {name} is compiled, which takes a minute or two, once on a machine"
        if lock is not None:
            text = f"waiting for another process that compiles a PyTorch extension: {lock_text(lock)}"
        if text != said:
            print(f"ebbtide: {text}", file=sys.stderr, flush=True)
            said = text


def _waited_for(thread: int) -> Path | None:
    running = sys._current_frames().get(thread)
    for frame, _ in traceback.walk_stack(running) if running is not None else ():
        if frame.f_code.co_name == "wait" and Path(frame.f_code.co_filename).name == "file_baton.py":
            return Path(frame.f_locals["self"].lock_file_path)
    return None
