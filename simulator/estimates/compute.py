"""How long a device computes on one block of a transformer, from its shapes.

A matrix product takes its arithmetic at the rate that large products sustain, and its operands'
way through device memory: so small or narrow products (short sequences, tensor parallelism) are
slower per flop than large ones. What lies between the products (norms, activations, dropout,
residuals, rotary embedding, the loss) is bound by device memory alone.
"""

import math
from dataclasses import dataclass

from ebbtide.simulator.estimates.blocks import Block
from ebbtide.simulator.machine import Machine

# Korthikanti et al., arXiv 2205.05198, equation 1: a layer stores 34 s b h bytes of activations,
# 10 of which tensor parallelism leaves whole. Each is written once and read once.
STORED_WHOLE, STORED_SPLIT = 10, 24
SCORE_BYTES = 5  # per head and pair of positions, without flash attention
# Per logit: written and read in 16 bits, widened, and the softmax' two passes over 4 bytes.
LOSS_BYTES = 2 + 2 + 4 + 4 + 4


@dataclass(frozen=True)
class Device:
    """What a block's time depends on besides its shape."""

    flops_per_s: float
    memory_bytes_per_s: float
    wire_bytes: int
    tensor_parallel: int = 1
    flash: bool = True

    @classmethod
    def of(cls, machine: Machine, wire_bytes: int, tensor_parallel: int, flash: bool) -> "Device":
        return cls(
            machine.rate("device_flops_per_s"),
            machine.rate("device_memory_bytes_per_s"),
            wire_bytes,
            tensor_parallel,
            flash,
        )

    def forward_s(self, block: Block, hidden: int, heads: int, tokens: int, sequence: int) -> float:
        """Of one micro-batch of ``tokens``; the embedding's rows are looked up for nothing."""
        if not block.flops_per_token:
            return 0.0
        flops = tokens * block.flops_per_token / self.tensor_parallel
        moved = self._product_bytes(block, hidden, tokens)
        if block.attention:
            flops += self._score_flops(block, tokens, sequence)
            moved += self._layer_bytes(hidden, heads, tokens, sequence)
        else:
            vocabulary = block.flops_per_token / 2 / hidden
            moved += tokens * vocabulary * LOSS_BYTES / self.tensor_parallel
        return flops / self.flops_per_s + moved / self.memory_bytes_per_s

    def _score_flops(self, block: Block, tokens: int, sequence: int) -> float:
        """Queries with keys, and scores with values: flash attention skips the future half."""
        seen = sequence / 2 if self.flash else sequence
        return tokens * 2 * 2 * block.attention * seen / self.tensor_parallel

    def _product_bytes(self, block: Block, hidden: int, tokens: int) -> float:
        """Weights, inputs and outputs of the products; one side of each is the hidden size."""
        used = block.flops_per_token / 2
        matrices = [n for n in block.params if n >= hidden * hidden // 64 and n > 8 * hidden]
        share = used / sum(matrices) if matrices else 1.0  # of experts, those that a token visits
        touched = sum(matrices) * min(1.0, share * max(1.0, math.sqrt(tokens)))
        sides = share * sum(hidden + n / hidden / self.tensor_parallel for n in matrices)
        return self.wire_bytes * (touched / self.tensor_parallel + tokens * sides)

    def _layer_bytes(self, hidden: int, heads: int, tokens: int, sequence: int) -> float:
        """Each stored activation, written and read; scores too unless flash attention is on."""
        t = self.tensor_parallel
        stored = (STORED_WHOLE + STORED_SPLIT / t) * tokens * hidden
        if not self.flash:
            stored += SCORE_BYTES * heads * sequence * tokens / t
        return 2 * stored * self.wire_bytes / 2


def overlapped_s(*parts_s: float) -> float:
    """Activities that overlap in part: between the longest of them and their sum.

    The root of the sum of squares: exact where one dominates, 1.4 times the longest where two are
    equal. Neither of the limits holds for a training loop: each layer's first kernel waits for its
    gather, and the host runs ahead of the device by a bounded number of launches only.
    """
    return math.sqrt(sum(part * part for part in parts_s))
