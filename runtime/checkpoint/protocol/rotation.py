"""The protection of older checkpoints from deletion until a newer one is committed, for any trainer that deletes old
checkpoints.

While a checkpoint is being written, its folder has a subfolder ``.ebbtide`` with a note that names the writing process.
If the trainer deletes an older checkpoint meanwhile, hard links to the deleted files are put there too. The commit
removes the note and the links.

If the process crashes before the commit, a later run finds the subfolder and calls `settle`. This function restores the
deleted checkpoints from the links. It also hides the folder of the unfinished checkpoint, since some trainers resume
from the folder with the highest number.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.folders import (
    LEASE_S,
    committed,
    lives,
    newest_beside,
    owner,
    recover_replaced,
)
from ebbtide.runtime.checkpoint.protocol.inspect import verify

NOTES = ".ebbtide"
KEPT = "kept_"
UNCOMMITTED = ".uncommitted_"
MAKING = ".making"  # suffix of the name of a Trainer's folder until it gets its final name
PER_CHECKPOINT = re.compile(r"(checkpoint|ckpt|step|epoch|iter)\w*[-_=]?\d+|\.ckpt$", re.IGNORECASE)
_ATTEMPTS = 5
# The Trainer writes this file last, after the save. Without it, the Trainer cannot resume from the folder.
TRAINERS_LAST, TRAINERS_FOLDER = "trainer_state.json", re.compile(r"checkpoint-\d+")


class Note:
    """A file in a checkpoint's folder that says that a save is in progress, and names the saving process."""

    def __init__(self, save_dir: Path, tag: str, nonce: str, files: Files, *, save_latest: bool = True) -> None:
        self._save_dir = save_dir
        self._save_latest = save_latest
        self._nonce = nonce
        self._tag = tag
        self._files = files
        self._path = save_dir / NOTES / f"{nonce}.json"
        self._over = threading.Event()
        self._keeping = threading.Lock()  # `keep` must not add a folder after the save has ended
        self._awaits = ""  # name of a file that the trainer writes later
        self.failed = False  # True if the save failed. The note then stays in the incomplete folder: see `settle`

    def write(self) -> None:
        """Write a file to the checkpoint's folder to note that a checkpoint is being saved there."""
        # Do not wait for the disk.
        if not self.make_folder():
            self._write_to(self._path)
        threading.Thread(target=self._renew, name="ebbtide-lease", daemon=True).start()

    def make_folder(self) -> bool:
        """Make the folder for a checkpoint together with its note. Return whether this call made it.

        Both appear in one step, because a kill between the two would leave a folder that no later run can explain. A
        folder that another rank makes at the same time is kept, since that rank may already use it.
        """
        if self._save_dir.exists():
            return False
        making = self._save_dir.with_name(f".{self._save_dir.name}.{self._nonce}.{os.getpid()}{MAKING}")
        try:
            self._write_to(making / NOTES / self._path.name)
            return self._files.rename_folder(making, self._save_dir)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _write_to(self, path: Path) -> None:
        page = {
            **owner(),
            "tag": self._tag,
            "nonce": self._nonce,
            "latest": self._latest(),
            "save_latest": self._save_latest,
            "awaits": self._awaits,
        }
        # A temporary name, because another rank may read the note meanwhile.
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError):  # the end of another note has removed the empty folder
                return self._replace(path, whole, page)
        return self._replace(path, whole, page)

    def _replace(self, path: Path, whole: Path, page: dict[str, Any]) -> None:
        self._files.mkdir(path.parent)
        self._files.write_briefly(whole, json.dumps(page).encode())
        self._files.rename(whole, path)

    def await_trainer(self) -> None:
        """Mark a checkpoint folder as one that a transformers Trainer makes."""
        if TRAINERS_FOLDER.fullmatch(self._save_dir.name):
            self._awaits = TRAINERS_LAST

    def _renew(self) -> None:
        while not self._over.wait(LEASE_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _latest(self) -> str:
        try:
            return (self._save_dir / "latest").read_text(encoding="utf-8")
        except OSError:
            return ""

    def keep(self, folder: Path) -> None:
        """Keep the files of a checkpoint that is about to be deleted, by making hard links to them.

        Raises:
            OSError: The filesystem has no hard links, or the checkpoint is on another filesystem.
        """
        with self._keeping:
            if self._over.is_set():
                raise FileNotFoundError(
                    f"the files of checkpoint {folder} cannot be kept after the checkpoint is deleted, because the "
                    f"save of {self._tag!r} has already ended. ebbtide keeps the files of a deleted checkpoint only "
                    "while a save runs, to restore the checkpoint if the save fails"
                )
            number = sum(1 for _ in self._path.parent.glob(f"{KEPT}{self._nonce}_*"))
            temporary = self._path.parent / f".{KEPT}{self._nonce}_{number}"
            try:
                _link_tree(folder, temporary / "tree")
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            self._name_kept(temporary, folder)

    def _name_kept(self, temporary: Path, origin: Path) -> None:
        path = os.path.relpath(origin, self._save_dir)
        (temporary / "where.json").write_text(json.dumps({"path": path, "nonce": self._nonce}), encoding="utf-8")
        # The rename is atomic, so the folder is complete or absent.
        temporary.rename(temporary.with_name(temporary.name.removeprefix(".")))

    def adopt(self, folder: Path, origin: Path) -> None:
        """Move an older checkpoint to ``.ebbtide``, after a newer one has taken its path.

        `close` deletes the older checkpoint if the newer one was committed. Otherwise `close` moves the older one back.
        """
        temporary = self._path.parent / f".{KEPT}{self._nonce}_replaced"
        temporary.mkdir(parents=True)
        folder.rename(temporary / "tree")
        self._name_kept(temporary, origin)

    def close(self, *, committed: bool) -> None:
        """End the attempt to save a checkpoint.

        If the checkpoint was committed, the older checkpoints that were deleted during the save are removed
        for good. Otherwise they are restored.
        """
        with self._keeping:
            self._over.set()
        for place in kept(self._save_dir, self._nonce):
            if committed:
                self._files.remove_tree(place)
            else:
                put_back(self._save_dir, place)
        self.failed = not committed
        if committed and self._tag:
            self._remove_failed()
        if not self.stays:
            self.remove()

    def _remove_failed(self) -> None:
        me = owner()
        for path in self._path.parent.glob("*.json"):
            if path != self._path and me.items() <= _read(path).items():
                path.unlink(missing_ok=True)

    @property
    def stays(self) -> bool:
        """Return whether the note, which marks a save as being in progress, must stay on disk after the save."""
        failed = self.failed and bool(self._tag)
        return self.waiting or (failed and not committed(self._save_dir))

    @property
    def waiting(self) -> bool:
        """Return whether the checkpoint folder still lacks the last file that a transformers Trainer writes to it."""
        return bool(self._awaits) and not (self._save_dir / self._awaits).exists()

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self._path)
        with contextlib.suppress(OSError):  # other notes may be in the folder
            self._path.parent.rmdir()


