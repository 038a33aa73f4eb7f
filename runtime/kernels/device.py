"""The update kernels for the GPU, in Triton: the CPU kernels' operations in the same order.

Every operation is an IEEE operation (fma, round-to-nearest sqrt and division, no flush to zero), and
automatic fusion is off. The results are therefore bit-identical to those of ``host_update``.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from ebbtide.runtime.kernels.step import UpdateStep

BLOCK = 1024
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# In all kernels, state is fp32, and grad and out are bf16, fp16 or fp32, with n elements each. From element tail_begin
# on, they compute as the scalar loop of DeepSpeed's op, which fuses other products than its vector loop.


@triton.jit
def _root(x):
    if _INTERPRETED:  # the interpreter does not support assembler
        return tl.sqrt_rn(x)
    else:  # noqa: RET505 - Triton takes the branch when it compiles
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _quotient(a, b):
    if _INTERPRETED:
        return tl.div_rn(a, b)
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _average(in_tail, a, x, b, y):
    return tl.where(in_tail, tl.fma(x, a, y * b), tl.fma(y, b, x * a))


@triton.jit
def adam_kernel(
    p_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    n,
    tail_begin,
    scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias2,
    eps,
    decay,
    step_size,
    VARIANT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, in_tail = offsets < n, offsets >= tail_begin
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    param = tl.load(p_ptr + offsets, mask=inside, other=0.0)
    momentum = tl.load(m_ptr + offsets, mask=inside, other=0.0)
    variance = tl.load(v_ptr + offsets, mask=inside, other=1.0)
    if VARIANT == 1:
        grad = tl.fma(param, decay, grad)
    momentum = _average(in_tail, beta1, momentum, one_minus_beta1, grad)
    variance = _average(in_tail, beta2, variance, one_minus_beta2, grad * grad)
    denominator = tl.fma(_root(variance), bias2, eps)
    if VARIANT == 2:
        param = tl.fma(param, decay, param)
    param = tl.fma(_quotient(momentum, denominator), step_size, param)
    tl.store(p_ptr + offsets, param, mask=inside)
    tl.store(m_ptr + offsets, momentum, mask=inside)
    tl.store(v_ptr + offsets, variance, mask=inside)
    tl.store(out_ptr + offsets, param.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def lion_kernel(
    p_ptr,
    m_ptr,
    grad_ptr,
    out_ptr,
    n,
    tail_begin,
    scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    after_decay,
    lr,
    VARIANT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, in_tail = offsets < n, offsets >= tail_begin
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    param = tl.load(p_ptr + offsets, mask=inside, other=0.0)
    momentum = tl.load(m_ptr + offsets, mask=inside, other=0.0)
    direction = _average(in_tail, beta1, momentum, one_minus_beta1, grad)
    negative = direction.to(tl.int32, bitcast=True) < 0  # True also for -0.0 and for NaNs with the sign bit
    change = tl.where(negative, lr, -lr)
    momentum = _average(in_tail, beta2, momentum, one_minus_beta2, grad)
    if VARIANT == 1:  # noqa: SIM108 - Triton takes the branch when it compiles
        param = tl.fma(param, after_decay, change)
    else:
        param = param + change
    tl.store(p_ptr + offsets, param, mask=inside)
    tl.store(m_ptr + offsets, momentum, mask=inside)
    tl.store(out_ptr + offsets, param.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def adagrad_kernel(
    p_ptr,
    sum_ptr,
    grad_ptr,
    out_ptr,
    n,
    tail_begin,
    scale,
    eps,
    decay,
    step_size,
    VARIANT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, in_tail = offsets < n, offsets >= tail_begin
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    param = tl.load(p_ptr + offsets, mask=inside, other=0.0)
    total = tl.load(sum_ptr + offsets, mask=inside, other=1.0)
    if VARIANT == 1:
        grad = tl.fma(param, decay, grad)
    total = tl.fma(grad, grad, total)
    step = _quotient(grad, _root(total) + eps)
    param = tl.where(in_tail, param + step * step_size, tl.fma(step, step_size, param))
    tl.store(p_ptr + offsets, param, mask=inside)
    tl.store(sum_ptr + offsets, total, mask=inside)
    tl.store(out_ptr + offsets, param.to(out_ptr.dtype.element_ty), mask=inside)


# First elements of state, gradient and output. A gradient that an earlier step left divides a subgroup, so the part
# after it begins in the middle of all three tensors. An offset of 4 elements is a multiple of 16 bytes for fp32, but
# not for 16 bits. The left gradient itself begins at 0. The output may begin anywhere among the parameters.
HOST_STARTS = ((0, 0, 0), (0, 0, 1), (4, 4, 4), (1, 1, 1))
KEPT_STARTS = ((0, 0, 0), (4, 0, 4), (1, 0, 1))
KERNELS: dict[str, Any] = {"adam": adam_kernel, "lion": lion_kernel, "adagrad": adagrad_kernel}


def device_update(
    state: Sequence[torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor,
    step: UpdateStep,
    scale: float = 1.0,
    tail: int = 0,
) -> None:
    """Run one optimizer step on CUDA tensors, on the current stream, with the arguments of `host_update`."""
    n = grad.numel()
    if n == 0:
        return
    scalars = [float(value) for value in step.scalars(scale)]
    KERNELS[step.kernel][(triton.cdiv(n, BLOCK),)](
        *state, grad, out, n, n - tail, *scalars, VARIANT=step.variant, BLOCK=BLOCK, enable_fp_fusion=False
    )


def compile_for(
    steps: Sequence[UpdateStep], tensors: int, grad_dtype: torch.dtype, out_dtype: torch.dtype, device: str = "cuda"
) -> None:
    """Compile the kernels that `device_update` will need, by running them on the current GPU.

    Triton compiles separate kernels for lengths and addresses that are multiples of 16 and for those that are not. Each
    case is run once.

    Args:
        steps: Example hyperparameters of an update, one set for each variant of the update kernel. Variants differ in
            the form of weight decay, for example.
        tensors: Number of tensors in a subgroup's optimizer state.
    """
    forms = {(grad_dtype, starts) for starts in HOST_STARTS} | {(torch.float32, starts) for starts in KEPT_STARTS}
    for (grads, starts), elements in itertools.product(sorted(forms, key=str), (32, 33)):
        *state, grad, out = (
            torch.zeros(elements + start, dtype=dtype, device=device)[start:]
            for start, dtype in zip(
                [starts[0]] * tensors + [*starts[1:]], [torch.float32] * tensors + [grads, out_dtype], strict=True
            )
        )
        for step in steps:
            for tail in (elements - 16, elements - 17):
                device_update(state, grad, out, step, tail=tail)
