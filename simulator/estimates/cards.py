"""GPUs that have no preset: the figures of their data sheets, with which a preset can be told to describe them.

The figures were compared with copies of NVIDIA's sheets and public tables of cards (2026-11-29), except the memory
bandwidth of the L40 and the A800, and PCIe generations of several cards, which were not found. The A30 (its sheet was
not found) and the A10G (its tables disagree: 62.5 to 125 Tflop/s) are therefore missing.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Card(NamedTuple):
    """A GPU without a preset.

    Attributes:
        like: Preset of a machine as this card is usually in, whose figures are replaced by the card's.
        gib: GPU memory that the driver leaves to programs.
        tflops: Dense 16-bit Tflop/s of matrix products with sums in fp32.
        gb_per_s: Bandwidth of GPU memory.
        link_gb_per_s: Rate of copies over the card's PCIe link in one direction, with pinned memory: assumed from the
            generation and the number of lanes.
        source: Origin of ``tflops``: "datasheet", or "shaders": twice (GeForce) or four times the fp32 rate of a table
            of cards, which is how these chips are built. Or "twin": the card with the same chip, whose sheet is known.
    """

    like: str
    gib: float
    tflops: float
    gb_per_s: float
    link_gb_per_s: float
    source: Literal["datasheet", "shaders", "twin"]

    @property
    def figures(self) -> dict[str, float]:
        """Return the keyword arguments of `ebbtide.simulator.preset` that describe this card."""
        return {
            "gpu_memory_bytes": int(self.gib * 2**30),
            "flops": self.tflops * 1e12,
            "gpu_bytes_per_s": self.gb_per_s * 1e9,
            "link_bytes_per_s": self.link_gb_per_s * 1e9,
        }

    @property
    def advice(self) -> str:
        figures = ", ".join(f"{name}={value:.4g}" for name, value in self.figures.items())
        return f"Describe it by its data sheet, in a machine like this one: preset({self.like!r}, {figures})"


_PCIE3, _PCIE4, _PCIE4_X8, _PCIE5 = 12, 25, 12.5, 52
CARDS: Mapping[str, Card] = {
    "V100": Card("a100-pcie", 31.7, 125, 900, _PCIE3, "datasheet"),
    "V100 SXM2 32GB": Card("a100-pcie", 31.7, 125, 900, _PCIE3, "datasheet"),
    "V100 SXM2 16GB": Card("a100-pcie", 15.8, 125, 900, _PCIE3, "datasheet"),
    "T4": Card("a100-pcie", 14.6, 65, 320, _PCIE3, "datasheet"),
    "A10": Card("a6000", 22.5, 125, 600, _PCIE4, "datasheet"),
    "A40": Card("a6000", 44.4, 149.7, 696, _PCIE4, "datasheet"),
    "L4": Card("l40s", 22.0, 121, 300, _PCIE4, "datasheet"),
    "L40": Card("l40s", 44.4, 181, 864, _PCIE4, "datasheet"),
    "RTX 6000 Ada": Card("l40s", 47.4, 364, 960, _PCIE4, "shaders"),
    "RTX 6000 Ada Generation": Card("l40s", 47.4, 364, 960, _PCIE4, "shaders"),
    "RTX A5000": Card("a6000", 23.7, 111, 768, _PCIE4, "shaders"),
    "RTX A4000": Card("a6000", 15.7, 76.7, 448, _PCIE4, "datasheet"),
    "RTX 3060": Card("rtx3090", 11.7, 25.6, 360, _PCIE4, "shaders"),
    "RTX 3070": Card("rtx3090", 7.7, 40.6, 448, _PCIE4, "shaders"),
    "RTX 3080": Card("rtx3090", 9.7, 59.5, 760, _PCIE4, "shaders"),
    "RTX 4060 Ti": Card("rtx4090", 15.6, 44, 288, _PCIE4_X8, "shaders"),
    "RTX 4070": Card("rtx4090", 11.7, 58, 504, _PCIE4, "shaders"),
    "RTX 4070 Ti": Card("rtx4090", 11.7, 80, 504, _PCIE4, "shaders"),
    "RTX 5070 Ti": Card("rtx5090", 15.5, 87.9, 896, _PCIE5, "shaders"),
    "RTX 5080": Card("rtx5090", 15.5, 112.6, 960, _PCIE5, "shaders"),
    "A800": Card("a100-80gb", 79.2, 312, 2039, _PCIE4, "twin"),
    "H800": Card("h100", 79.1, 989, 3350, _PCIE5, "twin"),
    "H20": Card("h100", 95.0, 148, 4000, _PCIE5, "datasheet"),
}
