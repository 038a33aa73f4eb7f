"""The choice of the folder for files that ebbtide reuses between runs: compiled code and measured machines."""

import contextlib
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder for reusable files: ``EBBTIDE_CACHE`` if set, otherwise ``$XDG_CACHE_HOME/ebbtide``.

    If the folder cannot be written to, as in a container with a read-only home directory, return a folder of the
    current user in the directory for temporary files.
    """
    explicit = os.environ.get("EBBTIDE_CACHE")
    if explicit:
        return Path(explicit)
    with contextlib.suppress(RuntimeError):  # RuntimeError: the user has no home folder
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide"
        if takes_files(usual):
            return usual
    return _temporary(tempfile.gettempdir())


def takes_files(folder: Path) -> bool:
    """Return True if a folder exists or can be created, and the current user can write files there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@lru_cache
def _temporary(among: str) -> Path:
    # The folder is inside the directory for temporary files, which ``among`` names. Only the current user can write to
    # the folder, because compiled code is loaded from it.
    folder = Path(among) / f"ebbtide-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="ebbtide-", dir=among))
