"""An estimate of one rank in a training job: its share of the parameters, the times of its layers, the GPU memory that
it uses, and the bytes that it receives from other nodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from ebbtide.simulator.estimates.collectives import LINK, Links, Topology, passed_on, ring_s
from ebbtide.simulator.estimates.compute import (
    BACKWARD,
    EAGER_STORED,
    FORWARD,
    STORED_SCORES,
    STORED_SPLIT,
    STORED_WHOLE,
    STORED_WIDER,
    USUAL_WIDTH,
    BatchShape,
    GpuSpeed,
    Kernels,
    overlapped_s,
    run_ahead_s,
)
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.blocks import Architecture, Block
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedules.buckets import bucket_fields, planned_bucket
from ebbtide.simulator.schedules.gathers import Gathered, GatherRules, Module, gathered
from ebbtide.simulator.workload import WIRE_BYTES, BaseKind, Layer, Workload, cut, cut_flat

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
    def layout(self) -> Topology:
        p = self.job
        return Topology(self.machine.gpus_per_node, p.data_parallel, p.tensor_parallel, p.pipeline_parallel, p.stage)

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
        """Return one rank's elements of each parameter. Tensor parallelism divides them before ZeRO."""
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
        """Return the bytes of GPU memory in use throughout an iteration, without optimizer state."""
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
        """Return an estimate of the most parameter elements that ZeRO-3 has gathered on one GPU at a time.

        The embedding and the head are never released. A single data-parallel rank has all parameters already.
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
        """Return the bytes of GPU memory for gradients that wait for their reduction in backward."""
        blocks = self.stage_blocks
        largest = max(n for block in blocks for n in self.partitions(block))
        return self.bucket_bytes(self.held_elements(blocks)) + 4 * largest


@lru_cache(maxsize=4096)
def partitions_of(params: tuple[int, ...], split: tuple[bool, ...], tensor: int, data: int) -> tuple[int, ...]:
    held = (math.ceil(n / tensor) if whole else n for n, whole in zip(params, split, strict=True))
    return tuple(math.ceil(n / data) for n in held)


# The times of the training thread are those of ZeRO-3 on a GPU. Ratios between them were measured on a CPU, with models
# that have the modules of large ones, but are so narrow that Python takes nearly all of the time (`python -m
# studies.training_thread`, 317 parameters, records in `studies/results/cpu2`).
MODULES_OF_A_LAYER = 12
MODULE_ISSUE_S = 1.5e-4  # for machines without this value. DeepSpeed's hooks take 0.1 to 0.2 ms
# Time in which the host issues a layer's backward without recomputation, divided by that of its forward: one gradient
# for each input of a product and for each weight, and the hooks of the reduction. On an H200, both bound by the host, a
# forward of 94 ms had backwards of 182 to 194 ms in the fast iterations (`studies/results/h200`).
ISSUED_BACKWARD = 1.8
# Time that `step()` spends on one parameter in DeepSpeed's Python code before the first update: 36 ms for the 317
# parameters of the H200's run.
STEP_ISSUE_S = 1.1e-4
# DeepSpeed's hook on one gradient under ZeRO-1 and 2 (reduction, copy to host memory, norm), as a part of the time in
# which a module's forward is issued under ZeRO-3, and a parameter in `step()`, as a part of `STEP_ISSUE_S`: `stock` and
# `stock-zero2` of the study. Without offload the sum is about the same, because `step()` then takes the norms.
GRADIENT_HOOK, FLAT_STEP = 0.65, 0.25


class Thread(NamedTuple):
    """Times that the training thread takes under a plan, as parts of those with DeepSpeed alone."""

    forward: float
    backward: float
    step: float


# By prefix of the fields of a `Layer`: with all parameters in GPU memory, and with parameters in host memory.
UnderPlans = Mapping[str, Thread]
# ZeRO-3 on one rank: without DeepSpeed's hooks on modules, and with lighter ones.
ONE_RANK: UnderPlans = {"planned_": Thread(0.5, 0.68, 0.32), "fetched_": Thread(0.83, 0.85, 0.38)}
# ZeRO-3 on several ranks. The issue of gathers is part of these times: a plan makes 38, and DeepSpeed 45.
SEVERAL_RANKS: UnderPlans = {"planned_": Thread(0.75, 0.97, 0.28), "fetched_": Thread(1.0, 1.08, 0.33)}
# ZeRO-1 and 2: on one rank, which reduces nothing, as recorded, and on several, from a run with two ranks that is not.
FLAT: UnderPlans = {"planned_": Thread(1.25, 0.9, 0.95)}
FLAT_SEVERAL: UnderPlans = {"planned_": Thread(1.03, 1.48, 1.2)}


def under_plans(zero_stage: int, ranks: int) -> UnderPlans:
    """Return the times of the training thread under plans, as parts of those with DeepSpeed alone."""
    of_one, of_several = (ONE_RANK, SEVERAL_RANKS) if zero_stage == 3 else (FLAT, FLAT_SEVERAL)
    return of_several if ranks > 1 else of_one


# Time in which the host launches the kernels of one expert in a loop: a dozen, 8 microseconds each.
EXPERT_ISSUE_S = 1e-4
# Time of the hooks and the gather of a matrix of one expert under ZeRO-3, without leaf modules. Qwen3-30B-A3B, whose
# layers have 384 such matrices in transformers 4, took 41 s a micro-batch on eight H100 (LlamaFactory, issue 9374)
# and 91 s on two nodes of eight A800 (ms-swift, examples/train/megatron/qwen3_moe.sh), for three passes over 18,432
# matrices.
EXPERT_MODULE_S = 0.7e-3
# Number of times that a gradient is read or written in GPU memory before its reduction: copied to the bucket,
# interleaved by ranks, and divided by the number of ranks (DeepSpeed's ``__add_grad_to_ipg_bucket`` and
# ``reduce_scatter_coalesced``. Under ZeRO-1 and 2 it is flattened instead of interleaved).
AVERAGING_PASSES = 6


# What is told of a mixture-of-experts model.
OF_EXPERTS = (
    "experts: no measured run was used for fitting, and their products may be twice as fast or slow. ZeRO-3 gathers "
    "all experts of a layer. Transformers 4 loops over experts that are gathered one by one, several times slower: use "
    "transformers 5, or name the class of the experts' block in zero_optimization.leaf_module"
)


class Rank(RankSizes):
    """One rank of a training job under ZeRO-3, with the estimate of its times and memory."""

    def workload(self) -> Workload:
        blocks = self.stage_blocks
        layers = self.layers(blocks)
        p = self.job
        micro = self.job.accumulation
        parameters = tuple(n for block in blocks for n in self.partitions(block))
        busy_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        return Workload(
            name=self.arch.name,
            layers=layers,
            subgroups=tuple(cut(parameters, self.job.sub_group_size)),
            parameters=(parameters,),
            subgroup_size=self.job.sub_group_size,
            wire_dtype=self.job.precision,
            optimizer=self.job.optimizer,
            grad_bytes_per_param=self.job.gradient_bytes,
            clip=self.job.clips,
            clip_rate=self.job.clip_rate,
            gradient_accumulation_steps=micro,
            ranks_per_node=self.layout.ranks_per_node,
            nodes=self.layout.nodes,
            stock_threads=self.job.stock_threads(self.layout.ranks_per_node),
            reduced_beside=self.reduced_beside,
            **self.bucket_params(),
            tokens_per_iteration=self.tokens * micro * p.data_parallel,
            samples_per_iteration=self.job.micro_batch * micro * p.data_parallel,
            micro_batch=p.micro_batch,
            sequence=p.sequence,
            recompute=p.recompute,
            # Each of the p - 1 other stages is ahead or behind by one micro-batch (GPipe and 1F1B).
            pipeline_idle_s=(p.pipeline_parallel - 1) * busy_s + self.loop_s,
            device_base_bytes=self.base_bytes(blocks),
            device_base_parts=self.base_parts(blocks),
            module_issue_s=self.module_issue_s if self.machine.device_kind == "cuda" else 0.0,
            **self.step_issue(len(parameters)),
            live_params=self.live_params(blocks),
            provenance=self.provenance(),
        )

    @property
    def loop_s(self) -> float:
        """Return the seconds per iteration outside forward, backward and step, such as for data and logging."""
        return 0.0 if self.machine.loop_s is None else self.machine.loop_s.median

    def layers(self, blocks: Sequence[Block]) -> tuple[Layer, ...]:
        """Return the layers of a workload, with their times and sizes, for a sequence of a model's blocks.

        Blocks with equal shapes are computed only once.
        """
        by_shape: dict[Block, Layer] = {}
        layers = []
        for block in blocks:
            shape = replace(block, name="layer") if block.attention else block
            if shape not in by_shape:
                by_shape[shape] = self.layer(shape)
            layers.append(by_shape[shape].model_copy(update={"name": block.name}))
        again = self.regathered(blocks)
        return tuple(layer.model_copy(update=fields) for layer, fields in zip(layers, again, strict=True))

    def gathers(self, blocks: Sequence[Block]) -> Gathered:
        """Return how often DeepSpeed gathers each parameter, by index of its block and index within the block."""
        tensor, recompute = self.job.tensor_parallel, self.job.recompute
        whole = tuple(partitions_of(block.params, block.split, tensor, 1) for block in blocks)
        again = tuple(recompute and bool(block.attention) for block in blocks)
        return _gathers(whole, again, self.job.gather_rules)

    def regathered(self, blocks: Sequence[Block]) -> list[dict[str, int]]:
        """Return how many parameter elements of each block stay gathered, and how many backward gathers again.

        Returns:
            For each block, the fields `persistent_params` and `regathered_params` of its `Layer`. No fields below
            ZeRO-3.
        """
        if self.job.zero_stage < 3:
            return [{}] * len(blocks)
        gathers = self.gathers(blocks)
        return [
            gathers.of_layer(((number, i), n) for i, n in enumerate(self.partitions(block)))
            for number, block in enumerate(blocks)
        ]

    def live_params(self, blocks: Sequence[Block]) -> int | None:
        """Return the most parameter elements that ZeRO-3 gathers at once, for one data-parallel rank."""
        # The result is None below ZeRO-3. It is also None with several data-parallel ranks, because `base_bytes`
        # already includes their gathered parameters.
        if self.job.zero_stage < 3 or self.job.data_parallel > 1:
            return None
        return self.gathers(blocks).live

    def step_issue(self, parameters: int) -> dict[str, float]:
        """Return the fields of a workload with the time that the host spends in ``step()`` before the first update."""
        if self.machine.device_kind != "cuda":
            return {}
        seconds = parameters * self.step_issue_s
        under = {f"{kind}step_issue_s": thread.step * seconds for kind, thread in self.under_plans.items()}
        return {"step_issue_s": seconds, **under}

    @property
    def step_issue_s(self) -> float:
        """Return the seconds that ``step()`` spends on one parameter in Python before the first update."""
        return STEP_ISSUE_S

    @property
    def under_plans(self) -> UnderPlans:
        return under_plans(self.job.zero_stage, self.job.data_parallel)

    def layer(self, block: Block) -> Layer:
        gathered, reduced = self.network_bytes(block)
        under: dict[str, Any] = {}
        for kind, thread in self.under_plans.items():
            under[f"{kind}forward_s"] = self.forward_s(block, thread.forward)
            under[f"{kind}backward_s"] = self.backward_s(block, thread.forward, thread.backward)
        return Layer(
            name=block.name,
            params=sum(self.partitions(block)),
            forward_s=self.forward_s(block),
            backward_s=self.backward_s(block),
            unhidden_s=self.unhidden_s(block),
            activation_bytes=self.activation_bytes(block),
            network_gather_bytes=gathered,
            network_reduce_bytes=reduced,
            **under,
        )

    @cached_property
    def device(self) -> GpuSpeed:
        """Return the FLOP/s and memory bandwidth of a training job's GPU, together with the job's settings, as a
        `GpuSpeed`.

        The settings decide how long the GPU computes on a block of the model: precision, kernels, attention and tensor
        parallelism.
        """
        p = self.job
        return GpuSpeed.of(
            self.machine,
            self.wire,
            tensor_parallel=p.tensor_parallel,
            flash=p.flash_attention,
            flash_version=p.flash_version,
            kernels=p.kernels,
            fused_loss=p.fused_loss,
        )

    @cached_property
    def shape(self) -> BatchShape:
        """Return a micro-batch's tokens, tokens per sequence, and the model's hidden size and number of heads."""
        return BatchShape(self.arch.hidden, self.arch.heads, self.tokens, self.job.sequence)

    def device_s(self, block: Block) -> float:
        """Return the seconds that the GPU computes on a block's forward for one micro-batch."""
        return self.device.seconds(block, self.shape, FORWARD) + self.tensor_exchange_s(block)

    def device_backward_s(self, block: Block) -> float:
        """Return the seconds of a block's backward on the GPU for one micro-batch, including recomputation."""
        computed = self.device.seconds(block, self.shape, BACKWARD) + 2 * self.tensor_exchange_s(block)
        return computed + self.again(block) * self.device_s(block)

    def forward_s(self, block: Block, issued: float = 1.0) -> float:
        """Return the seconds of a block's forward for one micro-batch, for a block such as a transformer layer."""
        # Computation on the GPU, gathers of parameters inside the node, and the host's kernel launches overlap.
        return overlapped_s(run_ahead_s(self.device_s(block), issued * self.issue_s(block)), self.parameters_s(block))

    def backward_s(self, block: Block, again: float = 1.0, issued: float = 1.0) -> float:
        """Return the seconds of a block's backward for one micro-batch, for a block such as a transformer layer."""
        # Computation on the GPU, gathers and reductions inside the node, and the host's kernel launches overlap.
        exposed = (1 - self.reduced_beside) * self.reduce_s(block)
        return overlapped_s(*self._backward_parts_s(block, again, issued)) + self.averaging_s(block) + exposed

    def _backward_parts_s(self, block: Block, again: float = 1.0, own: float = 1.0) -> tuple[float, float]:
        issued = own * self.issue_backward_s(block) + again * self.again(block) * self.issue_s(block)
        beside_s = self.parameters_s(block) + self.reduced_beside * self.reduce_s(block)
        return run_ahead_s(self.device_backward_s(block), issued), beside_s

    def unhidden_s(self, block: Block) -> float:
        """Return the seconds that are added to a block's backward if stock DeepSpeed keeps parameters in host memory.

        With several ranks, gathers and reductions then do not overlap computation. Each rank copies its part to the
        GPU before a gather, and the host launches no kernels until the copy ends. The copy waits for the previous
        gather (``_all_gather_dtype``). That follows a reduction on the same NCCL stream, which waits for backward.
        With a single rank, such copies do not block (``NoGatherCoalescedHandle``).
        """
        if self.job.zero_stage < 3 or self.job.data_parallel == 1:
            return 0.0
        parts = self._backward_parts_s(block)
        return sum(parts) - overlapped_s(*parts)

    def averaging_s(self, block: Block) -> float:
        """Return the seconds that a gradient reduction takes to read and write a block's gradients in GPU memory."""
        size = self.whole_elements(block) * self.job.gradient_bytes
        return AVERAGING_PASSES * size / self.machine.rate("device_memory_bytes_per_s")

    @property
    def reduced_beside(self) -> float:
        """Return the fraction of the time of gradient reductions that overlaps with backward.

        NCCL runs gathers and reductions in the order of their launch, because both belong to one process group. So
        backward waits for a gather that waits for a reduction. Meanwhile, it goes on only with prefetched parameters
        (``__reduce_and_partition_ipg_grads`` and ``PartitionedParameterCoordinator.fetch_sub_module``).
        """
        if not self.job.overlaps_comm:
            return 0.0
        ahead, bucket = self.job.prefetch_bucket_elements, self.job.reduce_bucket_elements
        return min(1.0, ahead / max(1, bucket))

    def bucket_params(self) -> dict[str, int]:
        """Return the fields of a workload that contain the size of DeepSpeed's gradient bucket, as a dict."""
        # The sizes are numbers of elements: one for DeepSpeed alone, and one for training under a plan. Under ZeRO-3
        # they are divided by the number of data-parallel ranks, because the workload's layers count only one rank's
        # share of the parameters.
        planned = None if self.job.names_bucket else planned_bucket(self.layout.gpus)
        ranks = self.job.data_parallel if self.job.zero_stage == 3 else 1
        return bucket_fields(self.job.reduce_bucket_elements, planned, ranks)

    def issue_s(self, block: Block) -> float:
        """Return the seconds that the host needs to launch the kernels of a block's forward."""
        own = self.module_issue_s * (MODULES_OF_A_LAYER if block.attention else 1)
        alone = block.experts.modules * EXPERT_MODULE_S if block.experts and self.job.data_parallel > 1 else 0.0
        return own + alone + self.loop_over_experts_s(block)

    def issue_backward_s(self, block: Block) -> float:
        """Return the host's seconds to launch a block's backward, with the hooks that reduce its gradients."""
        return ISSUED_BACKWARD * self.issue_s(block)

    def loop_over_experts_s(self, block: Block) -> float:
        """Return the host's seconds to launch the kernels of each expert, if no grouped kernel computes all experts."""
        if block.experts is None or self.job.kernels != "eager":
            return 0.0
        return EXPERT_ISSUE_S * min(block.experts.count, self.tokens * block.experts.per_token)

    @property
    def module_issue_s(self) -> float:
        """Return the host's seconds to launch the forward of one module (such as a projection) of a layer."""
        issue = self.machine.layer_issue_s
        return MODULE_ISSUE_S if issue is None else issue.median / MODULES_OF_A_LAYER

    def parameters_s(self, block: Block) -> float:
        """Return the seconds of gathering a block's parameters for one forward or backward."""
        return self.links.gather_s(self.whole_elements(block) * self.wire, self.layout.ring_in_node)

    def reduce_s(self, block: Block) -> float:
        """Return the seconds of reducing (summing) a block's gradients of one micro-batch over the ranks."""
        return self.links.reduce_s(self.whole_elements(block) * self.job.gradient_bytes, self.layout.ring_in_node)

    def tensor_exchange_s(self, block: Block) -> float:
        """Return the seconds of tensor parallelism's two all-reduces in a layer's forward. 0 for embedding and head.

        If a tensor-parallel group has ranks on several nodes, the all-reduces use the network.
        """
        if not block.attention:
            return 0.0
        tensor, cut = self.job.tensor_parallel, self.layout.tensor_groups_cut
        most = self.machine.rate("network_bytes_per_s") / cut if cut else math.inf
        share = self.links.share(min(tensor, self.machine.gpus_per_node))
        rates = (share * self.links.reduce_bytes_per_s, share * self.links.gather_bytes_per_s)
        return 2 * sum(ring_s(self.exchanged_bytes, tensor, min(rate, most)) for rate in rates)

    @property
    def exchanged_bytes(self) -> int:
        """Return the bytes of a micro-batch's activations that an all-reduce of tensor parallelism sums over ranks."""
        return self.tokens * self.arch.hidden * self.wire

    def network_bytes(self, block: Block) -> tuple[int, int]:
        """Return a rank's share of the bytes that ZeRO brings into the rank's node over the network for one block."""
        part = self.layout.entering_bytes(self.whole_elements(block))
        beside = self.exchange_beside_bytes(block) if part else 0.0
        return int(part * self.wire + beside), int(part * self.job.gradient_bytes)

    def exchange_beside_bytes(self, block: Block) -> float:
        """Return the network bytes that a block's tensor-parallel exchanges bring into a node, per rank and pass.

        They compete with ZeRO's gathers. The mean of forward and backward is returned for either pass.
        """
        if not block.attention:
            return 0.0
        once = 2 * 2 * passed_on(self.exchanged_bytes, self.job.tensor_parallel)
        passes = 1 + (2 + self.again(block))  # as in `device_s` and `device_backward_s`
        return once * passes / 2 * self.layout.tensor_groups_cut / self.layout.ranks_per_node

    @property
    def links(self) -> Links:
        return Links.of(self.machine)

    def provenance(self) -> str:
        notes = [f"estimated from the config of {self.arch.name}, sequence {self.job.sequence}"]
        notes += self.job.estimate_notes
        if any(block.experts for block in self.stage_blocks):
            notes.append(OF_EXPERTS)
        if self.job.pipeline_parallel > 1:
            notes.append(
                f"of {self.job.pipeline_parallel} pipeline stages, only stage {self.job.stage} is simulated. The last "
                "stage also has the head, so it may take longer and need more memory"
            )
        if self.job.tensor_parallel > 1 and LINK not in self.machine.other_rates:
            notes.append(f"tensor-parallel exchange over PCIe: no {LINK} in machine.other_rates")
        ring = self.machine.gather_bytes_per_s
        if self.layout.ring_in_node > 1 and LINK not in self.machine.other_rates and ring and ring.source == "assumed":
            notes.append(
                f"collectives over PCIe: all-gathers of {ring.median / 1e9:.3g} GB/s are assumed, and machines of this "
                "kind differ by a factor of 2.5: `tune profile --ranks` measures them"
            )
        if self.layout.tensor_groups_cut:
            notes.append(
                f"tensor-parallel exchange over the network: {self.job.tensor_parallel} ranks do "
                f"not fit into nodes of {self.machine.gpus_per_node} GPUs"
            )
        return "; ".join(notes)


