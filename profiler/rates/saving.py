"""Measurement of the time that saving a checkpoint takes per tensor, independent of the tensors' sizes.

ebbtide's runtime lets ``torch.save`` write a checkpoint's file without the tensors' bytes, which are written later. The
measurement does the same, and loads the file without the tensors' bytes. The load stands for the other work per tensor.
"""

import os

import torch
from ebbtide.profiler.rates.sampling import repeat_s
from ebbtide.simulator.quantity import Quantity

TENSORS = 64


def measure_save(budget_s: float) -> Quantity:
    """Measure how long it takes to save a checkpoint's file without the tensors' data, in seconds per tensor.

    ebbtide saves each file in this way, and writes the tensors' data separately. The measurement includes a load
    without data, which stands for the other work that a save does for each tensor.
    """
    state = {f"layer.{i}.weight": torch.zeros(4) for i in range(TENSORS)}
    descriptor = os.memfd_create("ebbtide-save")
    path = f"/proc/self/fd/{descriptor}"

    def save() -> None:
        with torch.serialization.skip_data():
            torch.save(state, path)
            torch.load(path, map_location="meta", weights_only=True)

    try:
        seconds = repeat_s(save, budget_s)
    finally:
        os.close(descriptor)
    detail = f"torch.save without data and a look at it, {TENSORS} tensors"
    return Quantity.from_samples([s / TENSORS for s in seconds], "measured", detail)
