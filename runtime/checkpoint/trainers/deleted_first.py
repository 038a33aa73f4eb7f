"""The protection of checkpoints that a trainer deletes before it saves the next one.

Accelerate with ``total_limit`` and many training loops delete an old checkpoint first. In stock DeepSpeed
the next checkpoint is complete when its save returns. With ebbtide it is complete only when it is committed
in the background. If the process is killed before the commit, the older checkpoint must still exist.
Checkpoints that this process has saved or resumed from are therefore kept by hard links in a sibling folder
until the next commit. After a crash `rotation.restore_deleted` restores them.
"""

import contextlib
import os
import secrets
import threading
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.folders import holds_checkpoint
from ebbtide.runtime.checkpoint.protocol.rotation import NOTES, Note, twin

_lock = threading.Lock()
_used: set[Path] = set()  # folders that this process has saved to or loaded from
_notes: dict[Path, Note] = {}  # keyed by the folder that contains the kept checkpoints


def remember(save_dir: Path) -> None:
    """Record that this process has saved or loaded a checkpoint in a folder."""
    _used.add(Path(os.path.realpath(save_dir)))


def keep(path: Path) -> None:
    """Keep the files of a checkpoint that is being deleted, by hard links, until the next checkpoint is committed.

    If a training script deletes its old checkpoint before it saves the next one, a crash in between would
    otherwise leave no checkpoint. Only checkpoints that this process has saved or loaded are kept. On a
    filesystem without hard links the files are deleted, as in stock DeepSpeed.
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
    """Remove or restore the checkpoints that a trainer deleted before it saved a new one.

    Hard links keep their files until this call (see `keep`). If the new checkpoint was committed, the links are
    removed. Otherwise the deleted checkpoints are restored from the links.
    """
    with _lock:
        while _notes:
            place, note = _notes.popitem()
            with contextlib.suppress(OSError):  # the next resume resolves leftovers
                note.close(committed=committed)
                place.rmdir()
