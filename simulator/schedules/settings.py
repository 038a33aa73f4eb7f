"""The options that a comparison of offloading strategies tries by default, such as several ratios of Twin-Flow."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

STEPS = 10  # number of steps in which a share between 0 and 1 is varied
STRIDES = (2, 3, 4, 5, 6, 8, 10)


def settings(name: str, subgroups: int) -> Sequence[Mapping[str, Any]]:
    """Return the sets of options that a comparison tries for an offloading strategy, as arguments of `build_strategy`.

    A strategy without options has one empty set.
    """
    tried: Mapping[str, Sequence[Mapping[str, Any]]] = {
        "twin_flow": [{"ratio": i / STEPS} for i in range(STEPS + 1)],
        "deep_optimizer_states": [{"stride": k} for k in STRIDES if k <= max(2, subgroups)],
        "zero_infinity": [
            {"optimizer": optimizer, "parameters": parameters, "activations": activations, "pipelined": pipelined}
            for (optimizer, pipelined), parameters, activations in product(
                (("cpu", False), ("nvme", False), ("nvme", True)), ("device", "cpu"), ("device", "cpu")
            )
        ],
    }
    return tried.get(name, [{}])
