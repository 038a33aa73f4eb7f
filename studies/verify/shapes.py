"""The trained shapes: the one that defects are put into, and right ones that must pass."""

from dataclasses import dataclass

from studies.bench.byte_gpt import SIZES, ByteGPTConfig

SUBGROUP = 20_000  # elements


@dataclass(frozen=True)
class Shape:
    """One model and how it is trained.

    Attributes:
        tied: the head's weight is the embedding's.
        frozen: the embeddings are not trained.
        accumulation: micro-batches a step.
        stage: of ZeRO, where it is not that of the group it is trained with; 0: it is.
        subgroup: elements of each.
        initial_scale: of fp16's loss, as a power of two: some first steps overflow.
        resumed: it is saved and loaded again after so many steps; 0: never.
    """

    name: str = ""
    model: ByteGPTConfig = SIZES["tiny"]
    dtype: str = "bf16"
    tied: bool = False
    frozen: bool = False
    accumulation: int = 2
    clipping: float = 0.5
    stage: int = 0
    subgroup: int = SUBGROUP
    initial_scale: int = 18
    resumed: int = 0


TINY = Shape()
ODD = ByteGPTConfig(layers=3, hidden=45, heads=3, sequence=31)
RIGHT = (
    Shape("tied", tied=True),
    Shape("odd sizes", model=ODD),
    Shape("fp16", dtype="fp16"),
    Shape("accumulation 4", accumulation=4),
    Shape("one micro-batch, not clipped", accumulation=1, clipping=0.0),
    Shape("frozen embeddings", frozen=True),
    Shape("resumed", resumed=3),
    Shape("ZeRO-1", stage=1),
)
KINDS = ("stock", "plan", "torch", "torch flipped")  # runs of each shape


def shapes_of(stage: int) -> list[Shape]:
    """Return the shapes to train with a group. ZeRO-1 goes with ZeRO-2 only."""
    return [shape for shape in RIGHT if not shape.stage or stage == 2]
