"""The fractions of a GPU's data sheet speed that training reaches, from published runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compute:
    """The fractions of a GPU's data sheet speed (dense bf16) that training reaches, derived from published runs.

    Attributes:
        found: Fraction that flash attention reached in the published runs, forward and backward, on causal sequences.
        runs: Names of the published runs. If the GPU has none, the name of the similar GPU from which the fractions are
            taken.
        versions: Dict from a major version of FlashAttention to the fraction that the papers about FlashAttention
            report. If empty, ``found`` is taken as the fraction of version 2.
    """

    products: float
    found: float
    runs: str
    versions: Mapping[int, float] = field(default_factory=dict)

    @property
    def attention(self) -> float:
        """Return the fraction of the GPU's data sheet FLOP/s that version 2 of FlashAttention reaches."""
        # PyTorch's own attention calls this version. If the papers about FlashAttention give no fraction for this GPU,
        # return the fraction that published training runs reached.
        return self.versions.get(2, self.found)

    @property
    def attention_source(self) -> str:
        """Return the source of the property `attention`, the fraction of data sheet FLOP/s that attention reaches."""
        # The source is the papers about FlashAttention, published training runs that reached the fraction, or a similar
        # GPU with a known fraction.
        return "FlashAttention 2, arXiv 2307.08691 and 2407.08608" if 2 in self.versions else self.runs

    def attention_gain(self, version: int | None) -> float | None:
        """Return how many times faster a version of FlashAttention is than version 2.

        The result is None if the version does not run on this GPU, or if its speed there is not known.
        """
        if version is None or version == 2:
            return 1.0
        reached = self.versions.get(version)
        return reached / self.attention if reached else None


# Shares of the data sheet's peak that matrix products reach, per device. One share for all devices was wrong by a
# quarter: an A100 reaches more of its sheet's peak than an H100, whose power limit lowers its clock. GeForce cards
# reach nearly all of it or more, because their sheets assume the lowest boost clock (an RTX 5090 ran at 2813 to 2932
# MHz under load, github.com/kekzl/imp/issues/1671, and its sheet assumes 2407). Fitted to the half of
# studies/data/published_training_runs.csv that is marked for fitting.
_MOSAIC = "MosaicML's tables of MPT models"
_LLMQ = "runs of llmq and LLaMA-Factory with Qwen2.5 models"
_TINY = "runs of whyNLP/tinyllama"
# Shares of the sheet's peak that versions of FlashAttention reach on long sequences, from the abstracts of their
# papers. Version 2 on A100: 50 to 73% (Dao, arXiv 2307.08691). On H100: 35%, and version 3 is 1.5 to 2 times as fast,
# up to 75% in forward (Shah et al., arXiv 2407.08608). Version 4 on B200: up to 71% in forward (arXiv 2603.05451). Its
# mean over forward and backward is assumed to be lower by the same factor as that of version 3. MosaicML's runs used
# the Triton kernel of version 1 (llm-foundry, commit b2a43a14, ``--attn_impl``), so version 1 has the speed of their
# runs.
_V2_AMPERE, _V2_HOPPER = 0.6, 0.35
_V3 = 1.75 * _V2_HOPPER
_V1_AMPERE, _V1_HOPPER = 0.36, 0.22
_AMPERE_VERSIONS = {1: _V1_AMPERE, 2: _V2_AMPERE}
_HOPPER_VERSIONS = {1: _V1_HOPPER, 2: _V2_HOPPER, 3: _V3}
_B200_VERSIONS = {4: 0.71 * _V3 / 0.75}
COMPUTE: Mapping[str, Compute] = {
    "NVIDIA A100": Compute(
        0.72, _V1_AMPERE, f"{_MOSAIC}, of IBM's fms-fsdp and torchtitan with Llama models", _AMPERE_VERSIONS
    ),
    "NVIDIA A100 80GB PCIe": Compute(
        0.65,
        0.9 * _V1_AMPERE,
        "nine tenths of the SXM board's: NVIDIA A100 data sheet, top apps",
        {2: 0.9 * _V2_AMPERE},
    ),
    "NVIDIA H100": Compute(0.60, _V1_HOPPER, f"{_MOSAIC}, of IBM's fms-fsdp, torchtitan and llm.c", _HOPPER_VERSIONS),
    "NVIDIA H200": Compute(0.60, _V1_HOPPER, "as the H100, the same chip", _HOPPER_VERSIONS),
    "NVIDIA GH200": Compute(0.60, _V1_HOPPER, "as the H100, the same chip", _HOPPER_VERSIONS),
    "NVIDIA B200": Compute(0.60, 0.22, "as the H100: no run of its own", _B200_VERSIONS),
    "NVIDIA GeForce RTX 3090": Compute(1.0, 0.5, _TINY),
    "NVIDIA GeForce RTX 4080": Compute(0.95, 0.5, "as the RTX 4090, the same generation"),
    "NVIDIA GeForce RTX 4090": Compute(0.98, 0.5, f"{_LLMQ}, {_TINY}"),
    "NVIDIA GeForce RTX 5090": Compute(1.1, 0.55, "runs of llmq with Qwen2.5 models, at a clock above the sheet's"),
    "NVIDIA RTX A6000": Compute(0.70, 0.4, _TINY),
    "NVIDIA RTX PRO 6000": Compute(0.86, 0.4, "runs of llmq with Qwen2.5 models"),
    "NVIDIA L40S": Compute(0.68, 0.4, "runs of llmq with Qwen2.5 models"),
}


def compute_of(device_name: str) -> Compute | None:
    """Return the fractions of a GPU's data sheet speed that training reaches. None if the GPU is not listed."""
    named = [name for name in COMPUTE if device_name.startswith(name)]
    return COMPUTE[max(named, key=len)] if named else None