def kept(save_dir: Path, nonce: str = "") -> list[Path]:
    """Return the folders with hard links to the files of deleted checkpoints, from which these can be restored."""
    # A folder is left out if a restoration of its checkpoint was interrupted.
    places = (save_dir / NOTES).glob(f"{KEPT}{nonce}*")
    return sorted(place for place in places if (place / "where.json").exists())


def put_back(save_dir: Path, place: Path) -> Path:
    """Restore a deleted checkpoint to its original path, and return the path.

    Remains of an interrupted deletion at this path are removed.

    Args:
        place: Folder in which the checkpoint's files are kept by hard links.
    """
    origin = _origin(save_dir, place)
    if _same_files(place / "tree", origin):
        shutil.rmtree(place, ignore_errors=True)
        return origin
    if origin.exists():
        origin.rename(place / "rest")
    origin.parent.mkdir(parents=True, exist_ok=True)
    (place / "tree").rename(origin)
    shutil.rmtree(place, ignore_errors=True)
    return origin


def _origin(save_dir: Path, place: Path) -> Path:
    where = json.loads((place / "where.json").read_text(encoding="utf-8"))["path"]
    return Path(os.path.normpath(save_dir / where))


def settle(save_dir: Path) -> None:
    """Restore after a crash the checkpoints that were deleted during a save which was never committed."""
    with _alone(save_dir / NOTES) as notes:
        if notes is not None:
            _settle(save_dir, notes)


def twin(directory: Path) -> Path:
    """Return the hidden folder next to ``directory`` for checkpoints that a trainer deletes before its next save."""
    # The checkpoints are kept there until the next save is committed. The folder is not inside ``directory``, because
    # trainers treat everything there as checkpoints.
    directory = directory.absolute()
    return directory.with_name(f".{directory.name}.ebbtide")


def restore_deleted(directory: Path) -> None:
    """Restore the checkpoints that a trainer deleted from a folder before a save, if the save was never committed.

    Until the commit, hard links in a hidden folder (see `twin`) keep the files of the deleted checkpoints.
    """
    place = twin(directory)
    with _alone(place / NOTES) as notes:
        if notes is None or _anybody(notes):
            return
        for folder in kept(place):
            if not _is_whole(_origin(place, folder)):
                put_back(place, folder)
        shutil.rmtree(place, ignore_errors=True)


def _is_whole(origin: Path) -> bool:
    around = [*committed(origin), *(c for c in committed(origin.parent) if c.folder == origin)]
    return any(not verify(c.folder.parent, c.folder.name) for c in around)


