"""The random number generators' states, as tensors and plain data that load without code."""

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and every CUDA device's generator."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": _python_state(),
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _python_state() -> list[Any]:
    """Return a tensor in place of 625 numbers, which pickle slowly."""
    version, internal, gauss = random.getstate()
    return [version, torch.tensor(internal), gauss]


def restore_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` returned. Generators of devices that are not here are left out."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(  # noqa: NPY002
        (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
