"""Measurements of the speed of Adam updates, in parameters per second.

Measured are ebbtide's fused CPU kernel, the CPU update of DeepSpeed without ebbtide, and the GPU kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ebbtide.profiler.rates.sampling import doubts, noise, rate, repeat_s, timed_s
from ebbtide.runtime.hardware.pages import own_pages
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.adam import AdamStep
from ebbtide.simulator.quantity import Quantity

STEP = AdamStep(1e-4, 0.9, 0.999, 1e-8, 0.1, 0.1, 1.0)
_STOCK_OPTIMIZER = 1_000_003  # an id that no other DeepSpeedCPUAdam of this process has


class AdamBuffers:
    """Host or GPU buffers for timing an Adam update: a subgroup's optimizer state, a bf16 gradient and a parameter."""

    def __init__(self, elements: int, device: str = "cpu") -> None:
        self.state = [noise(elements, device) for _ in range(3)]
        self.gradient = noise(elements, device).sub_(0.5).bfloat16()
        self.wire = torch.zeros(elements, dtype=torch.bfloat16, device=device)

    def host_update(self, threads: int, source: Sequence[torch.Tensor] | None = None) -> None:
        host.host_update(self.state, self.gradient, self.wire, STEP, 0.5, threads, source=source)


def _as_the_runtime_has_them(elements: int) -> AdamBuffers:
    buffers = AdamBuffers(elements)
    if torch.cuda.is_available():
        *buffers.state, buffers.gradient, buffers.wire = (
            own_pages(elements, plain.dtype).copy_(plain) for plain in (*buffers.state, buffers.gradient, buffers.wire)
        )
    return buffers


def host_adam_by_threads(elements: int, counts: list[int], budget_s: float) -> tuple[dict[int, Quantity], list[str]]:
    """Measure how many parameters per second the fused CPU kernel updates with each number of threads.

    Returns:
        Rate by number of threads, and sentences that name unstable measurements.
    """
    buffers = _as_the_runtime_has_them(elements)
    rates: dict[int, Quantity] = {}
    notes: list[str] = []
    for threads in counts:

        def update(threads: int = threads) -> None:
            buffers.host_update(threads)

        durations = repeat_s(update, budget_s / len(counts))
        detail = f"fused kernel, {elements} elements, {threads} threads"
        rates[threads] = rate(elements, durations, "measured", detail)
        notes += doubts(f"host Adam with {threads} threads", durations)
    return rates, notes


def host_adam_out_of_place(elements: int, threads: int, budget_s: float) -> Quantity:
    """Measure the speed of CPU updates that write new state to other buffers, divided by the speed of updates in place.

    Updates of both kinds alternate.
    """
    buffers, spare = (_as_the_runtime_has_them(elements) for _ in range(2))
    ratios: list[float] = []

    def both() -> None:
        in_place_s = timed_s(lambda: buffers.host_update(threads))
        ratios.append(in_place_s / timed_s(lambda: spare.host_update(threads, buffers.state)))

    repeat_s(both, budget_s)
    return Quantity.from_samples(ratios[1:], "measured", f"{elements} elements, {threads} threads")


def stock_ops() -> Any:
    """Return the compiled operator of DeepSpeedCPUAdam. The first build takes about a minute."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load()


def stock_host_adam(elements: int, budget_s: float, threads: int | None = None) -> Quantity:
    """Measure the CPU update of DeepSpeed without ebbtide, in parameters per second.

    The measured passes are unscaling the gradient, DeepSpeedCPUAdam's operator, and the conversion to 16 bits.

    Args:
        threads: Number of OpenMP threads. If None, this process's number.
    """
    ops = stock_ops()
    ops.create_adam(_STOCK_OPTIMIZER, 1e-4, 0.9, 0.999, 1e-8, 0.1, True, False)
    buffers = AdamBuffers(elements)
    gradient = buffers.gradient.float()
    p, m, v = buffers.state

    def update() -> None:
        gradient.mul_(0.999)
        ops.adam_update(_STOCK_OPTIMIZER, 1, 1e-4, 0.9, 0.999, 1e-8, 0.1, True, p, gradient, m, v)
        buffers.wire.copy_(p)

    own = torch.get_num_threads()
    torch.set_num_threads(threads or own)
    try:
        durations = repeat_s(update, budget_s)
    finally:
        torch.set_num_threads(own)
        ops.destroy_adam(_STOCK_OPTIMIZER)
    detail = f"unscale, DeepSpeedCPUAdam, downcast; {elements} elements"
    if threads is not None:
        detail += f", {threads} thread{'s' * (threads > 1)}"
    return rate(elements, durations, "measured", detail)


def device_adam(elements: int, budget_s: float, cuda: bool) -> Quantity:
    """Measure how many parameters per second the GPU's Adam kernel updates.

    Without CUDA, measure ebbtide's Adam kernel for the CPU instead, on one thread.
    """
    if not cuda:
        buffers = AdamBuffers(elements)
        durations = repeat_s(lambda: buffers.host_update(1), budget_s)
        return rate(elements, durations, "emulated", "host kernel, one thread")
    from ebbtide.profiler.rates.copies import cuda_clock
    from ebbtide.runtime.kernels.device import device_update as kernel

    buffers = AdamBuffers(elements, "cuda")
    work: Callable[[], None] = lambda: kernel(buffers.state, buffers.gradient, buffers.wire, STEP, 0.5)
    durations = repeat_s(work, budget_s, cuda_clock)
    return rate(elements, durations, "measured", f"Triton kernel, {elements} elements")
