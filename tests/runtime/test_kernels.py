"""Tests of ebbtide's update kernels for the CPU against DeepSpeed's own op, bit for bit."""

import itertools
import os

import numpy as np
import pytest
import torch
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.adam import AdamStep, BiasCorrection
from ebbtide.runtime.kernels.rule import vector_width
from ebbtide.runtime.kernels.rules import RULES, AdamRule
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.stock_builds import runs_here, stock_op

LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_IDS = itertools.count(50_000)


@pytest.fixture(scope="module")
def op(deepspeed_ops):
    """Return DeepSpeed's CPU Adam op as it was built on this machine."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load()


@pytest.fixture(scope="module", params=["loaded", "avx512", "avx2", "scalar"])
def any_op(request, op):
    """Return DeepSpeed's CPU Adam op: the build for this CPU, or a build for given vector instructions (AVX-512, AVX2
    or none). Skip the test if this CPU lacks these instructions.
    """
    if request.param == "loaded":
        return op
    if not runs_here(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    return stock_op("adam", request.param)


class Stock:
    """An Adam optimizer of one tensor that calls DeepSpeed's C++ op directly.

    The constructor of DeepSpeed's Python class DeepSpeedCPUAdam would be slow.
    """

    def __init__(self, op, p, weight_decay=0.0, adamw=True):
        self.op, self.number = op, next(_IDS)
        self.p, self.m, self.v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
        self.weight_decay = weight_decay
        op.create_adam(self.number, LR, *BETAS, EPS, weight_decay, adamw, False)

    def step(self, number, grad, lr=LR, betas=BETAS):
        self.op.adam_update(self.number, number, lr, *betas, EPS, self.weight_decay, True, self.p, grad, self.m, self.v)

    def close(self):
        self.op.destroy_adam(self.number)


def same(a, b):
    """Return True if two tensors have equal bits. A NaN equals any other NaN."""
    nan = torch.isnan(a)
    return torch.equal(nan, torch.isnan(b)) and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def run_both(op, n, steps=4, weight_decay=0.0, adamw=True, dtype=torch.bfloat16, threads=2, seed=0):
    """Run several Adam steps with DeepSpeed's C++ op and with ebbtide's CPU kernel, on the same gradients.

    Return True if the parameters and moments of both agree bit for bit after each step.
    """
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(n, generator=generator)
    stock = Stock(op, p, weight_decay, adamw)
    m, v = torch.zeros(n), torch.zeros(n)
    bias = BiasCorrection(*BETAS)
    agree = True
    for number in range(1, steps + 1):
        size = torch.randint(-20, 3, (n,), generator=generator)
        grad = (torch.randn(n, generator=generator) * 10.0**size).to(dtype)
        scale, lr = 0.37 / number, LR / number
        stock.step(number, grad.float() * scale, lr)
        out = torch.empty(n, dtype=dtype)
        bias1, bias2 = bias.advance(number, *BETAS)
        step = AdamStep(lr, *BETAS, EPS, weight_decay, bias1, bias2, adamw)
        tail = n % vector_width(AdamRule, op)
        host.host_update((p, m, v), grad, out, step, scale, threads, tail)
        agree &= same(p, stock.p) and same(m, stock.m) and same(v, stock.v)
        agree &= same(out.float(), stock.p.to(dtype).float())
    stock.close()
    return agree


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weight_decay", "adamw"), [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("n", [1, 15, 16, 27, 129, 100_003, 1_100_017])
def test_bits_of_deepspeed_adam(any_op, n, weight_decay, adamw, dtype):
    assert run_both(any_op, n, 3 if n > 10**6 else 12, weight_decay, adamw, dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_subgroups_whose_parameters_go_past_the_caches(op, dtype, threads):
    assert run_both(op, 2_200_017, 1, 0.1, dtype=dtype, threads=threads)


@pytest.mark.parametrize("march", ["haswell", "sandybridge", "x86-64"])
def test_our_kernel_has_the_same_bits_when_built_for_less(op, march, monkeypatch):
    # Each compilation takes six seconds. The results are cached by source, compiler and flags.
    flags = [f"-march={march}" if f == "-march=native" else f for f in host._FLAGS]
    assert flags != host._FLAGS
    monkeypatch.setattr(host, "_FLAGS", flags)
    library = host.load.__wrapped__()
    monkeypatch.setattr(host, "load", lambda: library)
    assert run_both(op, 30_011, 3, 0.1, True, torch.bfloat16)
    assert run_both(op, 1_100_017, 1, 0.1, False, torch.float16)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 70_000), threads=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_any_length_and_number_of_threads(op, n, threads, seed):
    assert run_both(op, n, threads=threads, seed=seed)


def test_special_values(op):
    values = [0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
    n = 9 * 32
    grad = torch.tensor(values * 32)
    p = torch.linspace(-1, 1, n)
    stock = Stock(op, p, 0.1)
    m, v = torch.zeros(n), torch.zeros(n)
    bias = BiasCorrection(*BETAS)
    for number in (1, 2, 3):
        stock.step(number, grad.clone())
        step = AdamStep(LR, *BETAS, EPS, 0.1, *bias.advance(number, *BETAS))
        host.host_update((p, m, v), grad, None, step, tail=n % vector_width(AdamRule, op))
    stock.close()
    assert same(p, stock.p)
    assert same(m, stock.m)
    assert same(v, stock.v)
    assert torch.isnan(p).any()
    assert torch.isfinite(p).any()


def test_views_that_start_anywhere(op):
    n, start = 50_000, 13  # a multiple of every vector length
    buffers = [torch.zeros(n + start) for _ in range(3)]
    p, m, v = (b[start:] for b in buffers)
    p.copy_(torch.randn(n))
    stock = Stock(op, p)
    grad = torch.randn(n + 3).bfloat16()[3:]
    out = torch.zeros(n + 5, dtype=torch.bfloat16)[5:]
    stock.step(1, grad.float())
    step = AdamStep(LR, *BETAS, EPS, 0.0, *BiasCorrection(*BETAS).advance(1, *BETAS))
    host.host_update((p, m, v), grad, out, step, threads=2, tail=n % vector_width(AdamRule, op))
    stock.close()
    assert same(p, stock.p)
    assert torch.equal(out, stock.p.bfloat16())
    assert all(not b[:start].any() for b in buffers), "the update must not write before the view's first element"


def test_segments_of_a_subgroup_have_the_bits_of_the_whole(op):
    n, cut = 70_007, 30_000
    p = torch.randn(n)
    stock = Stock(op, p)
    m, v, grad = torch.zeros(n), torch.zeros(n), torch.randn(n)
    stock.step(1, grad.clone())
    step = AdamStep(LR, *BETAS, EPS, 0.0, *BiasCorrection(*BETAS).advance(1, *BETAS))
    tail = n % vector_width(AdamRule, op)
    for start, end in ((0, cut), (cut, n)):
        span, of_part = slice(start, end), max(0, end - max(start, n - tail))
        host.host_update((p[span], m[span], v[span]), grad[span], None, step, tail=of_part)
    stock.close()
    assert same(p, stock.p)
    assert same(v, stock.v)


@pytest.mark.parametrize(("threads", "elements", "begin"), [(1, 100_003, 0), (3, 100_003, 0), (1, 2**20 + 203, 1)])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_out_of_place_the_bits_are_the_same_and_the_old_state_stays(rule, threads, elements, begin):
    # In all cases the number of elements is not a multiple of the SIMD width, and each thread gets several blocks.
    tail = 3
    settings, group = rule.trials[-1]
    step = rule(**settings).step(group, 1)
    old = [torch.rand(elements) for _ in range(1 + len(rule.moments))]
    grad = torch.randn(elements).bfloat16()
    kept, place = [t.clone() for t in old], [t.clone() for t in old]
    new = [torch.full((elements + begin,), float("nan"))[begin:]]
    new += [torch.full_like(t, float("nan")) for t in old[1:]]
    outs = [torch.empty(elements, dtype=torch.bfloat16) for _ in range(2)]
    host.host_update(place, grad, outs[0], step, 0.5, threads, tail)
    host.host_update(new, grad, outs[1], step, 0.5, threads, tail, old)
    assert all(map(torch.equal, [*place, outs[0], *kept], [*new, outs[1], *old]))


def test_alternating_betas_follow_deepspeeds_one_optimizer_object(op):
    betas = [(0.9, 0.999), (0.8, 0.95)]
    params = [torch.randn(64), torch.randn(64)]
    stocks = [Stock(op, p) for p in params]
    for s in stocks[1:]:
        s.close()
        s.number = stocks[0].number  # DeepSpeed has one C++ object for all parameter groups
    bias = BiasCorrection(*BETAS)
    for number in range(1, 30):
        for index, p in enumerate(params):
            grad = torch.randn(64)
            stocks[index].step(number, grad.clone(), betas=betas[index])
            step = AdamStep(LR, *betas[index], EPS, 0.0, *bias.advance(number, *betas[index]))
            if number == 1:
                stocks[index].mine = (torch.zeros(64), torch.zeros(64))
            tail = 64 % vector_width(AdamRule, op)
            host.host_update((p, *stocks[index].mine), grad, None, step, tail=tail)
    stocks[0].close()
    assert all(same(p, s.p) for p, s in zip(params, stocks, strict=True))


@pytest.mark.parametrize("recounts", [False, True])
@pytest.mark.parametrize("order", ["ab", "aba", "aab", "abb", "abac"])
def test_resume_with_several_betas_replays_only_what_has_an_effect(order, recounts):
    betas = [{"a": (0.9, 0.999), "b": (0.8, 0.99), "c": (0.9, 0.95)}[name] for name in order]
    alone = BiasCorrection(*betas[0], recounts=recounts)
    for number in range(1, 60):
        resumed = BiasCorrection(*betas[0], recounts=recounts)
        resumed.resume(number - 1, betas)
        assert [resumed.advance(number, *b) for b in betas] == [alone.advance(number, *b) for b in betas]
    resumed.resume(10**12, betas)


def test_resume_replays_the_running_product():
    uninterrupted, jumped_differs = BiasCorrection(*BETAS), False
    for number in range(1, 200):
        expected = uninterrupted.advance(number, *BETAS)
        resumed, jumped = BiasCorrection(*BETAS), BiasCorrection(*BETAS)
        resumed.resume(number - 1, [BETAS] * 3)
        assert resumed.advance(number, *BETAS) == expected
        jumped_differs |= jumped.advance(number, *BETAS) != expected
    assert jumped_differs, "a jump uses pow, which is why resume must replay"


def test_every_fp16_gradient_is_read_exactly():
    grad = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    state = [torch.zeros(2**16) for _ in range(3)]
    host.host_update(state, grad, None, AdamStep(0.0, 0.0, 0.999, EPS, 0.0, 1.0, 1.0))
    momentum = state[1]  # with beta1 = 0, the gradient itself
    assert torch.equal(momentum.isnan(), grad.isnan())
    number = ~grad.isnan()
    assert torch.equal(momentum[number], grad.float()[number])


def test_parameters_are_rounded_to_fp16_as_by_torch():
    numbers = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    half_way = (numbers[:-1] + numbers[1:]) / 2
    half_way[-1] = 65520.0  # between the largest number and 2^16, which is infinity in fp16
    some = torch.cat([numbers, half_way, torch.tensor([1e-45, 1e-38, 65536.0, 1e38, float("nan")])])
    beside = [torch.nextafter(some, torch.tensor(limit)) for limit in (float("inf"), 0.0)]
    p = torch.cat([some, *beside])
    p = torch.cat([p, -p])
    out = torch.empty(len(p), dtype=torch.float16)
    state = [p.clone(), torch.zeros_like(p), torch.zeros_like(p)]
    host.host_update(state, torch.zeros_like(p), out, AdamStep(0.0, *BETAS, EPS, 0.0, 0.1, 1.0))
    assert torch.equal(out.view(torch.int16), p.to(torch.float16).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 1003, 250_001])
def test_norm_has_torchs_bits(n, dtype):
    assert host._norm_lanes() > 0, "torch's order of summation must be known on this machine"
    for seed in range(3):
        g = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.01).to(dtype)
        assert host.norm(g) == float(g.to(torch.float64).norm(2))


def test_norm_of_infinities_and_nan():
    g = torch.ones(100)
    g[3] = float("inf")
    assert host.norm(g) == float("inf")
    g[4] = float("nan")
    assert np.isnan(host.norm(g))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": torch.zeros(4, dtype=torch.float64)}, r"state\[0\] must have one of the dtypes"),
        ({"grad": torch.zeros(5)}, "grad must be a contiguous host tensor of 4 elements"),
        ({"out": torch.zeros(8)[::2]}, "out must be a contiguous"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    tensors = {name: torch.zeros(4) for name in ("p", "m", "v", "grad", "out")} | change
    step = AdamStep(LR, *BETAS, EPS, 0.0, 0.1, 1.0)
    state = [tensors.pop(name) for name in ("p", "m", "v")]
    with pytest.raises(ValueError, match=message):
        host.host_update(state, **tensors, step=step)


def test_a_library_is_synced_before_it_gets_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path))
    synced = []

    def sync(descriptor):
        synced.append((os.fstat(descriptor).st_size, list(tmp_path.rglob("small-*.so"))))
        return fsync(descriptor)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", sync)
    source = tmp_path / "small.cpp"
    source.write_text("int answer;")  # our kernels take seconds
    library = host.build(source)
    ((size, (beside,)),) = synced
    assert (beside.parent.parent, beside.name, size) == (library.parent, library.name, library.stat().st_size)


def test_a_missing_compiler_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path))
    with pytest.raises(host.MissingCompilerError, match="install g\\+\\+, or set CXX"):
        host.build(host._SOURCE)
