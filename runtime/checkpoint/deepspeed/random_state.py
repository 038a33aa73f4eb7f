"""The states of random number generators, as tensors and plain data that load without executing code."""

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of the random number generators of Python, numpy, torch and every CUDA device, in a dict."""
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
    version, internal, gauss = random.getstate()
    return [version, torch.tensor(internal), gauss]


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states of random number generators that `random_states` returned.

    The states of CUDA devices that this machine lacks are ignored.
    """
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
