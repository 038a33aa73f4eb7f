"""The renaming of a finished checkpoint's folder to its final name.

If a folder with this name exists already, the two folders are exchanged in one step. Not every filesystem can do this.
Without it two renames are needed, and the first one can be undone after a crash between them.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME

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
