"""The options that a comparison of offloading strategies tries by default, such as several ratios of Twin-Flow."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

STEPS = 10  # number of steps in which a share between 0 and 1 is varied
STRIDES = (2, 3, 4, 5, 6, 8, 10)

Setting = Mapping[str, Any]


def settings(name: str, subgroups: int) -> Iterator[Setting]:
    """Yield the sets of options that a comparison tries for an offloading strategy, as arguments of `build_strategy`.

    A strategy without options yields one empty set.
    """
    yield from SETTINGS.get(name, _none)(subgroups)


def _none(_: int) -> Iterator[Setting]:
    yield {}


def _ratios(_: int) -> Iterator[Setting]:
    yield from ({"ratio": i / STEPS} for i in range(STEPS + 1))


def _strides(subgroups: int) -> Iterator[Setting]:
    yield from ({"stride": k} for k in STRIDES if k <= max(2, subgroups))


def _locations(_: int) -> Iterator[Setting]:
    for optimizer, pipelined in (("cpu", False), ("nvme", False), ("nvme", True)):
        for parameters in ("device", "cpu"):
            for activations in ("device", "cpu"):
                yield {
                    "optimizer": optimizer,
                    "parameters": parameters,
                    "activations": activations,
                    "pipelined": pipelined,
                }


SETTINGS: Mapping[str, Callable[[int], Iterator[Setting]]] = {
    "twin_flow": _ratios,
    "deep_optimizer_states": _strides,
    "zero_infinity": _locations,
}
