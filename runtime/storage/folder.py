"""A rank's directories for optimizer state on drives: their lock, a check that they belong to this training run, and
the checkpoints that lost their state there to later steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import PageT, dump, parse
from ebbtide.runtime.checkpoint.protocol import inspect
from ebbtide.runtime.checkpoint.protocol.folders import owner
from ebbtide.runtime.checkpoint.protocol.inspect import Entry
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.pages import (
    CheckpointPage,
    CommittedStep,
    StepsPage,
    StorePage,
    read_checkpoint_page,
    stored_pages,
)


@dataclass(frozen=True)
class Drive:
    """A directory for optimizer state, usually on an NVMe drive.

    Attributes:
        weight: The drive's bandwidth, in the same unit as the bandwidth of the other drives.
    """

    directory: Path
    weight: float = 1.0


EXTENTS, STORE, STEPS = "extents", "store.json", "steps.json"  # names of a rank's files


class Folders:
    """The directories and files of one rank's optimizer state on its drives, locked while this object exists.

    Raises:
        StorageError: Another process has the lock.
    """

    def __init__(self, drives: Sequence[Drive], rank: int, files: Files) -> None:
        self._drives, self.rank, self._files = drives, rank, files
        self.directories = [drive.directory for drive in drives]
        self._page: StorePage | None = None  # the page of the store that this object has claimed
        self._locks: list[int] = []
        try:
            for drive in drives:
                self._grow(drive.directory)
                self._locks.append(_lock(self._path(drive, "lock"), files))
        except BaseException:
            self.close()
            raise

    def _grow(self, directory: Path) -> None:
        grown = [p.parent for p in (directory, *directory.parents) if not p.exists()]
        self._files.mkdir(directory)
        for parent in grown:
            self._files.fsync_folder(parent)

    def _path(self, drive: Drive, kind: str) -> Path:
        return file_of(drive.directory, self.rank, kind)

    def extents(self, drive: Drive) -> Path:
        return self._path(drive, EXTENTS)

    @property
    def _steps(self) -> Path:
        return self._path(self._drives[0], STEPS)

    def claim(self, wanted: StorePage) -> tuple[StorePage, list[CommittedStep]]:
        """Open the store of optimizer state in these folders, and return its layout and its committed steps.

        If the store has no committed step, a new store replaces it.

        Args:
            wanted: Layout of the optimizer state of this training. The existing store may have more or fewer subgroups.

        Raises:
            StorageError: The store holds committed steps, but its layout differs from ``wanted`` in more than the
                number of subgroups, or a file that describes the store cannot be read.
        """
        pages = [self._read(self._path(d, STORE), StorePage) for d in self._drives]
        self._check_order(pages)
        steps = self._read(self._steps, StepsPage)
        if steps is None or not steps.steps:
            self._check_world(wanted)
            self._page = wanted.model_copy(update={"nonce": uuid.uuid4().hex})
            self._write(self._page)
            return self._page, []
        sizes = _widest(pages, wanted)
        self._page = wanted.model_copy(update={"nonce": steps.nonce, "sizes": sizes})
        for number, page in enumerate(pages):
            # A kill may have left only some of the pages of a growing store rewritten.
            held = sizes[: len(page.sizes)] if page is not None else sizes
            expected = self._page.model_copy(update={"drive": number, "sizes": held})
            _check_same(page, expected, self._drives[number].directory)
        return self._page, steps.steps

    def grow(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Record on the drives that the files of optimizer state now have room for additional subgroups.

        Args:
            sizes: Dict from each additional subgroup to the bytes of each of its state tensors.
        """
        assert self._page is not None
        more = [(subgroup, list(tensors)) for subgroup, tensors in sizes.items()]
        page = self._page.model_copy(update={"sizes": [*self._page.sizes, *more]})
        try:
            self._write(page)
        except OSError as error:
            raise StorageError(
                f"writing {self._path(self._drives[0], STORE)} failed: {error.strerror or error}. "
                "State that is already stored is intact. Free space, or store fewer subgroups"
            ) from error
        self._page = page

    def _check_order(self, pages: Sequence[StorePage | None]) -> None:
        there = [page.drive for page in pages if page is not None]
        if there != list(range(len(there))):
            found = [
                f"{drive.directory} {'is empty' if page is None else f'was number {page.drive + 1}'}"
                for drive, page in zip(self._drives, pages, strict=True)
            ]
            raise StorageError(
                "the folders of stored optimizer state must be given in the order in which they were first used, but "
                f"of the given folders {', '.join(found)}. Give the folders in that order, or empty folders"
            )

    def _write(self, page: StorePage) -> None:
        for number, drive in enumerate(self._drives):
            content = dump(page.model_copy(update={"drive": number}))
            self._files.write_durably(self._path(drive, STORE), content)

    def _check_world(self, wanted: StorePage) -> None:
        for path in sorted(self._drives[0].directory.glob("rank_*.steps.json")):
            steps = self._read(path, StepsPage)
            page = self._read(path.with_name(path.name.replace("steps", "store")), StorePage)
            if steps and steps.steps and page and page.world_size != wanted.world_size:
                _refuse(path.parent, "world_size", page.world_size, wanted.world_size)

    def commit(self, nonce: str, steps: list[CommittedStep]) -> None:
        """Replace the list of committed steps in a store of optimizer state, durably and by one rename of a file.

        Raises:
            StorageError: The list could not be written.
        """
        self._files.point("extents_synced")
        page = StepsPage(nonce=nonce, steps=steps)
        try:
            self._files.write_durably(self._steps, dump(page), "steps")
        except OSError as error:
            raise StorageError(
                f"writing the list of committed steps {self._steps} failed: {error.strerror or error}. Earlier "
                "checkpoints are intact. Check the drive of this file, then resume"
            ) from error
        self._files.point("steps_committed")

    def _read(self, path: Path, kind: type[PageT]) -> PageT | None:
        return read_page(path, kind, self._files)

    def close(self) -> None:
        for descriptor in self._locks:
            with contextlib.suppress(OSError):
                self._files.close(descriptor)
        self._locks = []


