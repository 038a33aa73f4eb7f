"""The renaming of a finished folder, in one step, or in two steps with a way back after a crash."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME

PARTIAL, REPLACED = ".partial", ".replaced"


def publish_folder(staging: Path, target: Path, files: Files, aside: Callable[[Path], None] | None = None) -> None:
    """Give a finished folder its name, and return when that is durable.

    A folder that has the name already is swapped out in one step where the filesystem can; where
    it cannot, it keeps the name ``.TAG.NONCE.replaced`` for a moment, and `recover_replaced` finds
    it after a crash in between.

    Args:
        aside: takes the replaced folder; the default deletes it.
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
    """Give a checkpoint its name back if a crash came between the two renames of a swap."""
    for folder in save_dir.glob(f".*{REPLACED}"):
        tag = folder.name[1:].removesuffix(REPLACED).rpartition(".")[0]
        if (folder / GLOBAL_NAME).exists() and not (save_dir / tag).exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                files.rename(folder, save_dir / tag)
                files.fsync_folder(save_dir)
