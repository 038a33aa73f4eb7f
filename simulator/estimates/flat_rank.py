"""The estimate of one rank's times and memory in training under ZeRO-1 or 2.

Under these stages a rank has all parameters, and a slice of the optimizer state. DeepSpeed concatenates all
parameters of a group, and gives each rank a slice of equal size. The estimate is for the first rank:
backward completes the gradients of its layers last, and all ranks wait for it at the gradient norm. Source:
``deepspeed/runtime/zero/stage_1_and_2.py``, DeepSpeedZeroOptimizer.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ebbtide.simulator.estimates.compute import Kernels
from ebbtide.simulator.estimates.models.blocks import Block
from ebbtide.simulator.estimates.rank import MODULES_OF_A_LAYER, Rank
from ebbtide.simulator.subgroups import cut_flat
from ebbtide.simulator.workload import Workload

ALIGNMENT_BYTES = 16  # alignment of the beginning of each parameter, if parameter_alignment is given
# Time in which the host launches the kernels of a layer's forward: 15 fused kernels or 60 of PyTorch's own, 6 to 10
# microseconds each.
ISSUE_S: Mapping[Kernels, float] = {"fused": 0.15e-3, "eager": 0.5e-3}
START_ALIGNMENT = 2  # elements: alignment of the beginning of each rank's slice (nccl_start_alignment_factor)


class FlatRank(Rank):
    """One rank of a training job under ZeRO-1 or 2, with the estimate of its times and memory.

    Gradients are all-reduced bucket by bucket. Updated parameters are gathered only at the end of a step.
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
