"""16-bit matrix products that are also fast on CPUs without instructions for 16-bit arithmetic."""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F


@cache
def computes_16_bit() -> bool:
    """Return True if this CPU has vector instructions newer than AVX2, such as AVX-512."""
    # torch needs such instructions to compute 16-bit matrix products fast. On other CPUs, torch uses loops of its own,
    # which take 40 to 100 times as long as products in fp32.
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def widened(x: torch.Tensor) -> bool:
    """Return True if matrix products with the tensor ``x`` are faster when computed in fp32."""
    return x.device.type == "cpu" and x.dtype != torch.float32 and not computes_16_bit()


class Linear(nn.Linear):
    """An ``nn.Linear`` that is also fast with 16-bit inputs on a CPU without instructions for 16-bit products.

    On such a CPU, the product of a 16-bit input is computed in fp32, and the result is rounded once. Otherwise the
    layer computes as every ``nn.Linear`` does.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return linear(input, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)``, fast for 16-bit tensors on every CPU."""
    # On a CPU without instructions for 16-bit products, the product is computed in fp32 and rounded once.
    if not widened(x):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the matrix product ``a @ b``, fast for 16-bit tensors on every CPU."""
    # On a CPU without instructions for 16-bit products, the product is computed in fp32 and rounded once.
    return (a.float() @ b.float()).to(a.dtype) if widened(a) else a @ b
