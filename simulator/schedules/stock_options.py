"""The options that distinguish DeepSpeed's strategies of ZeRO-3 offload, such as Twin-Flow and SuperOffload.

The module also has the costs of the strategies' work in memory traffic and time, such as for the conversion of
gradients to fp32. The costs are those of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ebbtide.simulator.optimizer import ADAM, FP32_BYTES
from ebbtide.simulator.rules import RuleError

# Host memory per parameter, in addition to the optimizer's state.
HOST_GRADIENT_BYTES = 2 * FP32_BYTES  # `.grad` and the gradient partition buffer
# DRAM traffic of DeepSpeed's passes in host memory, without the reads and writes of the state: unscaling 8, the
# gradient that the update reads 4, conversion to 16 bits 8.
STOCK_PASS_BYTES = 20
FP64_BYTES = 8
# Number of times that DRAM is read or written: into the driver's staging buffer, out of it, and by the link.
PAGEABLE_PASSES = 3
# The same if unpinned memory was allocated for this copy: the kernel also zeroes its pages, and the cache line that is
# written is read first.
FRESH_PASSES = PAGEABLE_PASSES + 2
WIDENING_BYTES = 10  # DRAM traffic: 2 bytes read, and 4 written after the cache line was read
# Seconds per element on one thread. PyTorch's check for infinities and NaNs (``isinf``, ``isnan``, each with ``any``)
# and its conversion of bf16 to fp32 are limited by computation, not by memory. Measured on an AMD EPYC (Zen 5, torch
# 2.13). Older cores take longer. Conversions of fp16 are limited by memory.
OVERFLOW_CHECK_S: Mapping[str, float] = {"fp16": 3.6e-9, "bf16": 4.0e-9, "fp32": 4.0e-9}
WIDENING_S: Mapping[str, float] = {"bf16": 1.6e-9}
# DRAM traffic of the check per 16-bit element: the buffer is read four times. Its absolute values and two masks are
# written (after their cache lines were read), and read once.
OVERFLOW_CHECK_BYTES = 16
# GPU memory traffic of the kernels after the reductions: the norm in float64 (2 read, 8 written and read), and the
# conversion to fp32 (2 read, 4 written).
GRADIENT_KERNEL_BYTES = 18 + 6
# Backward's matrix products that a parameter's gradient stream waits for, as a share of the three products of its
# backward. The small kernels of the stream start when the running product ends, so they wait for half a product on
# average, twice per parameter: before the reduction, and after the copies.
PRODUCTS_WAITED_FOR = 2 * 0.5 / 3
# Time of torch's own Adam divided by that of DeepSpeedCPUAdam: PyTorch runs a dozen ops one after the other, two of
# them into fresh memory. DeepSpeed's documentation says 5 to 7 times (deepspeed.ai/tutorials/zero-offload), and its
# pull request 735 reports 56 s instead of 8.2 s. One core of an AMD EPYC took 10 times as long (torch 2.13).
TORCH_ADAM_PASSES = 6
# DRAM traffic of one update by DeepSpeedCPUAdam: the state, read and written, and the gradient, read.
ADAM_BYTES = 2 * ADAM.state_bytes + FP32_BYTES
Updates = Literal["sequential", "interleaved", "with_backward"]
OverflowCheck = Literal["host", "host_fp16", "device"]


@dataclass(frozen=True, slots=True)
class StockOptions:
    """The options that distinguish the offload strategies of DeepSpeed's ZeRO-3 from one another.

    Attributes:
        pinned: True if the host buffers of gradients are pinned. In all versions of ZeRO-3 a gradient is copied three
            times: to a 16-bit host buffer, back to the GPU, and to an fp32 host buffer. If the buffers are not pinned
            (the default before DeepSpeed 0.19.5), backward waits for each copy.
        async_gradients: True if the GPU converts gradients to fp32, and the copies run on the stream of the reductions
            while backward of the next layers runs (DeepSpeed 0.19.8, and ``part_grads_async`` of Deep Optimizer
            States). False if training waits for the last copy, and the host converts through newly allocated unpinned
            memory (DeepSpeed before 0.19.5: ``copy_`` of a 16-bit GPU tensor to an fp32 host tensor).
        measured_copies: True to use a profile's time of the copies, if it has one and they are pinned and asynchronous.
        updates: Order of updates. ``sequential``: one subgroup after the other, with its copies, in the step.
            ``interleaved``: CPU updates, copies and updates on the GPU run at the same time, in the step.
            ``with_backward``: the CPU update of a subgroup starts when its gradient is in host memory. Only the copy of
            new parameters to the GPU is left for the step.
        host_ratio: Fraction of the subgroups with state in host memory (Twin-Flow's ``ratio``). DeepSpeed keeps the
            first subgroups in GPU memory.
        stride: ``n`` if the GPU updates every ``n``-th of the subgroups in host memory. 0 if it updates none of them.
        staging_slots: Number of staging buffers. Each is GPU memory for the state of one subgroup.
        result_copy: True if another process does the CPU updates, so that new masters are copied once more.
        pageable_parameters: True if parameters are converted into newly allocated unpinned memory and copied from
            there, as DeepSpeed does for any value of ``pin_memory``.
        torch_adam: True if torch's own Adam updates on the CPU (``optimizer.params.torch_adam``, or a client's
            optimizer with ``zero_force_ds_cpu_optimizer`` off) instead of DeepSpeedCPUAdam.
        overflow_check: Place where ZeRO-3 looks for infinities and NaNs in gradients before the norm. ``device``: on
            the GPU, while backward runs (DeepSpeed before 0.9.4). ``host``: in the host's 16-bit buffer (0.9.4 to
            0.11.1). ``host_fp16``: like ``host``, but only for fp16 (since 0.11.2). Source: ``has_overflow`` and
            ``_overflow_check_and_loss_scale_update`` of ``deepspeed/runtime/zero/stage3.py``.
    """

    pinned: bool = True
    async_gradients: bool = True
    measured_copies: bool = True
    updates: Updates = "sequential"
    host_ratio: float = 1.0
    stride: int = 0
    staging_slots: int = 1
    result_copy: bool = False
    pageable_parameters: bool = True
    torch_adam: bool = False
    overflow_check: OverflowCheck = "host_fp16"

    def __post_init__(self) -> None:
        if not 0 <= self.host_ratio <= 1:
            raise RuleError(
                "ratio (fraction of the subgroups with optimizer state in host memory) must lie in [0, 1], but got "
                f"{self.host_ratio}",
                key="options.ratio",
            )
        if not (isinstance(self.stride, int) and self.stride >= 0):
            raise RuleError(
                "stride must be 0 (no staged updates) or a whole number >= 1 (every stride-th subgroup "
                f"is staged to the GPU), but got {self.stride}",
                key="options.stride",
            )
        if self.staging_slots < 1:
            raise RuleError(f"staging_slots must be >= 1, but got {self.staging_slots}", key="options.staging_slots")
