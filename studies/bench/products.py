"""16-bit matrix products on CPUs with and without native instructions for them."""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F


@cache
def computes_16_bit() -> bool:
    """Return whether this CPU multiplies 16-bit matrices natively, as with AVX-512 and newer.

    On older CPUs torch's own loops take 40 to 100 times as long as fp32 products.
    """
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def widened(x: torch.Tensor) -> bool:
    """Return whether matrix products with this tensor are faster in fp32."""
    return x.device.type == "cpu" and x.dtype != torch.float32 and not computes_16_bit()


class Linear(nn.Linear):
    """``nn.Linear`` that computes in fp32 on a CPU without 16-bit products, and rounds once at the end."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if not widened(input):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias).to(input.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b``. On a CPU without 16-bit products, compute in fp32 and round once."""
    return (a.float() @ b.float()).to(a.dtype) if widened(a) else a @ b
