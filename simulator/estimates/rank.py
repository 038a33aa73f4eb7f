"""An estimate of one rank in a training job under ZeRO-3: the times of its layers, and the bytes that it receives from
other nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from ebbtide.simulator.estimates.collectives import LINK, Links, passed_on, ring_s
from ebbtide.simulator.estimates.compute import BACKWARD, FORWARD, Device, Shape, overlapped_s, run_ahead_s
from ebbtide.simulator.estimates.models.blocks import Block
from ebbtide.simulator.estimates.rank_sizes import RankSizes, partitions_of
from ebbtide.simulator.schedules.buckets import bucket_fields, planned_bucket
from ebbtide.simulator.schedules.gathers import Gathered, GatherRules, Module, gathered
from ebbtide.simulator.subgroups import cut
from ebbtide.simulator.workload import Layer, Workload

# Time in which the host issues a layer's backward without recomputation, divided by that of its forward: one gradient
# for each input of a product and for each weight, and the hooks of the reduction. On an H200, both bound by the host, a
# forward of 94 ms had backwards of 182 to 194 ms in the fast iterations (`studies/results/h200`).
ISSUED_BACKWARD = 1.8
# Time of a layer's forward and backward, and of one parameter in `step()`, that is left to the host without DeepSpeed's
# module hooks, as a part of the time with them (`python -m studies.training_thread`, measured on a CPU).
BARE_FORWARD, BARE_BACKWARD, BARE_STEP = 0.5, 0.68, 0.32
# Time that `step()` spends on one parameter in DeepSpeed's Python code before the first update: 36 ms for the 317
# parameters of the H200's run.
STEP_ISSUE_S = 1.1e-4
MODULES_OF_A_LAYER = 12
MODULE_ISSUE_S = 1.5e-4  # for machines without this value. DeepSpeed's hooks take 0.1 to 0.2 ms
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
        """Return the seconds per iteration that training spends outside forward, backward and step, such as for data
        and logging.
        """
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
        """Return how often DeepSpeed gathers each parameter in a forward and its backward.

        The result is keyed by parameter. A key is a pair: the index of the parameter's block, and the parameter's
        index within the block.
        """
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
        """Return the largest number of parameter elements that ZeRO-3 gathers at once, for a job with one data-parallel
        rank.
        """
        # The result is None below ZeRO-3. It is also None with several data-parallel ranks, because `base_bytes`
        # already includes their gathered parameters.
        if self.job.zero_stage < 3 or self.job.data_parallel > 1:
            return None
        return self.gathers(blocks).live

    def step_issue(self, parameters: int) -> dict[str, float]:
        """Return the fields of a workload with the time that the host spends in ``step()`` before the first update.

        They are empty below ZeRO-3, which releases no parameters in ``step()``.
        """
        if self.job.zero_stage < 3 or self.machine.device_kind != "cuda":
            return {}
        seconds = parameters * STEP_ISSUE_S
        return {"step_issue_s": seconds} | ({"bare_step_issue_s": BARE_STEP * seconds} if self.goes_bare else {})

    @property
    def goes_bare(self) -> bool:
        """Return True if a plan can take off DeepSpeed's module hooks, because the rank holds whole parameters."""
        return self.job.zero_stage == 3 and self.job.data_parallel == 1

    def layer(self, block: Block) -> Layer:
        gathered, reduced = self.network_bytes(block)
        bare = {}
        if self.goes_bare:
            bare = {
                "bare_forward_s": self.forward_s(block, BARE_FORWARD),
                "bare_backward_s": self.backward_s(block, BARE_FORWARD, BARE_BACKWARD),
            }
        return Layer(
            name=block.name,
            params=sum(self.partitions(block)),
            forward_s=self.forward_s(block),
            backward_s=self.backward_s(block),
            unhidden_s=self.unhidden_s(block),
            activation_bytes=self.activation_bytes(block),
            network_gather_bytes=gathered,
            network_reduce_bytes=reduced,
            **bare,
        )

    @cached_property
    def device(self) -> Device:
        """Return the FLOP/s and memory bandwidth of a training job's GPU, together with the job's settings, as a
        `Device`.

        The settings decide how long the GPU computes on a block of the model: precision, kernels, attention and tensor
        parallelism.
        """
        p = self.job
        return Device.of(
            self.machine,
            self.wire,
            tensor_parallel=p.tensor_parallel,
            flash=p.flash_attention,
            flash_version=p.flash_version,
            kernels=p.kernels,
            fused_loss=p.fused_loss,
        )

    @cached_property
    def shape(self) -> Shape:
        """Return a micro-batch's tokens, tokens per sequence, and the model's hidden size and number of heads."""
        return Shape(self.arch.hidden, self.arch.heads, self.tokens, self.job.sequence)

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
        issued = (ISSUED_BACKWARD * own + self.again(block) * again) * self.issue_s(block)
        beside_s = self.parameters_s(block) + self.reduced_beside * self.reduce_s(block)
        return run_ahead_s(self.device_backward_s(block), issued), beside_s

    def unhidden_s(self, block: Block) -> float:
        """Return the seconds that are added to a block's backward if stock DeepSpeed keeps parameters in host memory.

        With parameters in GPU memory, gathers and reductions overlap computation. With parameters in host memory and
        several ranks they do not, because of a chain of waits:

        - Before a module's parameters are gathered, each rank copies its part of them to the GPU with a blocking copy.
          The host launches no further kernels until this copy has ended.
        - The copy waits for the previous gather (``_all_gather_dtype``).
        - In backward, the previous gather follows a gradient reduction on the same NCCL stream.
        - The reduction waits for the backward that computes its gradients.

        With a single rank, such copies do not block (``NoGatherCoalescedHandle``), and the result is 0.
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

        The fraction is the size of the prefetch bucket divided by the size of the reduction bucket, at most 1. The
        reason: NCCL runs gathers and reductions in the order of their launch, because both belong to one process group.
        So a gather that is launched after a reduction waits for the reduction, and backward waits for the gather.
        Meanwhile, backward goes on only with parameters that were prefetched (DeepSpeed,
        ``__reduce_and_partition_ipg_grads`` and ``PartitionedParameterCoordinator.fetch_sub_module``).

        The result is 0 if the job does not overlap communication with backward.
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

    def loop_over_experts_s(self, block: Block) -> float:
        """Return the host's seconds to launch the kernels of each expert, if no grouped kernel computes all experts."""
        if block.experts is None or self.job.kernels != "eager":
            return 0.0
        return EXPERT_ISSUE_S * min(block.experts.count, self.tokens * block.experts.per_token)

    @property
    def module_issue_s(self) -> float:
        """Return the seconds that the host needs to launch the forward kernels of one module (such as a projection) of
        a layer.
        """
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
        """Return the bytes that a block's tensor-parallel exchanges bring into a node over the network, per rank and
        pass.

        These exchanges compete with ZeRO's gathers for the network. Forward and backward bring different numbers of
        bytes. The mean of the two is returned for either pass.
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
        notes += self.job.told
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
