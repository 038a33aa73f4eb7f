"""A list of checkpoints that also tells which ones cannot be loaded any more.

Such a checkpoint had its optimizer state on a drive, where later steps have overwritten the state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol import inspect
from ebbtide.runtime.checkpoint.protocol.inspect import Entry
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.folder import step_of
from ebbtide.runtime.storage.pages import read_checkpoint_page, stored_pages


def list_checkpoints(directory: str | Path) -> list[Entry]:
    """Return the checkpoints of a folder, newest first."""
    found = inspect.list_checkpoints(directory)
    return [replace(e, status=missing_state(Path(directory) / e.tag) or e.status) for e in found]


def missing_state(checkpoint: Path) -> str:
    """Return the reason why a checkpoint's optimizer state on a drive is missing, or an empty string.

    The string is empty if no state is missing, or if the checkpoint's own files hold all state.
    """
    for path in stored_pages(checkpoint):
        try:
            step_of(read_checkpoint_page(path), Files())
        except (OSError, ManifestError, StorageError) as error:
            return f"cannot be loaded: {error}"
    return ""
