"""An estimate of the seconds that a GPU computes on one block of a transformer (embedding, layer or head).

The estimate follows from the shapes of the block and of the micro-batch. A matrix product is assumed to reach the
FLOP/s that large products reach on this GPU, unless GPU memory delivers the operands more slowly. Attention has a
FLOP/s value of its own, because its products are small and a softmax lies between them. The other kernels are norms,
activations, residuals, rotary embedding and the loss. They take as long as their traffic in GPU memory. This traffic
depends on their implementation: fused or compiled kernels read and write each tensor once, but PyTorch's own modules do
so for every operation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ebbtide.simulator.estimates.models.blocks import Block, ModelError
from ebbtide.simulator.estimates.sheets import compute_of
from ebbtide.simulator.machine import Machine

Kernels = Literal["fused", "eager"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
FlashVersion = Literal[1, 2, 3, 4]
FLASH_VERSIONS: tuple[FlashVersion, ...] = get_args(FlashVersion)
# A layer stores 34 s b h bytes of activations. Tensor parallelism divides all but 10 of the 34 (Korthikanti et al.,
# arXiv 2205.05198, equation 1).
STORED_WHOLE, STORED_SPLIT = 10, 24
# Memory traffic of a forward's kernels between matrix products: 16-bit values per token and element of the hidden size,
# counted op by op for a layer like Llama's or GPT's. Fused: two norms 4, two residuals 6, the MLP's activation 8,
# query, key and value with their rotary embedding 10. Eager, as in the transformers library: norms in fp32 32,
# residuals 6, activation and product 14, rotary embedding 20, copies 4.
PASSES: Mapping[Kernels, int] = {"fused": 28, "eager": 76}
# The backward of a kernel reads the kernel's input and the gradient of its output. Eager kernels also add up gradients
# of tensors that several ops read.
BACKWARD_TRAFFIC: Mapping[Kernels, float] = {"fused": 2.0, "eager": 2.5}
# Bytes per token and element of the hidden size that eager norms store until backward (fp32 copies of their inputs),
# beyond those that fused kernels store.
EAGER_STORED = 8
# Equation 1 is for matrices that are together 12 times as wide as the hidden size: 4 of attention, and 8 of an MLP of
# four times the hidden size. What wider matrices store (in gated MLPs, and with several experts per token), in bytes
# per token, element of the hidden size and further width. Layers of Llama, Gemma and Mixtral in the transformers
# library store at most an eighth more than estimated (counted with saved-tensor hooks).
USUAL_WIDTH = 12
STORED_WIDER: Mapping[Kernels, int] = {"fused": 2, "eager": 3}
# Bytes per head and pair of positions that stay until backward if attention scores are stored, without dropout. Fused:
# the softmax's output. Eager: the fp32 softmax and its 16-bit copy (counted with saved-tensor hooks on a Llama).
STORED_SCORES: Mapping[Kernels, int] = {"fused": 2, "eager": 6}
# The backward of flash attention computes the scores again: five products for the two of forward (Dao, arXiv
# 2307.08691).
BACKWARD_SCORES = 2.5
STORED_BACKWARD_SCORES = 2.0  # if forward has stored the scores, so that none are computed again
# Memory traffic in bytes per head and pair of positions if scores are stored. Fused: the product writes them, one
# kernel of scale, mask and softmax reads and writes them, and the next product reads them. Eager: the mask is a kernel
# of its own, and the softmax is computed in fp32.
SCORE_BYTES: Mapping[Kernels, int] = {"fused": 10, "eager": 28}
# Memory traffic in bytes per logit, in forward and in backward. Fused: written in 16 bits, converted to fp32,
# log-softmax, and the same in backward. Eager: also copied when labels are shifted. One kernel: written, read twice,
# and overwritten by their gradient.
LOSS_BYTES: Mapping[str, tuple[int, int]] = {"fused": (16, 14), "eager": (24, 24), "one kernel": (8, 2)}
# Rows of a tile of a grouped product. An expert's last tile is partly empty.
TILE = 128
# Memory traffic of routing a token to one expert and back, in 16-bit values per element of the hidden size: the rows
# are gathered and scattered, each read and written, and weighted.
ROUTING_PASSES: Mapping[Kernels, int] = {"fused": 6, "eager": 12}


@dataclass(frozen=True)
class PassCost:
    """The costs of a forward or backward through a block, relative to those of a forward.

    For the forward, ``products``, ``scores`` and ``traffic`` are 1. The backward is counted without recomputation.

    Attributes:
        products: Time of the matrix products, divided by the time of the matrix products in a forward.
        scores: Time of the attention scores, divided by the time of the attention scores in a forward.
        traffic: GPU memory traffic of the kernels between the matrix products, divided by the traffic of these kernels
            in a forward. There is one value for fused and one for eager kernels.
        loss: Not a cost, but an index into each pair of `LOSS_BYTES`: 0 for the forward and 1 for the backward. These
            pairs have the bytes of GPU memory traffic per logit.
    """

    products: float
    scores: float
    traffic: Mapping[Kernels, float]
    loss: int


FORWARD = PassCost(products=1.0, scores=1.0, traffic={"fused": 1.0, "eager": 1.0}, loss=0)
BACKWARD = PassCost(products=2.0, scores=BACKWARD_SCORES, traffic=BACKWARD_TRAFFIC, loss=1)


@dataclass(frozen=True)
class GpuSpeed:
    """The FLOP/s and memory bandwidth of a GPU, and the training settings that decide how long the GPU computes on a
    block of a model.
    """

    flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    wire_bytes: int
    expert_flops_per_s: float
    tensor_parallel: int = 1
    flash: bool = True
    kernels: Kernels = "fused"
    fused_loss: bool = False

    @classmethod
    def of(
        cls, machine: Machine, wire_bytes: int, flash_version: FlashVersion | None = None, **training: Any
    ) -> "GpuSpeed":
        """Return a `GpuSpeed`: the FLOP/s and memory bandwidth of a machine's GPU, together with training settings.

        The settings are those that decide how long the GPU computes on a block of a model.

        Args:
            flash_version: Major version of FlashAttention. None: the machine's own FLOP/s of attention are used.

        Raises:
            ModelError: ``flash_version`` does not run on the machine's GPU.
        """
        gain = _attention_gain(machine.device_name, flash_version)
        if not training.get("flash", True):
            gain = _stored_gain(machine)
        return cls(
            machine.rate("device_flops_per_s"),
            machine.rate("attention_flops_per_s") * gain,
            machine.rate("device_memory_bytes_per_s"),
            wire_bytes,
            machine.rate("expert_flops_per_s"),
            **training,
        )

    def seconds(self, block: Block, shape: "BatchShape", part: PassCost) -> float:
        """Return the seconds that a GPU needs for one micro-batch's forward or backward through a block.

        An embedding takes no time.
        """
        if not block.flops_per_token:
            return 0.0
        seconds = part.products * self._products_s(block, shape)
        if not block.attention:
            return seconds + self._loss_bytes(block, shape, part) / self.memory_bytes_per_s
        seen = shape.sequence / 2 if self.flash else shape.sequence
        score_flops = shape.tokens * 2 * 2 * block.attention * seen / self.tensor_parallel
        scores_s = score_flops / self.attention_flops_per_s
        traffic = part.traffic[self.kernels] * (self._traffic_bytes(shape) + self._routing_bytes(block, shape))
        scores = part.scores if self.flash else min(part.scores, STORED_BACKWARD_SCORES)
        return seconds + scores * scores_s + traffic / self.memory_bytes_per_s

    def _products_s(self, block: Block, shape: "BatchShape") -> float:
        experts_s, flops_per_token = 0.0, block.flops_per_token
        if experts := block.experts:
            flops_per_token -= experts.flops_per_token
            rows = shape.tokens * experts.per_token / experts.count
            wasted = 1 + TILE / 2 / rows
            experts_s = wasted * shape.tokens * experts.flops_per_token / self.tensor_parallel / self.expert_flops_per_s
        seconds = shape.tokens * flops_per_token / self.tensor_parallel / self.flops_per_s + experts_s
        return max(seconds, self._product_bytes(block, shape) / self.memory_bytes_per_s)

    def _product_bytes(self, block: Block, shape: "BatchShape") -> float:
        # The hidden size is assumed as one dimension of each matrix.
        hidden, tokens = shape.hidden, shape.tokens
        used = block.flops_per_token / 2
        matrices = [n for n in block.params if n >= hidden * hidden // 64 and n > 8 * hidden]
        share = used / sum(matrices) if matrices else 1.0  # share of the experts that a token uses
        touched = sum(matrices) * min(1.0, share * max(1.0, math.sqrt(tokens)))
        sides = share * sum(hidden + n / hidden / self.tensor_parallel for n in matrices)
        return self.wire_bytes * (touched / self.tensor_parallel + tokens * sides)

    def _traffic_bytes(self, shape: "BatchShape") -> float:
        # Attention scores are assumed to be stored there.
        split = STORED_SPLIT / (STORED_WHOLE + STORED_SPLIT)
        share = 1 - split + split / self.tensor_parallel
        moved = self.wire_bytes * PASSES[self.kernels] * share * shape.tokens * shape.hidden
        if self.flash:
            return moved
        scores = shape.heads * shape.sequence * shape.tokens / self.tensor_parallel
        return moved + SCORE_BYTES[self.kernels] * scores * self.wire_bytes / 2

    def _routing_bytes(self, block: Block, shape: "BatchShape") -> float:
        if block.experts is None:
            return 0.0
        return self.wire_bytes * ROUTING_PASSES[self.kernels] * block.experts.per_token * shape.tokens * shape.hidden

    def _loss_bytes(self, block: Block, shape: "BatchShape", part: PassCost) -> float:
        kind = "one kernel" if self.fused_loss else self.kernels
        logits = shape.tokens * block.flops_per_token / 2 / shape.hidden / self.tensor_parallel
        return logits * LOSS_BYTES[kind][part.loss]


def _attention_gain(device_name: str, version: FlashVersion | None) -> float:
    compute = compute_of(device_name)
    if compute is None:
        return 1.0
    gain = compute.attention_gain(version)
    if gain is None:
        runs = " or ".join(map(str, sorted({2, *compute.versions})))
        raise ModelError(f"flash_version must be {runs} on {device_name}, but got {version}", "flash_version")
    return gain


def _stored_gain(machine: Machine) -> float:
    # Both are FLOP/s of the same machine. Attention that stores its scores is assumed to be as fast as FlashAttention
    # 1. The published runs without flash attention were predicted with this speed.
    compute = compute_of(machine.device_name)
    if compute is None or machine.attention_flops_per_s is None:
        return 1.0
    return compute.found / compute.attention


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch: its numbers of tokens, and the model's hidden size and number of attention heads."""

    hidden: int
    heads: int
    tokens: int
    sequence: int


def overlapped_s(*parts_s: float) -> float:
    """Return the seconds of several activities that overlap partly: more than the longest of them, less than their sum.

    Full overlap is not reached in training: the first kernel of each layer waits for the gather of its parameters,
    and the host can launch only a bounded number of kernels ahead.
    """
    return math.sqrt(sum(part * part for part in parts_s))


def run_ahead_s(device_s: float, issued_s: float) -> float:
    """Return the seconds for GPU kernels that the host launches while the GPU runs earlier ones."""
    # The result is the third root of the sum of the cubes of both times: a little more than the longer time, or 1.26
    # times either time if they are equal. It is more than the longer time because each side sometimes waits for the
    # other. The host waits if it is a limited number of launches ahead of the GPU. The GPU waits if it has no work
    # left.
    return math.cbrt(device_s**3 + issued_s**3)


def reissued_s(seconds: float, issued_s: float, then_s: float) -> float:
    """Return what a time of `run_ahead_s` with ``issued_s`` of the host becomes if that becomes ``then_s``."""
    if issued_s > seconds:
        issued_s, then_s = seconds, then_s * seconds / issued_s
    return math.cbrt(max(0.0, seconds**3 - issued_s**3 + then_s**3))
