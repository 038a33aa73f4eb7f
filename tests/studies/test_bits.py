import torch

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step


def test_equal_means_every_bit_of_the_same_type():
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}
    same = {name: tensor.clone() for name, tensor in ours.items()}
    assert differences(ours, same) == ()
    nudged = {**same, "a": torch.nextafter(same["a"], torch.tensor(9.0))}
    assert differences(ours, nudged) == ("a",)
    assert differences(ours, {**same, "b": torch.zeros(2, dtype=torch.bfloat16)}) == ("b",)
    assert differences(ours, {"a": ours["a"], "c": ours["b"]}) == ("b", "c")


def test_state_of_an_engine_is_a_copy_of_everything_that_training_changes(only_rank):
    import deepspeed

    config = SIZES["tiny"]
    engine, *_ = deepspeed.initialize(model=ByteGPT(config), config=ds_config(2, 20_000))
    batches = Batches(2, config.sequence)
    train_step(engine, batches.at(0))
    first = state_of(engine)
    assert len(first) == 4 * len(list(engine.module.named_parameters()))
    assert sum(t.numel() for n, t in first.items() if n.endswith("/exp_avg")) == config.params
    for name, tensor in first.items():
        if "/" not in name:
            assert torch.equal(tensor, first[f"{name}/fp32"].bfloat16())
    assert differences(first, state_of(engine)) == ()
    train_step(engine, batches.at(1))
    # A bf16 weight of 1 does not change by 1e-4. Its master and its moments do.
    moved = set(differences(first, state_of(engine)))
    assert {n for n in first if "/" in n} <= moved
    assert {n for n in first if "/" not in n and "norm" not in n} <= moved
    engine.destroy()
