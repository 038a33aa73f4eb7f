"""Models and training settings for the test of `tune verify`.

One of them is trained with defects. All others are trained without, and must be accepted.
"""

from dataclasses import dataclass

from studies.bench.byte_gpt import SIZES, ByteGPTConfig

SUBGROUP = 20_000  # elements of a subgroup


@dataclass(frozen=True)
class VerifiedTraining:
    """A model and the settings of its training, for the test of `tune verify`.

    Attributes:
        tied: True if the output head shares the weight of the embedding.
        frozen: True if the embeddings are not trained.
        accumulation: Micro-batches per step.
        stage: ZeRO stage. 0: the stage that the test sets for a whole group of runs.
        subgroup: Elements of each subgroup of optimizer state.
        initial_scale: Initial loss scale of fp16, as a power of two. It is so large that some of the first steps
            overflow.
        resumed: Number of steps after which the run is saved and loaded again. 0 means never.
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


TINY = VerifiedTraining()
ODD = ByteGPTConfig(layers=3, hidden=45, heads=3, sequence=31)
RIGHT = (
    VerifiedTraining("tied", tied=True),
    VerifiedTraining("odd sizes", model=ODD),
    VerifiedTraining("fp16", dtype="fp16"),
    VerifiedTraining("accumulation 4", accumulation=4),
    VerifiedTraining("one micro-batch, not clipped", accumulation=1, clipping=0.0),
    VerifiedTraining("frozen embeddings", frozen=True),
    VerifiedTraining("resumed", resumed=3),
    VerifiedTraining("ZeRO-1", stage=1),
)
KINDS = ("stock", "plan")  # kinds of runs for each shape


def shapes_of(stage: int) -> list[VerifiedTraining]:
    """Return the models and settings with which the test of `tune verify` trains without a defect."""
    # `tune verify` must find no defect in these runs.
    return [shape for shape in RIGHT if not shape.stage or stage == 2]
