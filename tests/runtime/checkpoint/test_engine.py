"""The checkpoint engine inside DeepSpeed: one rank, ZeRO-3 with offload, a tiny model."""

import os
import random
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch

from simulator import CheckpointPlan
from tests.runtime.checkpoint.conftest import FaultyFiles

pytestmark = pytest.mark.slow
# ruff: noqa: NPY002, RUF059 - numpy's global generator is what is restored


def make(subgroup=20_000, **zero):
    import deepspeed

    from studies.byte_gpt import SIZES, Batches, ByteGPT, ds_config

    config = ds_config(2, subgroup, learning_rate=1e-2, **zero)
    # DeepSpeed's own Adam takes other powers of beta after a resume; torch's is exact.
    config["zero_force_ds_cpu_optimizer"] = False
    model = ByteGPT(SIZES["tiny"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler
    )
    return engine, Batches(2, SIZES["tiny"].sequence)


def train(engine, batches, first, last):
    from studies.byte_gpt import train_step

    for step in range(first, last):
        train_step(engine, batches.at(step))


def bits(engine):
    optimizer = engine.optimizer
    masters = [t.detach().clone() for t in optimizer.fp32_partitioned_groups_flat]
    moments = [
        value.clone()
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    wire = [t.clone() for t in optimizer.fp16_partitioned_groups_flat]
    return masters + moments + wire


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def engines(only_rank):
    made = []

    def build(plan=None, *, stage3_gather_16bit_weights_on_model_save=False, **options):
        from runtime.checkpoint import install

        engine, batches = make(
            stage3_gather_16bit_weights_on_model_save=stage3_gather_16bit_weights_on_model_save
        )
        made.append(engine)
        lazy = install(engine, plan, **options) if plan is not None else None
        return engine, batches, lazy

    yield build
    for engine in made:
        try:
            engine.destroy()
        except RuntimeError:
            assert engine.checkpoint_engine._closed


def test_resumes_bit_exact_into_the_live_buffers(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan(interval_steps=2, dir=str(tmp_path)))
    lazy.client_state = lambda: {"data_position": engine.global_steps}
    train(engine, batches, 0, 5)
    draws = (random.random(), np.random.rand(), torch.rand(1).item())  # after step 4's save
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "global_step4"
    train(engine, batches, 5, 7)
    expected = bits(engine)
    engine.destroy()

    engine, batches, lazy = engines(CheckpointPlan(dir=str(tmp_path)))
    addresses = [t.data_ptr() for t in engine.optimizer.fp32_partitioned_groups_flat]
    path, client_state = engine.load_checkpoint(str(tmp_path), tag="global_step4")
    assert client_state["data_position"] == 4
    assert "ebbtide" not in client_state
    assert addresses == [t.data_ptr() for t in engine.optimizer.fp32_partitioned_groups_flat]
    train(engine, batches, 4, 5)
    assert draws == (random.random(), np.random.rand(), torch.rand(1).item())
    train(engine, batches, 5, 7)
    assert same(bits(engine), expected)


def test_resumes_from_the_durable_tier_when_the_fast_one_is_lost(engines, tmp_path):
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    tiers = CheckpointPlan(interval_steps=2, dir=str(fast), drain_dir=str(durable), keep=1)
    engine, batches, lazy = engines(tiers)
    train(engine, batches, 0, 5)
    lazy.wait_for_drain()
    assert (durable / "latest").read_text() == "global_step4"
    train(engine, batches, 5, 6)
    expected = bits(engine)
    engine.destroy()
    shutil.rmtree(fast)
    for tag in durable.glob("global_step6"):
        shutil.rmtree(tag)  # as if the machine had died before
    engine, batches, lazy = engines(tiers)
    engine.load_checkpoint(str(fast))  # as the training script always calls it
    assert engine.global_steps == 4
    assert lazy.chosen.directory == durable
    train(engine, batches, 4, 6)
    assert same(bits(engine), expected)


def test_an_update_during_persist_is_not_in_the_file(engines, tmp_path):
    engine, batches, lazy = engines(
        CheckpointPlan(dir=str(tmp_path), write_bytes_per_s=2e6), block_bytes=65536
    )
    train(engine, batches, 0, 2)
    expected = bits(engine)
    engine.save_checkpoint(str(tmp_path), tag="two")
    assert lazy.running
    train(engine, batches, 2, 4)
    lazy.wait()
    assert lazy.last.copied_bytes > 0
    engine.destroy()
    engine, batches, lazy = engines(CheckpointPlan())
    engine.load_checkpoint(str(tmp_path))
    assert same(bits(engine), expected)


def test_deepspeed_loads_it_without_ebbtide(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    expected = bits(engine)
    lazy.wait()
    engine.destroy()
    stock, _, _ = engines()
    path, _ = stock.load_checkpoint(str(tmp_path))
    assert path is not None
    assert same(bits(stock), expected)


def test_a_checkpoint_of_deepspeed_loads_with_ebbtide(engines, tmp_path):
    stock, batches, _ = engines()
    train(stock, batches, 0, 2)
    stock.save_checkpoint(str(tmp_path))
    expected = bits(stock)
    stock.destroy()
    engine, _, lazy = engines(CheckpointPlan())
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path is not None
    assert same(bits(engine), expected)


def test_conversions_read_it(engines, tmp_path):
    from deepspeed.checkpoint.ds_to_universal import main as to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    lazy.wait()
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert sum(t.numel() for t in whole.values()) == 134912
    assert torch.equal(whole["norm.weight"].bfloat16(), _gathered(engine, "norm.weight"))
    assert (tmp_path / "zero_to_fp32.py").exists()
    to_universal(
        Namespace(
            input_folder=str(tmp_path / "global_step1"), output_folder=str(tmp_path / "uni"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=False,
        )
    )  # fmt: skip
    fp32 = torch.load(tmp_path / "uni/zero/norm.weight/fp32.pt", weights_only=True)
    assert torch.equal(fp32.view(-1), whole["norm.weight"])


def _gathered(engine, name):
    import deepspeed

    parameter = dict(engine.module.named_parameters())[name]
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def test_nothing_is_visible_before_the_commit(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan(write_bytes_per_s=2e6))
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    assert lazy.running
    assert not (tmp_path / "latest").exists()
    assert not (tmp_path / "global_step1").exists()
    lazy.wait()
    assert (tmp_path / "global_step1").exists()


def test_busy_policies(engines, tmp_path):
    def two_saves(busy):
        folder = tmp_path / busy
        plan = CheckpointPlan(busy=busy, write_bytes_per_s=3e6)
        engine, batches, lazy = engines(plan, block_bytes=65536)
        train(engine, batches, 0, 1)
        engine.save_checkpoint(str(folder), tag="first")
        answered = engine.save_checkpoint(str(folder), tag="second")
        lazy.wait()
        engine.destroy()
        return answered, sorted(p.name for p in folder.iterdir() if p.is_dir())

    assert two_saves("wait") == (True, ["first", "second"])
    assert two_saves("skip") == (False, ["first"])
    answered, left = two_saves("replace")
    assert answered
    assert [tag for tag in left if not tag.startswith(".")] == ["second"]


def test_a_failed_write_is_raised_at_the_next_step(engines, tmp_path):
    from runtime.checkpoint.errors import CheckpointError

    files = FaultyFiles(20, lasting=True)
    files.armed = False
    engine, batches, lazy = engines(CheckpointPlan(), files=files, block_bytes=65536)
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="good")
    lazy.wait()
    engine.save_checkpoint(str(tmp_path), tag="bad")
    files.armed = True
    files.at = 0
    lazy._job.wait(30)
    if lazy._job.failure is None:  # it was faster than the fault: fail the next one
        engine.save_checkpoint(str(tmp_path), tag="bad")
    with pytest.raises((CheckpointError, OSError), match=r"bad|Input/output") as raised:  # noqa: PT012
        lazy._job.wait(30)
        train(engine, batches, 1, 2)
    assert files.fired
    assert raised.value.__cause__ is not None
    files.armed = False
    train(engine, batches, 2, 3)  # told once; training may go on
    engine.save_checkpoint(str(tmp_path), tag="after")
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "after"


def test_restore_passes_damaged_ones_over_and_says_so(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan(interval_steps=1, dir=str(tmp_path)))
    train(engine, batches, 0, 3)
    lazy.wait()
    engine.destroy()
    victim = next((tmp_path / "global_step3").glob("*optim_states.pt"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    shutil.rmtree(tmp_path / "global_step2/ebbtide")
    engine, _, lazy = engines(CheckpointPlan())
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert "global_step1" in path
    assert set(lazy.chosen.passed_over) == {"global_step3", "global_step2"}
    assert "were altered" in lazy.chosen.passed_over["global_step3"]
    from runtime.checkpoint.errors import CheckpointError

    with pytest.raises(CheckpointError, match="must match its manifest"):
        engine.load_checkpoint(str(tmp_path), tag="global_step3")


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("which", ["*optim_states.pt", "*model_states.pt"])
def test_malicious_pickles_are_refused(engines, tmp_path, which):
    """Also where the attacker writes fitting manifests: here by removing them, as for a
    checkpoint of DeepSpeed's own."""
    from runtime.checkpoint.errors import CheckpointError

    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="t")
    lazy.wait()
    mark = tmp_path / "executed"
    victim = next((tmp_path / "t").glob(which))
    torch.save({"module": Evil(str(mark)), "mp_world_size": 1}, victim)
    torch.load(victim, weights_only=False)
    assert mark.exists(), "the payload must work where it is not refused"
    mark.rmdir()
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(tmp_path), tag="t")
    (tmp_path / "t/ebbtide.json").unlink()
    with pytest.raises(CheckpointError, match="weights_only"):
        engine.load_checkpoint(str(tmp_path), tag="t")
    for only_module in (True, False):
        with pytest.raises(Exception):  # noqa: B017, PT011 - DeepSpeed's own paths, too
            engine.load_checkpoint(str(tmp_path), tag="t", load_module_only=only_module,
                                   load_optimizer_states=False)  # fmt: skip
    assert not mark.exists()


def test_destroy_finishes_the_running_checkpoint(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan(write_bytes_per_s=3e6))
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    assert lazy.running
    engine.destroy()
    assert (tmp_path / "latest").read_text() == "global_step1"


def test_tags_that_are_no_folder_names_are_refused(engines, tmp_path):
    from runtime.checkpoint.errors import CheckpointError

    engine, _, lazy = engines(CheckpointPlan())
    for tag in ("a/b", ".hidden", "latest", ""):
        with pytest.raises(CheckpointError, match="a tag is the name of a folder"):
            engine.save_checkpoint(str(tmp_path), tag=tag)


def test_16_bit_export_is_written_at_once(engines, tmp_path):
    engine, _, lazy = engines(CheckpointPlan(), stage3_gather_16bit_weights_on_model_save=True)
    engine.save_16bit_model(str(tmp_path))
    assert [p.name for p in tmp_path.glob("*.tmp")] == []
    assert any(tmp_path.iterdir())