def file_of(directory: Path, rank: int, kind: str) -> Path:
    """Return the path of one of the files of a rank's store of optimizer state."""
    return directory / f"rank_{rank:05d}.{kind}"


def read_page(path: Path, kind: type[PageT], files: Files) -> PageT | None:
    """Read and parse one of the JSON files of a store of optimizer state. Return None if the file does not exist.

    Raises:
        StorageError: The file cannot be read, or is damaged.
    """
    try:
        return parse(files.read(path), kind, path.name)
    except FileNotFoundError:
        return None
    except (OSError, ManifestError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}. The state in this folder is unchanged. Restore the "
            "file, or give another directory"
        ) from error


def step_of(page: CheckpointPage, files: Files) -> CommittedStep:
    """Return the description of a checkpoint's optimizer state on the drives: its places and its hashes.

    Raises:
        StorageError: The drives no longer hold the checkpoint's optimizer state.
    """
    directory = Path(page.directories[0])
    steps = read_page(file_of(directory, page.rank, STEPS), StepsPage, files)
    if steps is None or steps.nonce != page.store:
        raise StorageError(
            f"the checkpoint's state must be in {directory}, but there is "
            f"{'none' if steps is None else 'only the state of another run'} in this folder. Move the folder with "
            "the checkpoint's state back"
        )
    found = next((s for s in steps.steps if s.name == page.name), None)
    if found is None:
        raise StorageError(
            f"the state of step {page.step} in {directory} was overwritten by later steps. Load the checkpoint of one "
            f"of the steps {[s.step for s in steps.steps]} instead, and raise checkpoint.keep to keep more checkpoints"
        )
    return found


def _widest(pages: Sequence[StorePage | None], wanted: StorePage) -> list[tuple[int, list[int]]]:
    held = max((page.sizes for page in pages if page is not None), key=len, default=[])
    there = dict(held)
    fits = all(there.get(subgroup, tensors) == tensors for subgroup, tensors in wanted.sizes)
    return held if fits else wanted.sizes


def _check_same(page: StorePage | None, expected: StorePage, directory: Path) -> None:
    for field in StorePage.model_fields:
        found, wanted = getattr(page, field, None), getattr(expected, field)
        if found != wanted:
            _refuse(directory, field, found, wanted)


def _refuse(directory: Path, field: str, found: object, wanted: object) -> None:
    # There is one extent more than kept steps.
    if field == "extents" and isinstance(found, int) and isinstance(wanted, int):
        raise StorageError(
            f"{directory} has room for the stored state of {found - 1} checkpoints, but checkpoint.keep asks for "
            f"{wanted - 1}. Set checkpoint.keep to {found - 1}. To keep another number, export the checkpoint (`tune "
            "checkpoint export`), choose an empty storage folder (plan.storage_dir or nvme_path), and resume from the "
            "exported checkpoint"
        )
    had, wants = (f"{value!s:.80}" for value in (found, wanted))
    raise StorageError(
        f"the state stored in {directory} must be resumed as it was written, but it has {field} = "
        f"{had} and this run wants {wants}. Resume with the same plan, number of ranks and order of "
        "directories, or give an empty directory"
    )


def _lock(path: Path, files: Files) -> int:
    descriptor = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        files.close(descriptor)
        raise StorageError(
            f"a directory of stored state belongs to one run at a time, but {path} is locked by "
            f"{holder}: end that run, or give another directory"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner()).encode(), 0)
    return descriptor


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
