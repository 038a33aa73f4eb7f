"""The JSON documents that a store of optimizer state writes about itself: its layout and its steps."""

from __future__ import annotations

from ebbtide.runtime.checkpoint.format.manifest import Hash, Page
from pydantic import Field


class StorePage(Page):
    """A JSON document on each drive that describes a store's layout. Later runs must open it with the same layout.

    Attributes:
        nonce: Identifier of the store, which is the same on all its drives.
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


class ExtentRecord(Page):
    """The place of a subgroup's state in a store (an extent), with one hash per tensor."""

    subgroup: int
    extent: int = Field(ge=0)
    hashes: list[Hash]


class StepRecord(Page):
    """A finished optimizer step in a store.

    Attributes:
        name: Unique name of the step.
        data: Text that the caller stores with the step, such as JSON.
    """

    step: int = Field(ge=0)
    name: str
    extents: list[ExtentRecord]
    data: str = ""


class StepsPage(Page):
    """The JSON document with a store's committed steps, newest first.

    The page is replaced as a whole: one rename commits a step and drops the oldest one.
    """

    format: int = Field(1, ge=1)
    nonce: str
    steps: list[StepRecord]


class TensorRecord(Page):
    """A tensor of a checkpoint that is stored on a drive and not in the checkpoint's file.

    Attributes:
        file, path: The file in the checkpoint, and the tensor's path in the file's tree.
        index: Index of the tensor among the subgroup's tensors.
    """

    file: str
    path: list[str | int]
    subgroup: int
    index: int = Field(ge=0)


class CheckpointPage(Page):
    """A JSON document in a checkpoint that locates one rank's optimizer state on drives.

    Attributes:
        store: Identifier (nonce) of the store.
        name: Name of the step in the store.
    """

    format: int = Field(1, ge=1)
    store: str
    name: str
    step: int = Field(ge=0)
    rank: int = Field(ge=0)
    directories: list[str]
    tensors: list[TensorRecord]
