"""The protection of a transformers Trainer's checkpoint folder from the moment that the folder is made.

The Trainer makes ``checkpoint-500`` and writes the model's config to the folder before it calls DeepSpeed.
It writes ``trainer_state.json`` last. If the process is killed in between, the folder remains. The Trainer
would take the folder for its newest checkpoint but could not resume from it. A note, written when the
folder is made, tells the next run that the folder never became a checkpoint (see `rotation.settle`).
"""

import contextlib
import errno
import os
import secrets
import sys
import threading
from pathlib import Path
from types import FrameType

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.rotation import TRAINERS_FOLDER, Note

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_lock = threading.Lock()
_notes: dict[Path, Note] = {}


def being_made(path: Path) -> None:
    """Write a note that a checkpoint folder is incomplete, just before a transformers Trainer makes the folder.

    Raises:
        OSError: The disk is full. The folder's content would not fit either, and without a note the next
            run would mistake the folder for a checkpoint.
    """
    if TRAINERS_FOLDER.fullmatch(path.name) and not path.exists() and _may_exist(sys._getframe(1)):
        settle()
        with _lock:
            note = Note(path, "", secrets.token_hex(6), Files())
            note.await_trainer()
            try:
                note.write()
            except OSError as error:
                note.remove()
                if error.errno in FULL:
                    raise
            else:
                _notes[Path(os.path.realpath(path))] = note


def _may_exist(frame: FrameType | None) -> bool:
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(__package__ or ""):
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("exist_ok") is True


def settle(path: Path | None = None, *, over: bool = False) -> None:
    """Remove the note "this folder is incomplete" from a transformers Trainer's folders that have become complete.

    `being_made` wrote the note. A folder is complete if it contains the last file that the Trainer writes.

    Args:
        path: Folder of a save that has just begun and has a note of its own. The older note is removed in any case.
        over: True at the end of training. The note is then removed from every folder, complete or not.
    """
    if not _notes:
        return
    taken = None if path is None else Path(os.path.realpath(path))
    with _lock:
        for folder, note in list(_notes.items()):
            if over or folder == taken or not note.waiting:
                del _notes[folder]
                with contextlib.suppress(OSError):
                    note.close(committed=True)
                    note.remove()
