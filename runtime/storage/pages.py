"""The JSON documents of a store of optimizer state on drives, which describe its layout and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

from ebbtide.runtime.checkpoint.format.manifest import Document, Hash, parse, stored_name
from ebbtide.runtime.checkpoint.live_state import StoredTensor
from pydantic import Field


class StorePage(Document):
    """A JSON document on each drive that describes the layout of a store of optimizer state.

    A later run can open the store only with the same layout.

    Attributes:
        nonce: Identifier of the store, equal on all its drives.
        sizes: Each subgroup with the bytes of its tensors.
    """

    format: int = Field(1, ge=1)
    nonce: str
    rank: int
    world_size: int
    drive: int
    weights: list[float]
    block_bytes: int
    extents: int
    sizes: list[tuple[int, list[int]]]


class ExtentRecord(Document):
    """The extent (place on the drives) that holds a subgroup's state of one step, with one hash per tensor."""

    subgroup: int
    extent: int = Field(ge=0)
    hashes: list[Hash]


class CommittedStep(Document):
    """The entry of one committed optimizer step in a store that keeps optimizer state on drives.

    Attributes:
        name: Unique name of the step.
        extents: Place of each stored subgroup's state after the step, with the hashes of its tensors.
        data: Text that the caller keeps with the step, such as JSON.
    """

    step: int = Field(ge=0)
    name: str
    extents: list[ExtentRecord]
    data: str = ""


class StepsPage(Document):
    """The JSON document with the committed steps of a store of optimizer state, newest first.

    The document is replaced as a whole: one rename commits a step and drops the oldest one.
    """

    format: int = Field(1, ge=1)
    nonce: str
    steps: list[CommittedStep]


class CheckpointPage(Document):
    """A JSON document in a checkpoint that locates one rank's optimizer state on drives.

    Attributes:
        store: Identifier (nonce) of the store of optimizer state.
        name: Name under which the store keeps the saved version of the state.
    """

    format: int = Field(1, ge=1)
    store: str
    name: str
    step: int = Field(ge=0)
    rank: int = Field(ge=0)
    directories: list[str]
    tensors: list[StoredTensor]


def stored_pages(checkpoint: Path) -> Iterator[Path]:
    """Yield the paths of a checkpoint's JSON documents that locate the ranks' optimizer state on drives."""
    paths = (checkpoint / stored_name(rank) for rank in count())
    return takewhile(Path.exists, paths)


def read_checkpoint_page(path: Path) -> CheckpointPage:
    return parse(path.read_bytes(), CheckpointPage, path.name)
