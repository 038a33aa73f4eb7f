"""The pages that a store writes about itself: its layout, once, and the steps that it holds."""

from __future__ import annotations

from ebbtide.runtime.checkpoint.format.manifest import Hash, Page
from pydantic import Field


class StorePage(Page):
    """The page on each drive. A process that opens the store must want exactly this.

    Attributes:
        nonce: identifies the store; the same on all its drives.
        sizes: subgroup and the bytes of its tensors.
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
    """The extent that holds a subgroup's state; of each tensor, the hash of its blocks' hashes."""

    subgroup: int
    extent: int = Field(ge=0)
    hashes: list[Hash]


class StepRecord(Page):
    """A finished step.

    Attributes:
        name: no other step's.
        data: what the caller wants to have beside the state, in JSON or any text of its own.
    """

    step: int = Field(ge=0)
    name: str
    extents: list[ExtentRecord]
    data: str = ""


class StepsPage(Page):
    """The committed steps, newest first. Replaced whole: a step is committed and the oldest one
    forgotten in one rename.
    """

    format: int = Field(1, ge=1)
    nonce: str
    steps: list[StepRecord]


class TensorRecord(Page):
    """A tensor that a checkpoint's file has no bytes of.

    Attributes:
        file, path: the file in the checkpoint, and the tensor's place in its tree.
        index: among the subgroup's tensors.
    """

    file: str
    path: list[str | int]
    subgroup: int
    index: int = Field(ge=0)


class CheckpointPage(Page):
    """A checkpoint's page of one rank: the place of the state that is not in its files.

    Attributes:
        store: the store's nonce.
        name: the step's name.
    """

    format: int = Field(1, ge=1)
    store: str
    name: str
    step: int = Field(ge=0)
    rank: int = Field(ge=0)
    directories: list[str]
    tensors: list[TensorRecord]
