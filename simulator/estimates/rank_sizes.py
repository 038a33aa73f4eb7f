"""The sizes of one rank of a training job: its share of the parameters, and the GPU memory that it uses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ebbtide.simulator.estimates.collectives import Layout
from ebbtide.simulator.estimates.compute import (
    EAGER_STORED,
    STORED_SCORES,
    STORED_SPLIT,
    STORED_WHOLE,
    STORED_WIDER,
    USUAL_WIDTH,
)
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.blocks import Architecture, Block
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import WIRE_BYTES, BaseKind

# Number of chunks of a chunked loss: 8 in torchtune. In Liger, the vocabulary divided by the hidden size, so that the
# logits of a chunk are as large as the input of the output layer (``fused_linear_cross_entropy.py``).
LOSS_PARTS = 8


@dataclass(frozen=True)
class RankSizes:
    """One rank of a training job under ZeRO-3, with its parameters and the memory that it uses."""

    job: Job
    machine: Machine

    @property
    def arch(self) -> Architecture:
        return self.job.architecture

    @cached_property
    def layout(self) -> Layout:
        p = self.job
        return Layout(self.machine.gpus_per_node, p.data_parallel, p.tensor_parallel, p.pipeline_parallel, p.stage)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one micro-batch of one rank of a training job."""
        return self.job.sequence * self.job.micro_batch

    @cached_property
    def stage_blocks(self) -> list[Block]:
        """Return the blocks (embedding, layers, head) of a model in the pipeline stage of the simulated rank.

        The first stage has the embedding, the last stage the head.
        """
        p, blocks = self.job, self.arch.blocks()
        inner = blocks[1:-1]
        first = p.stage * len(inner) // p.pipeline_parallel
        last = (p.stage + 1) * len(inner) // p.pipeline_parallel
        held = inner[first:last]
        if p.stage == 0:
            held = [blocks[0], *held]
        if p.stage == p.pipeline_parallel - 1:
            held = [*held, blocks[-1]]
            if self.arch.tied and p.pipeline_parallel > 1:  # the last stage holds a copy of the embedding
                tied = (self.arch.vocabulary * self.arch.hidden,)
                held[-1] = Block("head", (*held[-1].params, *tied), (*held[-1].split, True), held[-1].flops_per_token)
        return held

    def partitions(self, block: Block) -> tuple[int, ...]:
        """Return a tuple of the number of elements that one rank holds of each parameter of a block (such as a layer).

        Tensor parallelism divides parameters first, then ZeRO.
        """
        return partitions_of(block.params, block.split, self.job.tensor_parallel, self.job.data_parallel)

    def again(self, block: Block) -> float:
        """Return the fraction of a block's forward that its backward computes again (activation checkpointing)."""
        return self.job.recompute_share if self.job.recompute and block.attention else 0.0

    @property
    def wire(self) -> int:
        return WIRE_BYTES[self.job.precision]

    def activation_bytes(self, block: Block) -> int:
        """Return the bytes that the forward of a block (embedding, layer or head) keeps in GPU memory for backward.

        According to Korthikanti et al. (arXiv 2205.05198), a layer keeps s b h (34 + 5 a s / h) bytes, or 2 s b h
        bytes with recomputation: sequence s, micro-batch b, hidden size h, heads a. Without recomputation, a layer with
        wider matrices keeps more.
        """
        unit = self.tokens * self.arch.hidden * self.wire / 2
        if block.name == "head":
            return self._head_bytes(block)
        if not block.attention:
            return int(2 * unit)
        again = self.again(block)
        inputs = 2 * unit / (self.job.tensor_parallel if self.job.sequence_parallel else 1)
        return int(again * inputs + (1 - again) * self._stored(unit, block))

    def _head_bytes(self, block: Block) -> int:
        # With a fused loss, only a part of the logits exists at a time. The memory of the buckets is subtracted,
        # because it is in use throughout the iteration.
        logits = self.tokens * self.arch.vocabulary / self.job.tensor_parallel
        if self.job.fused_loss:
            logits /= max(LOSS_PARTS, math.ceil(self.arch.vocabulary / self.arch.hidden))
        forward = (self.wire + 4 + 4) * logits
        gradients = self.wire * self.whole_elements(block)
        backward = (self.wire + 4) * logits + gradients + self.backward_bytes()
        return int(max(forward, backward) - self.backward_bytes())

    def _stored(self, unit: float, block: Block) -> float:
        t = self.job.tensor_parallel
        whole = STORED_WHOLE / t if self.job.sequence_parallel else STORED_WHOLE
        stored = STORED_SCORES[self.job.kernels]
        heads_per_hidden = self.arch.heads / self.arch.hidden / t
        scores = 0.0 if self.job.flash_attention else stored * heads_per_hidden * self.job.sequence
        widened = EAGER_STORED if self.job.kernels == "eager" else 0
        wider = max(0.0, block.flops_per_token / 2 / self.arch.hidden**2 - USUAL_WIDTH) * STORED_WIDER[self.job.kernels]
        return unit * (whole + (STORED_SPLIT + wider) / t + scores + widened)

    def base_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes of one rank's GPU memory that are in use throughout an iteration, without optimizer state.

        They are for the rank's parameters and gathered parameters, and for DeepSpeed's flat gradient bucket and the
        gradients that wait for their reduction (`backward_bytes`). With recomputation, they are also for the
        activations of the last recomputed layer.
        """
        held = self.bucket_bytes(self.held_elements(blocks)) + self.backward_bytes()
        return held + sum(self.base_parts(blocks).values())

    def base_parts(self, blocks: Sequence[Block]) -> dict[BaseKind, int]:
        """Return the bytes of one rank's GPU memory that are in use throughout an iteration, as a dict by kind.

        The kinds are ``parameters`` and ``activations``. The activations are, with recomputation, those of the last
        recomputed layer, which stay until the next iteration replaces them. With pipeline stages, they are also those
        of the other micro-batches whose backward has not run. Gradient buckets are not included.
        """
        held = self.held_elements(blocks) + self.gathered_elements(blocks)
        parts: dict[BaseKind, int] = {"parameters": held * self.wire}
        unit = self.tokens * self.arch.hidden * self.wire / 2
        layers = {block.flops_per_token: block for block in blocks if block.attention and self.job.recompute}
        again = max((int(self._stored(unit, block)) for block in layers.values()), default=0)
        activations = again + self.waiting_micro_batches * sum(self.activation_bytes(block) for block in blocks)
        if activations:
            parts["activations"] = activations
        return parts

    @property
    def waiting_micro_batches(self) -> int:
        """Return how many other micro-batches wait for their backward while a pipeline stage runs one."""
        # DeepSpeed runs forwards and backwards alternately (1F1B).
        return min(self.job.pipeline_parallel - self.job.stage, self.job.accumulation) - 1

    def whole_elements(self, block: Block) -> int:
        """Return the number of a block's parameter elements that all data-parallel ranks hold together."""
        # Each rank's partition is rounded up, so the number includes padding.
        return sum(self.partitions(block)) * self.job.data_parallel

    def held_elements(self, blocks: Sequence[Block]) -> int:
        return sum(sum(self.partitions(block)) for block in blocks)

    def gathered_elements(self, blocks: Sequence[Block]) -> int:
        """Return an estimate of the largest number of parameter elements that ZeRO-3 has gathered in one rank's GPU
        memory at a time.

        It is ``stage3_max_live_parameters`` plus the elements of the embedding and the head, which are never released,
        but not more than all elements of ``blocks``. With a single data-parallel rank it is 0, because the rank's own
        partition has all parameters.
        """
        if self.job.data_parallel == 1:
            return 0
        ends = [block for block in blocks if not block.attention]
        live = self.job.max_live_parameters + self.held_elements(ends) * self.job.data_parallel
        return min(live, self.held_elements(blocks) * self.job.data_parallel)

    def bucket_bytes(self, held: int) -> int:
        """Return the bytes of DeepSpeed's flat gradient bucket, which is allocated once."""
        return self.wire * min(self.job.reduce_bucket_elements, held * self.job.data_parallel)

    def backward_bytes(self) -> int:
        """Return the bytes of GPU memory that gradients take during backward while they wait for DeepSpeed to reduce
        them.
        """
        blocks = self.stage_blocks
        largest = max(n for block in blocks for n in self.partitions(block))
        return self.bucket_bytes(self.held_elements(blocks)) + 4 * largest


@lru_cache(maxsize=4096)
def partitions_of(params: tuple[int, ...], split: tuple[bool, ...], tensor: int, data: int) -> tuple[int, ...]:
    held = (math.ceil(n / tensor) if whole else n for n, whole in zip(params, split, strict=True))
    return tuple(math.ceil(n / data) for n in held)