@lru_cache(maxsize=64)
def _gathers(blocks: tuple[tuple[int, ...], ...], recomputed: tuple[bool, ...], rules: GatherRules) -> Gathered:
    # DeepSpeed's rules work on modules.
    modules: list[list[Module]] = [
        [(), *([((number, i), n)] for i, n in enumerate(params))] for number, params in enumerate(blocks)
    ]
    played = [module for block in modules for module in block]
    played.append(())
    for block, again in zip(reversed(modules), reversed(recomputed), strict=True):
        played += [*(block if again else ()), *reversed(block)]
    return gathered(played, rules)


ALIGNMENT_BYTES = 16  # alignment of the beginning of each parameter, if parameter_alignment is given
# Time in which the host launches the kernels of a layer's forward: 15 fused kernels or 60 of PyTorch's own, 6 to 10
# microseconds each.
ISSUE_S: Mapping[Kernels, float] = {"fused": 0.15e-3, "eager": 0.5e-3}
START_ALIGNMENT = 2  # elements: alignment of the beginning of each rank's slice (nccl_start_alignment_factor)


class FlatRank(Rank):
    """One rank of a training job under ZeRO-1 or 2, with the estimate of its times and memory.

    A rank has all parameters, and a slice of the optimizer state. DeepSpeed concatenates all parameters of a group, and
    gives each rank a slice of equal size. Gradients are all-reduced bucket by bucket. Updated parameters are gathered
    only at the end of a step. The estimate is for the first rank: backward completes the gradients of its layers last,
    and all ranks wait for it at the gradient norm. Source: ``deepspeed/runtime/zero/stage_1_and_2.py``,
    DeepSpeedZeroOptimizer.
    """

    def workload(self) -> Workload:
        made = super().workload()
        flat = self._laid_out()
        size = self.slice_elements(sum(elements for _, elements in flat))
        counts = [0] * len(made.layers)
        left = size
        for layer, elements in flat:
            counts[layer] += min(left, elements)
            left -= min(left, elements)
        others = [
            0 if self.job.round_robin else whole - own for whole, own in zip(self._whole(flat), counts, strict=True)
        ]
        counts[-1] += left  # the padding of the slice is counted with the last layer
        layers = [
            layer.model_copy(update={"params": own, "params_of_others": other})
            for layer, own, other in zip(made.layers, counts, others, strict=True)
        ]
        waiting = self.waiting_bytes(made)
        fields = {
            "layers": tuple(layers),
            "subgroups": tuple(cut_flat([size], self.job.sub_group_size)),
            "parameters": ((size,),),
            "zero_stage": self.job.zero_stage,
            "module_issue_s": made.module_issue_s and ISSUE_S[self.job.kernels] / MODULES_OF_A_LAYER,
            "step_gather_s": self.links.gather_s(size * self.job.data_parallel * self.wire, self.layout.ring_in_node),
            "network_step_gather_bytes": int(self.layout.entering_bytes(made.params * self.wire)),
            "device_base_bytes": made.device_base_bytes + waiting,
            "device_base_parts": {**made.device_base_parts, "gradients": waiting},
        }
        return Workload.model_validate({**dict(made), **fields})

    def _whole(self, flat: Sequence[tuple[int, int]]) -> list[int]:
        counts = [0] * len(self.stage_blocks)
        for layer, elements in flat:
            counts[layer] += elements
        return counts

    def _laid_out(self) -> list[tuple[int, int]]:
        found = [(layer, n) for layer, block in enumerate(self.stage_blocks) for n in self.partitions(block)]
        if self.job.round_robin:
            ranks = self.job.data_parallel
            found = [parameter for rank in range(ranks) for parameter in found[rank::ranks]]
        if self.job.aligned:
            step = ALIGNMENT_BYTES // self.wire
            found = [*((layer, math.ceil(n / step) * step) for layer, n in found[:-1]), found[-1]]
        return found

    def slice_elements(self, elements: int) -> int:
        """Return the number of elements in each rank's slice of DeepSpeed's flat buffer for ZeRO-1 and 2."""
        ranks = self.job.data_parallel
        return math.ceil(elements / (START_ALIGNMENT * ranks)) * START_ALIGNMENT

    # -- what differs from ZeRO-3 ------------------------------------------------------------

    def issue_s(self, block: Block) -> float:
        """Return the host's seconds to launch a block's forward under ZeRO-1 or 2, which have no hooks of ZeRO-3."""
        own = ISSUE_S[self.job.kernels] * (1 if block.attention else 1 / MODULES_OF_A_LAYER)
        return own + self.loop_over_experts_s(block)

    def issue_backward_s(self, block: Block) -> float:
        """Return the seconds with hooks on gradients, which ZeRO-1 reduces only in the last micro-batch."""
        micro = self.job.accumulation if self.job.zero_stage == 1 else 1
        return super().issue_backward_s(block) + GRADIENT_HOOK * self.module_issue_s * len(block.params) / micro

    @property
    def step_issue_s(self) -> float:
        return FLAT_STEP * STEP_ISSUE_S

    def partitions(self, block: Block) -> tuple[int, ...]:
        """Return, as a tuple, how many elements of each parameter of a block a rank holds under ZeRO-1 or 2."""
        tensor = self.job.tensor_parallel
        return tuple(math.ceil(n / tensor) if split else n for n, split in zip(block.params, block.split, strict=True))

    def whole_elements(self, block: Block) -> int:
        return sum(self.partitions(block))

    def gathered_elements(self, blocks: Sequence[Block]) -> int:
        return 0

    def parameters_s(self, block: Block) -> float:
        return 0.0

    def reduce_s(self, block: Block) -> float:
        """Return the seconds per micro-batch of reducing (summing) a block's gradients over the ranks.

        ZeRO-1 reduces once per step. The time of this reduction is divided by the number of micro-batches.
        """
        size = self.whole_elements(block) * self.job.gradient_bytes
        once = self.links.all_reduce_s(size, self.layout.ring_in_node)
        micro = self.job.accumulation if self.job.zero_stage == 1 else 1
        return once / micro

    @property
    def reduced_beside(self) -> float:
        """Return the fraction of the time of gradient reductions over the ranks that overlaps with backward."""
        return float(self.job.overlaps_comm and self.job.zero_stage > 1)

    def network_bytes(self, block: Block) -> tuple[int, int]:
        """Return a rank's share of the bytes that enter its node over the network for one block of the model."""
        size = self.whole_elements(block) * self.job.gradient_bytes
        return 0, int(2 * self.layout.entering_bytes(size))

    def bucket_bytes(self, held: int) -> int:
        """Return the bytes of DeepSpeed's gradient bucket and of the flattened copy that is all-reduced, together."""
        return 2 * self._made_bytes * min(self.job.reduce_bucket_elements, held)

    @property
    def _made_bytes(self) -> int:
        return max(self.wire, self.job.gradient_bytes) if self.job.zero_stage == 1 else self.wire

    def waiting_bytes(self, made: Workload) -> int:
        """Return the bytes that gradients add to the GPU memory peak of a backward, because they wait for their
        reduction.

        The bytes are the sum of two parts. One is a buffer for the largest parameter's gradient. The other depends on
        the ZeRO stage and on the number of micro-batches:

        - ZeRO-2: the gradients of the rank's slice, but only if they are accumulated in a wider data type than the
          parameters'.
        - ZeRO-1 with several micro-batches in a step: all gradients, because they stay until the single reduction of
          the step. If they are accumulated in a wider data type, they count in both types.
        - ZeRO-1 with one micro-batch in a step: the peak of gradients and activations together, minus the peak of the
          activations alone. This is less than all gradients, because backward frees activations while gradients appear.
        """
        largest = max(n for block in self.stage_blocks for n in self.partitions(block))
        buffer = self._made_bytes * largest
        if self.job.zero_stage > 1:
            added = self.job.gradient_bytes if self.job.gradient_bytes > self.wire else 0
            return buffer + added * self.slice_elements(made.params)
        whole = [self.whole_elements(block) for block in self.stage_blocks]
        gradients = [self.wire * n for n in whole]
        wider = self._made_bytes * sum(whole) if self._made_bytes > self.wire else 0
        if self.job.accumulation > 1:
            return buffer + sum(gradients) + wider
        held = [0, *accumulate(layer.activation_bytes for layer in made.layers)]
        behind = [0, *accumulate(reversed(gradients))]
        peak = max(before + done for before, done in zip(held, reversed(behind), strict=True))
        return buffer + max(peak, wider) - held[-1]
