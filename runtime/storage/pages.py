"""What a store writes about itself: its layout, once, and the steps that it holds."""

from __future__ import annotations

from pydantic import Field

from runtime.checkpoint.format.manifest import Hash, Page


class StorePage(Page):
    """On each drive; whoever opens the store must want exactly this.

    Attributes:
        nonce: of the store; the same on its drives.
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
    """The extent that holds a subgroup's state, and the hash of its blocks' hashes."""

    subgroup: int
    extent: int = Field(ge=0)
    hash: Hash


class StepRecord(Page):
    """A finished step.

    Attributes:
        data: what the caller wants to have beside the state, in JSON or any text of its own.
    """

    step: int = Field(ge=0)
    extents: list[ExtentRecord]
    data: str = ""


class StepsPage(Page):
    """The committed steps, newest first. Replaced whole: a step is committed and the oldest one
    forgotten in one rename.
    """

    format: int = Field(1, ge=1)
    nonce: str
    steps: list[StepRecord]
