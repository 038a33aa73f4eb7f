"""The folders of checkpoints: which process writes to a folder, how a finished folder gets its final name, which
checkpoints a folder has, and the deletion of old ones.

A process that saves a checkpoint writes its identity to a file (a note) in the checkpoint's folder. Another process can
then tell a save in progress from a save that has crashed.
"""

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, GlobalManifest, parse

LEASE_S = 4.0  # interval at which a note is renewed
LEASES = 3  # after this many intervals without renewal, the owner of a note counts as dead


def owner() -> dict[str, Any]:
    """Return the identity of this process, including its start time."""
    # The start time is needed because another process may have the same process id after a container's restart.
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def lives(who: dict[str, Any], path: Path) -> bool:
    """Return whether the process that wrote a note in a checkpoint folder may still be running."""
    if who.get("host") != socket.gethostname():
        return _is_renewed(path)
    started = _started(int(who.get("pid", 0)))
    return bool(started) and started == who.get("started", started)


def _is_renewed(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        if _now_ns(path.parent) - before > LEASES * LEASE_S * 1e9:
            return False  # not renewed for long enough, so that a resume after a crash need not wait
        for _ in range(LEASES):
            time.sleep(LEASE_S)  # whether a process on another machine has died shows only by its silence
            if path.stat().st_mtime_ns != before:
                return True
    return False


def _now_ns(folder: Path) -> int:
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:  # the folder belongs to another user
        return time.time_ns()


PARTIAL, REPLACED = ".partial", ".replaced"


def publish_folder(staging: Path, target: Path, files: Files, aside: Callable[[Path], None] | None = None) -> None:
    """Rename a finished checkpoint folder to its final name. Return when the name is durable.

    If a folder already has this name, the two folders are exchanged in one step if the filesystem can.
    Otherwise the old folder is first renamed to ``.TAG.NONCE.replaced``. If a crash comes before the second
    rename, `recover_replaced` restores it.

    Args:
        aside: Function that receives the replaced folder. The default deletes it.
    """
    if not target.exists():
        files.rename(staging, target)
        leftover = None
    elif files.exchange(staging, target):
        leftover = staging
    else:
        leftover = staging.with_suffix(REPLACED)
        files.rename(target, leftover)
        files.point("tag_set_aside")
        files.rename(staging, target)
    files.point("tag_renamed")
    files.fsync_folder(target.parent)
    files.point("parent_fsynced")
    if leftover is not None:
        with contextlib.suppress(OSError):  # the next attempt removes it
            (aside or files.remove_tree)(leftover)


def recover_replaced(save_dir: Path, files: Files) -> None:
    """Give old checkpoints their names back after a crash.

    The crash came while an old checkpoint was being replaced by a new one of the same name: after the old one was
    renamed, and before the new one had the name.
    """
    for folder in save_dir.glob(f".*{REPLACED}"):
        tag = folder.name[1:].removesuffix(REPLACED).rpartition(".")[0]
        if (folder / GLOBAL_NAME).exists() and not (save_dir / tag).exists():
            with contextlib.suppress(FileNotFoundError):  # another rank has already done it
                files.rename(folder, save_dir / tag)
                files.fsync_folder(save_dir)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint, with its global manifest (the file that marks it as committed)."""

    folder: Path
    manifest: GlobalManifest


def committed(save_dir: Path) -> list[Committed]:
    """Return the committed checkpoints of a folder, newest first."""
    # Checkpoints with damaged manifests (see `damaged`), and checkpoints whose folders were renamed (see `renamed`),
    # are left out.
    result = [c for c in _whole(save_dir) if c.manifest.tag == c.folder.name]
    return sorted(result, key=lambda c: c.manifest.sequence, reverse=True)


def renamed(save_dir: Path) -> list[Committed]:
    """Return checkpoints renamed after their commit. They load by the new name, and are never deleted as old ones."""
    return [c for c in _whole(save_dir) if c.manifest.tag != c.folder.name]


def _whole(save_dir: Path) -> list[Committed]:
    return [c for c in map(_read, _folders(save_dir)) if isinstance(c, Committed)]


def damaged(save_dir: Path) -> dict[str, str]:
    """Return a folder's checkpoints with an unusable global manifest, as a dict from tag to reason."""
    return {f.name: str(r) for f in _folders(save_dir) if not isinstance(r := _read(f), Committed)}


def _folders(save_dir: Path) -> list[Path]:
    if not save_dir.is_dir():
        return []
    return sorted(f for f in save_dir.iterdir() if not f.name.startswith(".") and (f / GLOBAL_NAME).is_file())


def _read(folder: Path) -> Committed | Exception:
    try:
        manifest = parse((folder / GLOBAL_NAME).read_bytes(), GlobalManifest, GLOBAL_NAME)
    except (OSError, ManifestError) as error:
        return error
    return Committed(folder, manifest)


@contextlib.contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine from deleting a checkpoint while the ``with`` block reads it.

    A shared lock on the checkpoint's manifest protects the checkpoint. The lock also ends if the process ends.
    """
    with (folder / GLOBAL_NAME).open("rb") as manifest:
        fcntl.flock(manifest, fcntl.LOCK_SH)
        if not (folder / GLOBAL_NAME).exists():
            raise CheckpointError(f"{folder} was deleted as an old checkpoint while it was being opened: load again")
        yield


def prune(save_dir: str | Path, keep: int, files: Files | None = None) -> list[str]:
    """Delete all but the ``keep`` newest committed checkpoints of a folder. Return the deleted tags.

    The one that ``latest`` names and those that are being read stay too. A checkpoint is always complete or gone.

    Raises:
        CheckpointError: ``keep`` is below 1.
    """
    if keep < 1:
        raise CheckpointError(f"keep must be >= 1 so that a checkpoint is left, but got {keep}")
    save_dir, files = Path(save_dir), files or Files()
    latest = named_latest(save_dir)
    old = [c.folder for c in committed(save_dir)[keep:] if c.folder.name != latest]
    return [folder.name for folder in old if _delete(folder, files)]


def named_latest(save_dir: Path) -> str | None:
    """Return the tag in the file ``latest`` of a folder of checkpoints, or None if there is no such file."""
    try:
        return (save_dir / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _delete(folder: Path, files: Files) -> bool:
    trash = folder.with_name(f".{folder.name}.{os.getpid()}.trash")
    try:
        with (folder / GLOBAL_NAME).open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files.rename(folder, trash)
    except (BlockingIOError, FileNotFoundError):  # it is being read, or the training script deletes it, too
        return False
    files.fsync_folder(folder.parent)
    files.point("trash_renamed")
    files.remove_tree(trash)
    files.point("trash_deleted")
    return True


def newest_beside(directory: Path) -> Path | None:
    """Return the folder next to ``directory`` with the newest committed checkpoint, or None if there is none."""
    result = [c for folder in siblings(directory) for c in committed(folder)]
    newest = max(result, key=lambda c: c.manifest.committed_unix_s, default=None)
    return None if newest is None else newest.folder.parent


def siblings(directory: Path) -> list[Path]:
    """Return the folders next to ``directory`` with names that differ from its name only in numbers.

    These are the other checkpoints of a run, if its trainer makes a folder for each (``checkpoint-500``).
    """
    directory = directory.absolute()
    kind = re.sub(r"\d+", "#", directory.name)
    others = (f for f in directory.parent.glob("*") if f.is_dir() and f != directory)
    return sorted(f for f in others if "#" in kind and re.sub(r"\d+", "#", f.name) == kind)


def holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder or one of its direct subfolders holds a checkpoint of ebbtide or DeepSpeed."""
    for depth in ("", "[!.]*/"):  # hidden folders are left out, because notes in them come and go
        for name in (GLOBAL_NAME, "*_states.pt"):
            if next(folder.glob(depth + name), None) is not None:
                return True
    return False
