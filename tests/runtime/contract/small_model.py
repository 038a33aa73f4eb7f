"""A model with few modules, on which DeepSpeed's steps are fast.

A step of a small model spends most of its time in DeepSpeed's hooks, of which each module has four. A test of
parameters, gradients and optimizer state needs several parameters of different sizes, but not many modules.
"""

import torch
from torch import nn
from torch.nn import functional as F

from studies.bench.products import Linear, linear

HIDDEN = 64


class SmallModel(nn.Module):
    """A model that predicts the next byte. It has about as many elements as a `ByteGPT` of one block, in four modules.

    ``forward(inputs, targets)`` returns the mean cross entropy. The initial weights are always the same. The norm of
    the gradients is above 1, so that `ds_config`'s gradient clipping has an effect in each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_in = nn.Embedding(256, HIDDEN)
        self.first, self.second = Branch(3 * HIDDEN), Branch(4 * HIDDEN)
        self.head = Linear(HIDDEN, 256, bias=False)
        generator = torch.Generator(self.head.weight.device).manual_seed(0)
        for weight in (p.data for p in self.parameters() if p.dim() > 1):
            weight.copy_(torch.randn(weight.shape, generator=generator, device=generator.device) * 0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.second(self.first(self.bytes_in(inputs))))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Branch(nn.Module):
    """Two layers with a residual connection and a norm, as one module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.widen_bias = _filled(0.0, width, HIDDEN), _filled(0.0, width)
        self.narrow, self.narrow_bias = _filled(0.0, HIDDEN, width), _filled(0.0, HIDDEN)
        self.norm, self.norm_bias = _filled(1.0, HIDDEN), _filled(0.0, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(linear(x, self.widen, self.widen_bias))
        x = x + linear(wide, self.narrow, self.narrow_bias)
        return F.layer_norm(x, x.shape[-1:], self.norm, self.norm_bias)


def _filled(value: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value))
