"""The device update kernel in Triton: the host kernel's operations, in the same order.

Every operation is an IEEE one (fma, round-to-nearest sqrt and division, no flush to zero) and
automatic fusion is off, so that the bits are those of ``host_adam``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.adam import AdamStep

BLOCK = 1024
_DECAYS = {"none": 0, "l2": 1, "decoupled": 2}


@triton.jit  # type: ignore[untyped-decorator]
def adam_kernel(  # type: ignore[no-untyped-def]
    p_ptr, m_ptr, v_ptr,  # fp32, n elements each
    grad_ptr,  # bf16, fp16 or fp32
    out_ptr,  # bf16, fp16 or fp32
    n, tail_begin,  # elements; from tail_begin on DeepSpeed's scalar loop is repeated
    scale, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2, eps, decay, step_size,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803 - Triton's custom
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    param = tl.load(p_ptr + offsets, mask=inside, other=0.0)
    m = tl.load(m_ptr + offsets, mask=inside, other=0.0)
    v = tl.load(v_ptr + offsets, mask=inside, other=1.0)
    if DECAY == 1:
        grad = tl.fma(param, decay, grad)
    square = grad * grad
    in_tail = offsets >= tail_begin
    momentum = tl.where(
        in_tail,
        tl.fma(m, beta1, grad * one_minus_beta1),
        tl.fma(grad, one_minus_beta1, m * beta1),
    )
    variance = tl.where(
        in_tail,
        tl.fma(v, beta2, square * one_minus_beta2),
        tl.fma(square, one_minus_beta2, v * beta2),
    )
    denominator = tl.fma(tl.sqrt_rn(variance), bias2, eps)
    if DECAY == 2:
        param = tl.fma(param, decay, param)
    param = tl.fma(tl.div_rn(momentum, denominator), step_size, param)
    tl.store(p_ptr + offsets, param, mask=inside)
    tl.store(m_ptr + offsets, momentum, mask=inside)
    tl.store(v_ptr + offsets, variance, mask=inside)
    tl.store(out_ptr + offsets, param.to(out_ptr.dtype.element_ty), mask=inside)


def device_adam(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    step: AdamStep,
    scale: float = 1.0,
    tail: int = 0,
) -> None:
    """`runtime.kernels.host.host_adam` on CUDA tensors, on the current stream."""
    n = p.numel()
    if n == 0:
        return
    scalars = [float(value) for value in step.scalars(scale)]
    adam_kernel[(triton.cdiv(n, BLOCK),)](
        p, m, v, grad, out, n, n - tail, *scalars,
        DECAY=_DECAYS[step.decay], BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
