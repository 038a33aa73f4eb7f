"""The parts of the GPU suite, and the sections (single checks or measurements) of each part."""

from collections.abc import Callable

from studies.gpu import contract, smoke, speed
from studies.gpu.comparison import compare
from studies.gpu.stages import stages
from studies.gpu.suite import Figures, Suite

# The most important sections come first. Each section is a process with its own record. The sections of a part together
# fit into the part's minutes.
SECTIONS: dict[str, Callable[[Suite], Figures]] = {
    "ops": smoke.ops,
    "kernel_bits": smoke.kernel_bits,
    "one_step": smoke.one_step,
    "sanitizer": smoke.sanitizer,
    "contract": contract.contract,
    "stages": stages,
    "machine": speed.machine_profile,
    "baseline": speed.baseline,
    "ablation": speed.ablation,
    "efficiency": speed.efficiency,
    "fidelity": speed.fidelity,
    "peers": compare,
    "parameter_offload": speed.parameter_offload,
    "checkpoint_stall": speed.checkpoint_stall,
}
PARTS: dict[str, tuple[str, ...]] = {
    "smoke": ("ops", "kernel_bits", "one_step", "sanitizer"),
    "contract": ("contract",),
    "stages": ("stages",),
    "baseline": ("machine", "baseline"),
    "peers": ("peers",),
    "speed": ("efficiency", "ablation", "fidelity"),
    "parameters": ("parameter_offload",),
    "checkpoints": ("checkpoint_stall",),
}
# Defaults without --size and --cap-gib: the model and a part of its state fit into the GPU memory.
SIZES_OF_PARTS = {"stages": "1.3b", "baseline": "1.3b", "speed": "1.3b", "peers": "3b", "parameters": "3b"}
CAPS_GIB = {"stages": 1000.0, "baseline": 12.0, "speed": 12.0, "peers": 24.0, "parameters": 12.0}
BUDGET_S = {
    "ops": 150.0,
    "kernel_bits": 90.0,
    "one_step": 120.0,
    "sanitizer": 120.0,
    "contract": 540.0,
    "stages": 420.0,
    "machine": 120.0,
    "baseline": 420.0,
    "ablation": 180.0,
    "efficiency": 120.0,
    "fidelity": 240.0,
    "peers": 570.0,
    "checkpoint_stall": 300.0,
    "parameter_offload": 540.0,
}


def sections_of(names: list[str]) -> list[tuple[str, str]]:
    """Return the selected sections of the GPU suite as (part, section) pairs, each once, in running order.

    A section is a single check or measurement. A part is a group of sections.

    Args:
        names: Names of parts and sections. If empty, all sections are selected.
    """
    wanted = set(names) or set(PARTS)
    return [
        (part, section)
        for part, sections in PARTS.items()
        for section in sections
        if part in wanted or section in wanted
    ]
