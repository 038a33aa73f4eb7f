import pytest
import torch

from studies.bench import products
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ByteGPTConfig

TINY = SIZES["tiny"]


@pytest.mark.parametrize("name", ["tiny", "4m", "40m"])
def test_params_formula_counts_every_element(name):
    with torch.device("meta"):
        model = ByteGPT(SIZES[name], seed=None)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name].params


def test_names_of_sizes_say_the_parameters():
    expected = {"4m": 4e6, "40m": 40e6, "57m": 57e6, "110m": 110e6, "350m": 350e6}
    expected |= {"1.3b": 1.3e9, "3b": 3e9, "7b": 7e9}
    for name, params in expected.items():
        assert SIZES[name].params == pytest.approx(params, rel=0.05)


def test_later_bytes_do_not_change_earlier_predictions():
    model = ByteGPT(TINY).eval()
    inputs, targets = Batches(1, TINY.sequence).at(0)
    changed = inputs.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    # The loss over all but the last position must not depend on the last input.
    mask = targets.clone()
    mask[0, -1] = -100  # cross_entropy's ignore_index
    assert torch.equal(model(inputs, mask), model(changed, mask))
    assert not torch.equal(model(inputs, targets), model(changed, targets))


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = ByteGPT(TINY, 1)
    torch.manual_seed(6)
    second, other = ByteGPT(TINY, 1), ByteGPT(TINY, 2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_recomputing_activations_gives_the_same_gradients():
    config = ByteGPTConfig(2, 64, 2, 32)
    kept, recomputed = ByteGPT(config), ByteGPT(ByteGPTConfig(2, 64, 2, 32, True))
    batch = Batches(2, 32).at(0)
    kept(*batch).backward()
    recomputed(*batch).backward()
    for a, b in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_step_has_its_own_data_whenever_it_is_asked_for():
    batches = Batches(2, 16)
    third = batches.at(3)[0]
    batches.at(0)
    assert torch.equal(batches.at(3)[0], third)
    assert not torch.equal(batches.at(4)[0], third)
    assert not torch.equal(Batches(2, 16, rank=1).at(3)[0], third)
    assert not torch.equal(Batches(2, 16, seed=1).at(3)[0], third)


def test_a_cpu_without_16_bit_products_computes_the_same_model(monkeypatch):
    losses, taken = [], []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(products.F, "linear", lambda x, *rest: taken.append(x.dtype) or linear(x, *rest))
    for native in (True, False):
        monkeypatch.setattr(products, "computes_16_bit", lambda native=native: native)
        model = ByteGPT(TINY).bfloat16()
        loss = model(*Batches(2, TINY.sequence).at(0))
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        assert set(taken) == {torch.bfloat16 if native else torch.float32}
        taken.clear()
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
