"""The export of a checkpoint with optimizer state on drives to files that DeepSpeed itself would write."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER
from ebbtide.runtime.checkpoint.format.safe_load import load_file
from ebbtide.runtime.checkpoint.protocol.folders import being_read
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.storage.pages import read_checkpoint_page, stored_pages
from ebbtide.runtime.storage.reader import StepReader

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
