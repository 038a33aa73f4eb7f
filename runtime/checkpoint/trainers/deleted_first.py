"""Checkpoints that are deleted before the save that is to take their place.

Accelerate with ``total_limit`` and many a loop make room first. With stock a checkpoint is whole
when its save returns; here it is when it is committed, and a kill before that must not find the
older one gone. So what this process has saved or resumed from outlives its deletion, by hard links
beside the folder it lay in, until the next commit. After a crash `rotation.restore_deleted` gives
it back.
"""

import contextlib
import os
import secrets
import threading
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.rotation import NOTES, Note, holds_checkpoint, twin

_lock = threading.Lock()
_used: set[Path] = set()  # folders that this process has saved to or loaded from
_notes: dict[Path, Note] = {}  # by the folder that the kept ones lie in


def remember(save_dir: Path) -> None:
    """Note that this process has a checkpoint there. Checkpoints of an earlier experiment may be deleted freely."""
    _used.add(Path(os.path.realpath(save_dir)))


def keep(path: Path) -> None:
    """Retain a folder by hard links before it is deleted while no checkpoint is being written.

    Where the file system has no hard links it is deleted, as with stock.
    """
    mine = any(folder.is_relative_to(path) or path.parent == folder for folder in _used)
    if not mine or not path.is_dir() or NOTES in path.parts or not holds_checkpoint(path):
        return
    with _lock, contextlib.suppress(OSError):
        place = twin(path.parent)
        if place not in _notes:
            note = Note(place, "", secrets.token_hex(6), Files())
            note.write()
            _notes[place] = note
        _notes[place].keep(path)


def settle(*, committed: bool) -> None:
    """The save after the deletions is over: they hold, or are undone."""
    with _lock:
        while _notes:
            place, note = _notes.popitem()
            with contextlib.suppress(OSError):  # what is left over, the next resume ends
                note.close(committed=committed)
                place.rmdir()
