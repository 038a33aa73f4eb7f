"""Tests of ebbtide's tensor digests (hashes of tensors): every bit counts, the digests of parts add up to
that of the whole tensor, and the C++ and torch implementations agree.
"""

import math

import pytest
import torch
from ebbtide.runtime.kernels import digest as module
from ebbtide.runtime.kernels.digest import added, by_pieces, digest
from ebbtide.tuner.verify.run import _whole

from tests.runtime.torch_digest import by_torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(dtype, count=200_003):
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_add_up_however_they_are_cut_and_wherever_they_are(dtype):
    whole = values(dtype)
    expected = digest(whole, threads=2)
    for cut in (1, 777, 1024, 150_001):
        first, second = digest(whole[:cut]), digest(whole[cut:], cut, threads=2)
        assert added(first, second).hash == expected.hash
        assert math.dist(added(first, second).sketch, expected.sketch) < 1e-6
    other = added(by_torch(whole[:777]), by_torch(whole[777:], 777))
    assert other.hash == expected.hash
    assert math.dist(other.sketch, expected.sketch) < 1e-6
    read = _whole([[0, len(whole), len(whole), expected.packed()]])
    assert (read.hash, read.not_finite) == (expected.hash, expected.not_finite)
    assert (read.norm, read.sketch) == (expected.squares**0.5, expected.sketch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 200_003])
def test_what_comes_down_in_pieces_has_the_same_digest(dtype, count, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 1000 * torch.empty(0, dtype=dtype).element_size())
    whole = values(dtype, count)
    ours, expected = by_pieces(whole, 777, 2), digest(whole, 777)
    assert (ours.hash, ours.not_finite) == (expected.hash, expected.not_finite)
    assert math.isclose(ours.squares, expected.squares, rel_tol=1e-12)
    assert math.dist(ours.sketch, expected.sketch) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_on_a_gpu_has_the_same_digest(dtype):
    whole = values(dtype, 20_000_003)
    assert digest(whole.cuda(), 5, threads=2).hash == digest(whole, 5, threads=2).hash


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_and_any_exchange_changes_the_hash(dtype):
    whole = values(dtype, 5000)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    seen = {digest(whole).hash}
    for at in (0, 1023, 1024, 4999):
        for bit in range(8 * whole.element_size() - 1):
            other = whole.clone()
            other.view(kind)[at] ^= 1 << bit
            seen.add(digest(other).hash)
    assert len(seen) == 1 + 4 * (8 * whole.element_size() - 1)
    exchanged = whole.clone()
    exchanged[[5, 2000]] = whole[[2000, 5]]
    assert digest(exchanged).hash not in seen


def test_sketches_tell_how_far_tensors_are_apart():
    one = values(torch.float32)
    for size in (1e-6, 1.0, 100.0):
        moved = one + size * torch.randn(one.numel(), generator=torch.Generator().manual_seed(2))
        estimate = math.dist(digest(one).sketch, digest(moved).sketch)
        assert 0.5 < estimate / float((one.double() - moved.double()).norm()) < 2


def test_what_is_not_finite_is_counted_and_leaves_the_rest():
    tensor = values(torch.float32, 4000)
    tensor[[3, 2500]] = torch.tensor([math.nan, -math.inf])
    for made in (digest(tensor), by_torch(tensor)):
        assert made.not_finite == 2
        assert math.isfinite(made.squares)
        assert all(map(math.isfinite, made.sketch))


def test_what_cannot_be_hashed_is_refused():
    with pytest.raises(ValueError, match="must be contiguous and of one of the dtypes"):
        digest(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        digest(torch.zeros(4, 4).t())