@contextlib.contextmanager
def _alone(notes: Path) -> Iterator[Path | None]:
    # A listing by this code also triggers the audit hook that calls it.
    if _settling.busy or not notes.is_dir():
        yield None
        return
    _settling.busy = True
    with contextlib.ExitStack() as held:
        held.callback(setattr, _settling, "busy", False)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(notes, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield notes if notes.is_dir() else None  # None: another rank has already done it


def _anybody(notes: Path) -> bool:
    try:
        return any(lives(_read(path), path) for path in list(notes.glob("*.json")))
    except FileNotFoundError:  # the commit has just removed the notes
        return True


class _Settling(threading.local):
    busy = False


_settling = _Settling()


def _settle(save_dir: Path, notes: Path) -> None:
    if _anybody(notes):
        return
    recover_replaced(save_dir, Files())  # so that the checkpoint that `latest` names exists below
    pages = [_read(path) for path in notes.glob("*.json")]
    done = [_became_whole(save_dir, page) for page in pages]
    complete = all((save_dir / str(page.get("awaits", ""))).exists() for page in pages)
    # Without a note, the kept folders come from a save that ended meanwhile, or the note was lost in a crash of the
    # machine.
    good = all(done) and complete if pages else bool(committed(save_dir))
    origins = []
    for place in kept(save_dir):
        if good:
            shutil.rmtree(place)
        else:
            origins.append(put_back(save_dir, place))
    for page, whole in zip(pages, done, strict=True):
        (_name_latest if whole else _forget)(save_dir, page)
    if not good and (not complete or not committed(save_dir)):
        _hide(save_dir, origins[0] if origins else None)
    shutil.rmtree(notes, ignore_errors=True)


def settle_below(directory: Path) -> None:
    """Clean up a trainer's output folder after a crash. The folder holds one folder per checkpoint.

    If a save was never committed, the older checkpoints that the trainer deleted before or during this save are
    restored. Hard links have kept their files (see `settle` and `restore_deleted`).
    """
    settle(directory)
    restore_deleted(directory)
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if entry.name.endswith(MAKING) and not _anybody(Path(entry.path) / NOTES):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.is_dir(follow_symlinks=False) and os.path.lexists(f"{entry.path}/{NOTES}"):
                settle(Path(entry.path))


def _became_whole(save_dir: Path, page: dict[str, Any]) -> bool:
    tag = str(page.get("tag", ""))
    if not tag and page.get("awaits"):  # a note from the creation of the folder, so only the trainer's file matters
        return (save_dir / str(page["awaits"])).exists()
    mine = [c for c in committed(save_dir) if c.manifest.nonce == page.get("nonce")]
    return bool(mine) and not verify(save_dir, tag)


def _name_latest(save_dir: Path, page: dict[str, Any]) -> None:
    latest = save_dir / "latest"
    now = latest.read_text(encoding="utf-8") if latest.exists() else ""
    if page.get("tag") and page.get("save_latest") and now == page.get("latest"):
        Files().write_durably(latest, str(page["tag"]).encode())


def _forget(save_dir: Path, page: dict[str, Any]) -> None:
    tag = str(page.get("tag", ""))
    for result in committed(save_dir):
        if result.manifest.nonce == page.get("nonce"):
            result.folder.rename(save_dir / f".{tag}.{page['nonce']}.replaced_torn")
            recover_replaced(save_dir, Files())
    latest = save_dir / "latest"
    if "latest" not in page or not latest.exists():
        return  # a note that the crash cut off does not name the former checkpoint
    if (save_dir / latest.read_text(encoding="utf-8").strip()).exists():
        return
    former = str(page["latest"])
    if former:
        Files().write_durably(latest, former.encode())
    else:
        latest.unlink()  # there was no former checkpoint: the run starts from the beginning


def _hide(save_dir: Path, beside: Path | None) -> None:
    if beside is None and not PER_CHECKPOINT.search(save_dir.name):
        return
    if beside is None:
        beside = newest_beside(save_dir)
    if beside is None and TRAINERS_FOLDER.fullmatch(save_dir.name):
        beside = save_dir.parent  # without an older checkpoint, a run starts from the beginning instead of failing
    if beside is not None and beside != save_dir:
        hidden = beside / f"{UNCOMMITTED}{save_dir.name}"
        shutil.rmtree(hidden, ignore_errors=True)  # an earlier run was killed at the same step
        with contextlib.suppress(OSError):
            save_dir.rename(hidden)
            # Last, because the note must describe the folder as long as the folder is visible.
            shutil.rmtree(hidden / NOTES, ignore_errors=True)


def _link_tree(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for entry in list(os.scandir(source)):
        if entry.is_dir(follow_symlinks=False):
            if entry.name != NOTES:
                _link_tree(Path(entry.path), target / entry.name)
        else:
            os.link(entry.path, target / entry.name, follow_symlinks=False)


def _same_files(one: Path, other: Path) -> bool:
    for path in one.rglob("*"):
        if not path.is_dir():
            twin = other / path.relative_to(one)
            if not twin.exists() or not path.samefile(twin):
                return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        page = json.loads(path.read_bytes())
        return page if isinstance(page, dict) else {}
    except (OSError, ValueError):
        return {}
