"""A reader of optimizer state that a checkpoint keeps on drives, and its export to files that DeepSpeed itself would
write.

The training run that wrote the state may still run, and write newer state to these drives.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER, block_hash
from ebbtide.runtime.checkpoint.format.memory import padded, view_at
from ebbtide.runtime.checkpoint.format.safe_load import load_file
from ebbtide.runtime.checkpoint.protocol.folders import being_read
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.storage.blocks import hashes_of_tensors
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.storage.extent_file import ExtentFile
from ebbtide.runtime.storage.folder import EXTENTS, STORE, file_of, read_page, step_of
from ebbtide.runtime.storage.layout import Layout
from ebbtide.runtime.storage.pages import CheckpointPage, CommittedStep, StorePage, read_checkpoint_page, stored_pages
from ebbtide.runtime.storage.view import View, page_aligned


def stored_problems(checkpoint: Path) -> list[str]:
    """Return the reasons why a checkpoint's optimizer state on drives is not complete, as a list of texts.

    Every byte of the state is read. The list is empty if the state is complete, or if the checkpoint's
    files hold all state.
    """
    problems = []
    for path in stored_pages(checkpoint):
        try:
            with closing(StepReader(read_checkpoint_page(path))) as reader:
                reader.verify()
        except (StorageError, ManifestError) as error:
            problems.append(f"{path.name}: {error}")
    return problems


class StepReader:
    """A reader of the optimizer state that a checkpoint keeps on drives. It is not thread-safe.

    Training may continue meanwhile, and may overwrite this state after newer checkpoints have been committed. Call
    `check_there` at the end to check that everything that was read still belonged to the checkpoint.

    Raises:
        StorageError: The checkpoint's state is not on the drives any more, or the folder belongs to another run.
    """

    def __init__(self, page: CheckpointPage) -> None:
        self._page, self._files = page, Files()
        self._directories = [Path(d) for d in page.directories]
        self._extents = {one.subgroup: one for one in self.check_there().extents}
        store = self._store_page()
        self._layout = Layout(dict(store.sizes), store.weights, store.block_bytes, store.extents)
        self._opened = [
            ExtentFile(file_of(directory, page.rank, EXTENTS), size_bytes, self._files)
            for directory, size_bytes in zip(self._directories, self._layout.file_bytes, strict=True)
        ]
        for file in self._opened:
            file.check()
        self._views: dict[int, View] = {}

    def check_there(self) -> CommittedStep:
        """Check that the checkpoint's optimizer state is still on the drives, as `step_of` does."""
        return step_of(self._page, self._files)

    def _store_page(self) -> StorePage:
        path = file_of(self._directories[0], self._page.rank, STORE)
        store = read_page(path, StorePage, self._files)
        if store is None:
            raise StorageError(
                f"{path} is missing. Without this file, which describes the layout of the optimizer state on the "
                "drives, the state cannot be read. Restore the file from a backup"
            )
        return store

    def verify(self, masters_of: Collection[int] = ()) -> None:
        """Read a checkpoint's state on drives, and compare it with the hashes taken while it was written.

        Args:
            masters_of: Subgroups of which only the first tensor, the master, is read. Of all others, every tensor is
                read.

        Raises:
            DamagedError: A block is incomplete, or bits have flipped.
        """
        buffer = page_aligned(padded(self._layout.block_bytes) // 4)
        for subgroup, record in self._extents.items():
            blocks = list(self._layout.blocks(subgroup))
            most = 1 if subgroup in masters_of else len(record.hashes)
            wanted = [b for b in blocks if b.tensor < most]
            hashes = []
            for block in wanted:
                data = view_at(buffer.data_ptr(), padded(block.size_bytes))
                start = self._layout.start(block.drive, subgroup, record.extent) + block.offset
                self._opened[block.drive].read(data, start)
                hashes.append(block_hash(data[: block.size_bytes]))
            if hashes_of_tensors(wanted, hashes) != record.hashes[:most]:
                raise DamagedError(
                    f"the state of subgroup {subgroup} at step {self._page.step} in {self._directories[0]} is damaged: "
                    "its hash is not the one that was written. Load an earlier checkpoint, and check the drive"
                )

    def tensor(self, subgroup: int, index: int) -> torch.Tensor:
        """Return one fp32 tensor of the optimizer state that a checkpoint keeps on drives.

        The tensor is memory-mapped, and valid until this `StepReader` is closed. Do not write to the tensor.
        """
        if subgroup not in self._views:
            view = self._views[subgroup] = View(self._layout, subgroup)
            view.show(self._extents[subgroup].extent, self._opened)
        return self._views[subgroup].tensors[index]

    def close(self) -> None:
        for file in self._opened:
            file.close()


Tensors = dict[tuple[Any, ...], torch.Tensor]


def export(directory: Path, tag: str, target: Path) -> Path:
    """Export a checkpoint to ``target``/``tag`` with all optimizer state in its files, and write the file ``latest``.

    Return the new folder. Training may continue meanwhile. If training overwrites the checkpoint's state on
    the drives before the end, nothing is left in ``target``. Files are copied one at a time through memory
    that the system can reclaim.

    Raises:
        CheckpointError: The checkpoint is not complete, or ``target`` already has one with this name.
        StorageError: The state on the drives is damaged, or was overwritten.
    """
    source, made = directory / tag, target / tag
    problems = verify(directory, tag)
    if problems:
        raise CheckpointError(f"the checkpoint to export, {source}, must be whole: {problems[0]}")
    if made.exists():
        raise CheckpointError(f"{made} exists already: give another folder, or delete it")
    staging = target / f".{tag}.export"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with being_read(source), _stored(source) as stored:
            for path in _files(source):
                _write(path, staging / path.relative_to(source), stored.get(path, {}))
        Files().rename(staging, made)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    Files().fsync_folder(target)
    Files().write_durably(target / "latest", tag.encode())
    return made


def _files(source: Path) -> Iterator[Path]:
    ours = {source / GLOBAL_NAME, source / RANKS_FOLDER}
    for path in sorted(source.rglob("*")):
        if path.is_file() and not ours & {path, *path.parents}:
            yield path


@contextlib.contextmanager
def _stored(source: Path) -> Iterator[Mapping[Path, Tensors]]:
    found, readers = dict[Path, Tensors](), list[StepReader]()
    with contextlib.ExitStack() as opened:
        for path in stored_pages(source):
            page = read_checkpoint_page(path)
            reader = opened.enter_context(contextlib.closing(StepReader(page)))
            reader.verify()
            readers.append(reader)
            for one in page.tensors:
                tensors = found.setdefault(source / one.file, {})
                tensors[one.path] = reader.tensor(one.subgroup, one.index)
        yield found
        for reader in readers:
            reader.check_there()


def _write(path: Path, to: Path, tensors: Tensors) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if tensors:
        torch.save(load_file(path, tensors), to)
    else:
        shutil.copyfile(path, to)
    Files().fsync_file(to)
