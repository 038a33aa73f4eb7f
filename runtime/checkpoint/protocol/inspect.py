"""The functions of `tune checkpoint list|verify|prune DIR`, which list, verify and delete checkpoints.

This module imports neither torch nor DeepSpeed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import (
    GLOBAL_NAME,
    FileRecord,
    GlobalManifest,
    RankManifest,
    block_hash,
    parse,
)
from ebbtide.runtime.checkpoint.protocol.folders import Committed, committed, damaged, named_latest, prune, renamed

__all__ = ["Entry", "FileProblem", "list_checkpoints", "prune", "verify"]

READERS = 4  # threads that read the files of one checkpoint


@dataclass(frozen=True)
class Entry:
    """One line of the output of `tune checkpoint list`: a checkpoint and its state."""

    tag: str
    step: int | None
    size_bytes: int | None
    world_size: int | None
    committed_unix_s: float | None
    plan: str = ""
    latest: bool = False
    status: str = "committed"


@dataclass(frozen=True)
class FileProblem:
    """A problem with one file of a checkpoint, such as damage or absence."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def list_checkpoints(directory: str | Path) -> list[Entry]:
    """Return the checkpoints of a folder, newest first, then those with damaged manifests.

    A checkpoint is also called damaged if a file is missing or has another size. `verify` reads the files.
    """
    directory = Path(directory)
    latest = named_latest(directory)
    entries = [_entry(c, latest, _seen(c)) for c in committed(directory)]
    entries += [_entry(c, latest, _seen(c, f"renamed from {c.manifest.tag}")) for c in renamed(directory)]
    for tag, reason in damaged(directory).items():
        entries.append(Entry(tag, None, None, None, None, latest=tag == latest, status=f"damaged: {reason}"))
    return entries


def _entry(found: Committed, latest: str | None, status: str = "committed") -> Entry:
    tag, page = found.folder.name, found.manifest
    return Entry(
        tag, page.step, page.payload_bytes, page.world_size, page.committed_unix_s, page.plan, tag == latest, status
    )


def _seen(found: Committed, whole: str = "committed") -> str:
    problems, records = _check_ranks(found.folder, found.manifest)
    problems += [problem for record in records for problem in _check_size(found.folder, record)]
    return f"damaged: {problems[0]}" if problems else whole


def verify(
    directory: str | Path, tag: str, *, share: tuple[int, int] = (0, 1), needed: Callable[[str], bool] = lambda _: True
) -> list[FileProblem]:
    """Read a checkpoint and compare every byte with its manifest. Return the problems, or an empty list.

    The folder may have been renamed since the checkpoint was committed.

    Args:
        share: Pair (k, n): only every n-th file from the k-th on is checked, so that n ranks share the work.
            The manifests are always checked.
        needed: Function that returns whether a file, given by its path in the checkpoint, is checked. Files
            that are not checked may be altered or missing.

    Raises:
        CheckpointError: There is no such checkpoint, or it was not written by ebbtide.
    """
    folder = Path(directory) / tag
    if not (folder / GLOBAL_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no file {GLOBAL_NAME} and cannot be verified: the file is "
            "missing, or the checkpoint was written without ebbtide"
        )
    try:
        page = parse((folder / GLOBAL_NAME).read_bytes(), GlobalManifest, GLOBAL_NAME)
    except (OSError, ManifestError) as error:
        return [FileProblem(GLOBAL_NAME, str(error))]
    problems, records = _check_ranks(folder, page)
    mine = [record for record in records if needed(record.path)][share[0] :: share[1]]
    with ThreadPoolExecutor(READERS) as pool:
        for result in pool.map(lambda record: _check_file(folder, record), mine):
            problems.extend(result)
    return problems


def _check_ranks(folder: Path, page: GlobalManifest) -> tuple[list[FileProblem], list[FileRecord]]:
    problems, records = [], []
    for rank, seal in enumerate(page.ranks):
        try:
            data = (folder / seal.path).read_bytes()
            if block_hash(data) != seal.hash:
                raise ManifestError("the bytes of this rank's manifest do not match the hash in the global manifest")
            manifest = parse(data, RankManifest, seal.path)
            belongs_to = (manifest.rank, manifest.nonce, manifest.step, manifest.tag)
            expected = (rank, page.nonce, page.step, page.tag)
            if belongs_to != expected:
                raise ManifestError(
                    f"the manifest of rank {rank} belongs to another checkpoint or rank: (rank, nonce, step, tag) must "
                    f"be {expected}, but is {belongs_to}. Load another checkpoint"
                )
            records.extend(manifest.files)
        except (OSError, ManifestError) as error:
            problems.append(FileProblem(seal.path, str(error)))
    return problems, records


def _check_size(folder: Path, record: FileRecord) -> list[FileProblem]:
    try:
        size = (folder / record.path).stat().st_size
    except OSError as error:
        return [FileProblem(record.path, f"the file cannot be read: {error.strerror}")]
    if size == record.size_bytes:
        return []
    return [FileProblem(record.path, f"must have {record.size_bytes} bytes, but has {size}")]


def _check_file(folder: Path, record: FileRecord) -> list[FileProblem]:
    try:
        return _check_size(folder, record) or list(_differing(folder, record))
    except OSError as error:
        return [FileProblem(record.path, f"the file cannot be read: {error.strerror}")]


def _differing(folder: Path, record: FileRecord) -> Iterator[FileProblem]:
    with (folder / record.path).open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(record.block_bytes))
        for number, expected in enumerate(record.hashes):
            start = number * record.block_bytes
            count = Files().read_into(file.fileno(), buffer, start)
            if block_hash(buffer[:count]) != expected:
                yield FileProblem(record.path, f"bytes {start} to {start + count} of the file were altered")
