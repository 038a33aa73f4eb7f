"""A comparison of the ZeRO stages, of DeepSpeed alone and under a plan, with small and with large batches."""

from typing import Any

from studies.gpu.suite import Figures, Suite

MICRO_BATCHES = (1, 8)
STEPS = 6
FIRST = "stock_zero3"
TRIALS: dict[str, list[str]] = {
    FIRST: ["--variant", "stock", "--stage", "3"],
    "ebbtide_zero3": ["--variant", "ebbtide", "--stage", "3"],
    "ebbtide_zero3_unbound": ["--variant", "ebbtide", "--stage", "3", "--unbound"],
    "stock_zero2": ["--variant", "stock", "--stage", "2"],
    "ebbtide_zero2": ["--variant", "ebbtide", "--stage", "2"],
    "stock_zero1": ["--variant", "stock", "--stage", "1"],
    "stock_zero3_offload_param": ["--variant", "stock", "--stage", "3", "--offload-param"],
    "no_offload": ["--variant", "no_offload", "--stage", "3"],
}


def stages(suite: Suite) -> Figures:
    """Time each ZeRO stage of DeepSpeed alone, plans under ZeRO-2 and 3, and training without offload.

    The plans keep all optimizer state in host memory, so that the rows differ by what DeepSpeed and ebbtide do, and not
    by what a plan chose. The first run is repeated at the end, to show the noise. `ebbtide_zero3_unbound` decides
    whether binding autograd's thread to the core that updates leave free is worth it.
    """
    sizes = MICRO_BATCHES[:1] if suite.emulated else MICRO_BATCHES
    arguments = {
        f"{name}_micro_batch_{size}": [*own, "--micro-batch", str(size), "--steps", str(2 if suite.emulated else STEPS)]
        for size in sizes
        for name, own in TRIALS.items()
    }
    first = f"{FIRST}_micro_batch_{MICRO_BATCHES[0]}"
    rows = suite.trials({**arguments, f"{first}_again": arguments[first]})
    figures: Figures = {"rows": list(rows.values()), **_ratio("noise", rows[f"{first}_again"], rows[first])}
    same = []
    for size in sizes:
        for stage in (2, 3):
            stock, ours = (rows[f"{who}_zero{stage}_micro_batch_{size}"] for who in ("stock", "ebbtide"))
            figures |= _ratio(f"speedup_zero{stage}_micro_batch_{size}", stock, ours)
            if "failed" not in stock and "failed" not in ours:
                same.append(ours["hash"] == stock["hash"])
    return figures | {"correct": all(same) if same else None}


def _ratio(name: str, row: Figures, over: Figures) -> dict[str, Any]:
    if "failed" in row or "failed" in over:
        return {}
    return {name: row["iteration_s"] / over["iteration_s"]}
