"""What DeepSpeed's loaded CPU op was built with, told by its bits.

DeepSpeed's ops update a tensor in a loop over whole vectors and leave the last ``length mod width``
elements to a scalar loop, in which the compiler fuses other products than the vector loop does. The
width is that of the *build* (16 floats for AVX-512, 8 for AVX2, 4 for NEON; its scalar build has no
vector loop at all), which need not be the widest that this machine knows: an op may have been
built elsewhere, by another compiler or for another CPU. So the loaded op itself is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from runtime.kernels.adam import AdamStep, BiasCorrection
from runtime.kernels.host import host_adam

NO_VECTORS = 1 << 62  # longer than any tensor: all of it is tail (scalar builds, ARM's SVE)
WIDTHS = (16, 8, 4, 1, NO_VECTORS)  # 1: a compiler that fuses both loops alike, so that no tail is

_LENGTHS = (1, 127, 1087)  # 15, 7 and 3 elements behind the last vector of 16, 8 and 4
_DECAYS = ((0.0, True), (0.1, True), (0.1, False))
_STEPS = 3
_LR, _BETAS, _EPS = 1e-3, (0.9, 0.999), 1e-8
_OPTIMIZER = 1_000_033  # an id that no optimizer of this process has


class UnknownRoundingError(RuntimeError):
    """DeepSpeed's op rounds in an order that the kernels do not repeat."""


@functools.cache
def adam_width(op: Any) -> int:
    """Elements of the vectors that the loaded ``cpu_adam`` op works on; `NO_VECTORS` without.

    Takes milliseconds, once per op.

    Raises:
        UnknownRoundingError: none of the orders that are known has this op's bits.
    """
    equal = [width for width in WIDTHS if _has_width(op, width)]
    if len(equal) != 1:
        raise UnknownRoundingError(
            "DeepSpeed's cpu_adam op must round as its AVX-512, AVX2, NEON or scalar build with "
            f"fused multiply-add does, but {getattr(op, '__file__', op)} fits {len(equal)} of "
            "them, so that no other kernel could have its bits: delete that file and let DeepSpeed "
            "build it anew on this machine (CXX=g++), or train without a plan"
        )
    return equal[0]


def _has_width(op: Any, width: int) -> bool:
    return all(
        _same_bits(op, width, length, decay, adamw)
        for length in _LENGTHS
        for decay, adamw in _DECAYS
    )


def _same_bits(op: Any, width: int, length: int, decay: float, adamw: bool) -> bool:
    generator = torch.Generator().manual_seed(length)
    p, m, v = torch.randn(length, generator=generator), torch.zeros(length), torch.zeros(length)
    theirs = [tensor.clone() for tensor in (p, m, v)]
    bias = BiasCorrection(*_BETAS)
    op.create_adam(_OPTIMIZER, _LR, *_BETAS, _EPS, decay, adamw, False)
    try:
        for number in range(1, _STEPS + 1):
            grad = torch.randn(length, generator=generator)
            step = AdamStep(_LR, *_BETAS, _EPS, decay, *bias.advance(number, *_BETAS), adamw)
            host_adam(p, m, v, grad, None, step, tail=length % width)
            settings = (_LR, *_BETAS, _EPS, decay, True)
            op.adam_update(_OPTIMIZER, number, *settings, theirs[0], grad, *theirs[1:])
    finally:
        op.destroy_adam(_OPTIMIZER)
    return all(torch.equal(ours, stock) for ours, stock in zip((p, m, v), theirs, strict=True))
