"""Tests of ebbtide's checkpoint engine inside DeepSpeed, on one rank with ZeRO-3 offload and a tiny model."""

import collections
import datetime as dt
import errno
import os
import random
import shutil
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from ebbtide.runtime.checkpoint.deepspeed.installation import call_after_step
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.format.skeleton import lay_out
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.runtime.checkpoint.stream.job import BackgroundSave
from ebbtide.runtime.checkpoint.trainers.bystanders import ours
from ebbtide.simulator import CheckpointPlan

from tests.runtime.checkpoint.conftest import FaultyFiles, Gate

pytestmark = pytest.mark.slow


def make(subgroup=20_000, **zero):
    import deepspeed

    from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config

    config = ds_config(2, subgroup, learning_rate=1e-2, **zero)
    # torch's Adam, because DeepSpeed's own computes powers of beta differently after a resume.
    config["zero_force_ds_cpu_optimizer"] = False
    model = ByteGPT(SIZES["tiny"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    return engine, Batches(2, SIZES["tiny"].sequence)


def train(engine, batches, first, last):
    from studies.bench.byte_gpt import train_step

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
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def engines(only_rank):
    made = []

    def build(plan=None, *, stage3_gather_16bit_weights_on_model_save=False, **options):
        from ebbtide.runtime.checkpoint import install

        engine, batches = make(stage3_gather_16bit_weights_on_model_save=stage3_gather_16bit_weights_on_model_save)
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
    draws = (random.random(), np.random.rand(), torch.rand(1).item())  # drawn after the save of step 4
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "global_step4"
    train(engine, batches, 5, 7)
    expected = bits(engine)
    engine.destroy()

    engine, batches, lazy = engines(CheckpointPlan(dir=str(tmp_path), restore_random=True))
    addresses = [t.data_ptr() for t in engine.optimizer.fp32_partitioned_groups_flat]
    path, client_state = engine.load_checkpoint(str(tmp_path), tag="global_step4")
    assert client_state["data_position"] == 4
    assert "ebbtide" not in client_state
    assert addresses == [t.data_ptr() for t in engine.optimizer.fp32_partitioned_groups_flat]
    train(engine, batches, 4, 5)
    assert draws == (random.random(), np.random.rand(), torch.rand(1).item())
    train(engine, batches, 5, 7)
    assert same(bits(engine), expected)


def test_a_rollback_leaves_the_random_states_alone_as_stock_does(engines, tmp_path):
    def draws(engine):
        engine.save_checkpoint(str(tmp_path / type(engine.checkpoint_engine).__name__))
        torch.rand(3)
        engine.load_checkpoint(str(tmp_path / type(engine.checkpoint_engine).__name__))
        return random.random(), np.random.rand(), torch.rand(1).item()

    drawn = []
    for plan in (None, CheckpointPlan()):
        engine, *_ = engines(plan)
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        drawn.append(draws(engine))
    assert drawn[0] == drawn[1]


def test_a_renamed_checkpoint_loads_and_is_never_pruned(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan(keep=1))
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="a")
    expected = bits(engine)
    lazy.wait()
    (tmp_path / "a").rename(tmp_path / "best")
    train(engine, batches, 1, 2)
    engine.save_checkpoint(str(tmp_path), tag="b")
    lazy.wait()
    listed = {entry.tag: entry.status for entry in list_checkpoints(tmp_path)}
    assert listed == {"b": "committed", "best": "renamed from a"}
    engine.load_checkpoint(str(tmp_path), tag="best")
    assert same(bits(engine), expected)


def test_an_empty_latest_is_told(engines, tmp_path):
    engine, *_, lazy = engines(CheckpointPlan())
    engine.save_checkpoint(str(tmp_path), tag="a")
    lazy.wait()
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match=r"latest must name .* but is empty.*tag='a'"):
        engine.load_checkpoint(str(tmp_path))


def test_client_state_gives_parameters_back_as_parameters(engines, tmp_path):
    frozen = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    given = {"scale": torch.nn.Parameter(torch.ones(5)), "frozen": frozen, "plain": torch.ones(2)}
    seen = []
    for plan in (None, CheckpointPlan()):
        engine, *_ = engines(plan)
        folder = str(tmp_path / str(plan is None))
        engine.save_checkpoint(folder, client_state=given)
        _, back = engine.load_checkpoint(folder)
        seen.append({key: (type(back[key]), back[key].requires_grad) for key in given})
        assert all(torch.equal(back[key], given[key]) for key in given)
    assert seen[1] == seen[0]


@pytest.mark.parametrize(
    ("trainer", "enabled", "waits"),
    [("transformers", False, True), ("transformers", True, False), ("script", False, False)],
)
def test_lazy_under_a_trainer_defers_only_where_the_front_door_settles(
    engines, tmp_path, monkeypatch, trainer, enabled, waits
):
    import deepspeed

    engine, _, lazy = engines(CheckpointPlan(mode="lazy"))
    if enabled:
        monkeypatch.setattr(deepspeed.initialize, "_ebbtide_original", None, raising=False)
    waited = []

    def wait_until_placed(job):
        waited.append(job)

    monkeypatch.setattr(BackgroundSave, "wait_until_placed", wait_until_placed)
    space = {"__name__": trainer, "save": engine.save_checkpoint}
    exec("def on_save(folder): return save(folder)", space)
    space["on_save"](str(tmp_path))
    lazy.wait()
    assert bool(waited) == waits


@pytest.fixture
def held(monkeypatch):
    """Return file operations that pause a checkpoint save before its commit. The save continues as soon as code of
    the test process calls `BackgroundSave.wait`, which waits for a save.
    """
    gate, wait = Gate("staging_fsynced"), BackgroundSave.wait

    def opening(job, *args):
        gate.opened.set()
        return wait(job, *args)

    monkeypatch.setattr(BackgroundSave, "wait", opening)
    yield gate
    gate.opened.set()


def test_another_engine_loads_what_is_still_being_written(engines, tmp_path, held):
    first, *_ = engines(CheckpointPlan(), files=held)
    second, *_ = engines(CheckpointPlan())
    first.save_checkpoint(str(tmp_path), tag="a")
    path, _ = second.load_checkpoint(str(tmp_path))
    assert path is not None


def test_another_engine_saves_to_the_same_folder(engines, tmp_path, held):
    first, _, one = engines(CheckpointPlan(), files=held)
    second, _, other = engines(CheckpointPlan())
    first.save_checkpoint(str(tmp_path), tag="a")
    second.save_checkpoint(str(tmp_path), tag="b")
    assert held.opened.is_set(), "the second engine must not remove the first engine's files"
    one.wait()
    other.wait()
    assert {entry.tag for entry in list_checkpoints(tmp_path)} == {"a", "b"}


@pytest.mark.parametrize("save_dir", [None, ""])
def test_nowhere_to_save_to_is_a_value_error_as_with_stock(engines, save_dir):
    engine, *_ = engines(CheckpointPlan())
    with pytest.raises(ValueError, match="save_dir must be a non-empty path, but got"):
        engine.save_checkpoint(save_dir)


def test_an_update_during_persist_is_not_in_the_file(engines, tmp_path):
    gate = Gate("first_block")  # the only writer stops at this point until two updates have ended
    plan = CheckpointPlan(dir=str(tmp_path), writers=1)
    engine, batches, lazy = engines(plan, block_bytes=65536, files=gate)
    train(engine, batches, 0, 2)
    expected = bits(engine)
    engine.save_checkpoint(str(tmp_path), tag="two")
    train(engine, batches, 2, 4)
    assert lazy.running
    gate.opened.set()
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
            input_folder=str(tmp_path / "global_step1"),
            output_folder=str(tmp_path / "uni"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    fp32 = torch.load(tmp_path / "uni/zero/norm.weight/fp32.pt", weights_only=True)
    assert torch.equal(fp32.view(-1), whole["norm.weight"])


def _gathered(engine, name):
    import deepspeed

    parameter = dict(engine.module.named_parameters())[name]
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def test_nothing_is_visible_before_the_commit(engines, tmp_path, held):
    engine, batches, lazy = engines(CheckpointPlan(), files=held)
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    assert lazy.running
    with ours():  # as another process sees it, because a reader in this process would wait
        assert not (tmp_path / "latest").exists()
        assert not (tmp_path / "global_step1").exists()
    assert (tmp_path / "latest").exists()
    assert not lazy.running
    assert (tmp_path / "global_step1").exists()


def test_busy_policies(engines, tmp_path, held):
    def two_saves(busy):
        folder = tmp_path / busy
        held.at = "first_block"  # at this point, the checkpoint can still be given up
        engine, batches, lazy = engines(CheckpointPlan(busy=busy), files=held)
        train(engine, batches, 0, 1)
        held.opened.clear()
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


def test_a_failed_write_is_logged_at_the_next_step_and_raised_at_the_next_save(engines, tmp_path, caplog):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    gate = Gate("payload_fsynced")
    engine, batches, lazy = engines(CheckpointPlan(), files=gate, block_bytes=65536)
    train(engine, batches, 0, 1)
    gate.opened.set()
    engine.save_checkpoint(str(tmp_path), tag="good")
    lazy.wait()
    gate.opened.clear()
    gate.then = fail
    engine.save_checkpoint(str(tmp_path), tag="bad")
    gate.opened.set()
    lazy._job.wait()
    lazy.wait_for_reading()  # as a switch to another plan does
    train(engine, batches, 1, 3)
    assert caplog.text.count("'bad' of step 1 failed in the background") == 1
    gate.then = lambda: None
    with pytest.raises(CheckpointError, match=r"'bad'.*failed in the background") as raised:
        engine.save_checkpoint(str(tmp_path), tag="next")
    assert isinstance(raised.value.__cause__, OSError)
    train(engine, batches, 3, 4)  # the error is raised once, and training may continue
    engine.save_checkpoint(str(tmp_path), tag="after")
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "after"


def test_a_folder_that_cannot_be_made_is_named(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"needs the folder .*file/below, which cannot be made: Not a directory"):
        engine.save_checkpoint(str(tmp_path / "file" / "below"), tag="bad")
    engine.save_checkpoint(str(tmp_path), tag="good")
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "good"


def test_a_failure_behind_the_commit_does_not_deny_the_checkpoint(engines, tmp_path):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    gate = Gate("trash_renamed", fail)
    engine, batches, lazy = engines(CheckpointPlan(keep=1), files=gate)
    gate.opened.set()
    for number in range(2):
        train(engine, batches, number, number + 1)
        engine.save_checkpoint(str(tmp_path))
        lazy._job.wait()
    with pytest.raises(CheckpointError, match=r"'global_step2'.*was committed, but older checkpoints could not be del"):
        lazy.wait()
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert verify(tmp_path, "global_step2") == []


def test_a_function_is_called_after_whole_steps_and_not_after_micro_batches(engines):
    engine, batches, _ = engines()
    engine.set_train_batch_size(2 * engine.train_batch_size())
    assert engine.gradient_accumulation_steps() == 2
    seen = []
    call_after_step(engine, lambda: seen.append((engine.global_steps, engine.micro_steps)))
    train(engine, batches, 0, 6)
    assert seen == [(1, 2), (2, 4), (3, 6)]


def flip(victim):
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)


def test_a_save_never_replaces_a_file(engines, tmp_path):
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    engine, _, lazy = engines(CheckpointPlan())
    (tmp_path / "best").write_text("my notes")
    (tmp_path / "link").symlink_to("nowhere")
    for tag in ("best", "link"):
        with pytest.raises(CheckpointError, match=rf"needs the folder .*/{tag}, but a file has this name: move the"):
            engine.save_checkpoint(str(tmp_path), tag=tag)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "link"]
    assert (tmp_path / "best").read_text() == "my notes"
    assert (tmp_path / "link").is_symlink()
    engine.save_checkpoint(str(tmp_path), tag="other")
    assert lazy.wait().tag == "other"


def test_a_save_over_a_link_to_a_folder_replaces_only_the_link(engines, tmp_path):
    engine, _, lazy = engines(CheckpointPlan())
    engine.save_checkpoint(str(tmp_path), tag="first")
    lazy.wait()
    before = sorted((tmp_path / "first").rglob("*"))
    (tmp_path / "best").symlink_to("first")
    engine.save_checkpoint(str(tmp_path), tag="best")
    lazy.wait()
    assert not (tmp_path / "best").is_symlink()
    assert sorted((tmp_path / "first").rglob("*")) == before
    assert not [path for path in tmp_path.iterdir() if path.is_symlink()]
    for tag in ("first", "best"):
        assert engine.load_checkpoint(str(tmp_path), tag=tag)[0]


def test_latest_is_the_law(engines, tmp_path):
    # A load without a tag takes the checkpoint that ``latest`` names, even if a newer one exists.
    engine, batches, lazy = engines(CheckpointPlan(interval_steps=1, dir=str(tmp_path)))
    train(engine, batches, 0, 2)
    engine.save_checkpoint(str(tmp_path), tag="aside", save_latest=False)
    lazy.wait()
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert Path(path).parent.name == "global_step2"
    (tmp_path / "latest").write_text("global_step1\n")
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert Path(path).parent.name == "global_step1"
    assert engine.global_steps == 1
    (tmp_path / "latest").unlink()
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)


def test_a_newer_checkpoint_of_deepspeed_is_the_one_loaded(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    stock, batches, _ = engines()
    train(stock, batches, 0, 3)
    stock.save_checkpoint(str(tmp_path))
    stock.destroy()
    engine, _, lazy = engines(CheckpointPlan())
    engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == 3


def test_a_damaged_target_is_an_error_that_names_the_newest_good_one(engines, tmp_path):
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    engine, batches, lazy = engines(CheckpointPlan(interval_steps=1, dir=str(tmp_path)))
    train(engine, batches, 0, 3)
    lazy.wait()
    flip(next((tmp_path / "global_step3").glob("*optim_states.pt")))
    (tmp_path / "global_step2/ebbtide.json").unlink()
    good = r"(?s)were altered.*global_step1 of step 1 .*tag='global_step1'"
    for tag in (None, "global_step3"):
        with pytest.raises(CheckpointError, match=good):
            engine.load_checkpoint(str(tmp_path), tag=tag)
    with pytest.raises(CheckpointError, match=r"(?s)never committed.*global_step1 of step 1"):
        engine.load_checkpoint(str(tmp_path), tag="global_step2")
    (tmp_path / "latest").write_text("nothing")
    with pytest.raises(CheckpointError, match=r"(?s)no such folder.*global_step1 of step 1"):
        engine.load_checkpoint(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*in (beta|prototype) s", "ignore:.*quantize")
def test_what_people_put_into_client_state_comes_back(engines, tmp_path):
    inner = torch.arange(3)
    state = {
        "args": Namespace(lr=1e-3, layers=[1, 2], weights=inner),
        "where": tmp_path,
        "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "took": dt.timedelta(seconds=3),
        "numpy": np.arange(4.0),
        "names": np.array(["a", "b"]),
        "scalar": np.float32(2.5),
        "random": (random.getstate(), np.random.get_state()),
        "best": collections.deque([1, 2], 3),
        "seen": collections.defaultdict(list, a=[inner]),
        "set": {1, 2},
        "sparse": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(torch.eye(3), 0.5, 0, torch.qint8),
    }
    generator = np.random.default_rng(5)
    expected = np.random.default_rng(5).random()
    engine, batches, lazy = engines(CheckpointPlan())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save_checkpoint(str(tmp_path), client_state={**state, "generator": generator})
    _, loaded = engine.load_checkpoint(str(tmp_path))
    for name in ("where", "when", "took", "scalar", "best", "set"):
        assert loaded[name] == state[name], name
        assert type(loaded[name]) is type(state[name]), name
    assert np.array_equal(loaded["numpy"], state["numpy"])
    assert list(loaded["names"]) == ["a", "b"]
    assert np.array_equal(loaded["random"][1][1], state["random"][1][1])
    assert loaded["random"][0] == state["random"][0]
    assert torch.equal(loaded["args"].weights, inner)
    assert torch.equal(loaded["seen"]["a"][0], inner)
    assert loaded["seen"].default_factory is list
    assert loaded["generator"].random() == expected
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["nested"].to_padded_tensor(2.0), torch.tensor([[0.0, 0, 2], [1, 1, 1]]))
    assert torch.equal(loaded["quantized"].dequantize(), torch.eye(3))


class Unknown:
    pass


def test_what_could_not_be_loaded_is_said_at_save_with_its_name(engines, tmp_path):
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    engine, _, lazy = engines(CheckpointPlan())
    with pytest.warns(UserWarning, match=r"test_engine\.Unknown"):
        engine.save_checkpoint(str(tmp_path), client_state={"mine": Unknown()})
    with pytest.raises(CheckpointError, match=r"test_engine\.Unknown"):
        engine.load_checkpoint(str(tmp_path))
    with torch.serialization.safe_globals([Unknown]):
        _, loaded = engine.load_checkpoint(str(tmp_path))
    assert isinstance(loaded["mine"], Unknown)


@pytest.mark.filterwarnings("ignore:.*prototype s")
def test_only_the_name_of_an_object_is_said_also_beside_a_nested_tensor():
    for beside in ({}, {"nested": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)])}):
        layout = lay_out({"mine": Unknown(), **beside}, LiveState(), stream_device=False)
        assert layout.unreadable == f"{__name__}.Unknown"


def as_a_trainer(function):
    """Call a function from a stack frame of the module ``transformers.trainer``, as if the Hugging Face
    Trainer called it, and return its result.
    """
    space = {"__name__": "transformers.trainer", "function": function}
    exec("def call(): return function()", space)
    return space["call"]()


def test_under_a_trainer_a_save_returns_with_its_files_in_place(engines, tmp_path):
    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    expected = bits(engine)
    as_a_trainer(lambda: engine.save_checkpoint(str(tmp_path)))
    with ours():
        assert (tmp_path / "latest").read_text() == "global_step1"
        before = (tmp_path / "global_step1/ebbtide.json").stat().st_ino
    as_a_trainer(lambda: engine.save_checkpoint(str(tmp_path)))  # the Trainer saves each checkpoint twice
    lazy.wait()
    assert (tmp_path / "global_step1/ebbtide.json").stat().st_ino == before
    assert not (tmp_path / ".ebbtide").exists()
    train(engine, batches, 1, 2)
    as_a_trainer(lambda: engine.save_checkpoint(str(tmp_path)))
    engine.load_checkpoint(str(tmp_path), tag="global_step1")
    assert same(bits(engine), expected)


def test_a_failure_to_place_is_raised_by_the_save_itself(engines, tmp_path):
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    files = FaultyFiles(lasting=True)
    engine, batches, lazy = engines(CheckpointPlan(mode="in_place"), files=files)
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="good")
    lazy.wait()  # so that the fault hits the next checkpoint
    files.at = len(files.calls) + 15
    with pytest.raises((CheckpointError, OSError)):
        engine.save_checkpoint(str(tmp_path), tag="bad")
    assert files.fired
    files.armed = False
    engine.load_checkpoint(str(tmp_path))
    assert (tmp_path / "latest").read_text() == "good"


def test_a_forked_child_that_ends_does_not_wait_for_its_parents_writers(engines, tmp_path, held):
    engine, batches, lazy = engines(CheckpointPlan(), files=held)
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    pid = os.fork()
    if pid == 0:
        lazy.close()  # atexit calls this method
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lazy.wait()
    assert (tmp_path / "latest").read_text() == "global_step1"


@pytest.mark.parametrize("error", [None, OSError("the disk is full")])
def test_what_a_trainer_never_completed_stays_marked_if_an_error_ends_the_run(engines, tmp_path, monkeypatch, error):
    monkeypatch.setattr("ebbtide.runtime.checkpoint.deepspeed.engine.foreign_trainer", lambda: "transformers")
    engine, batches, lazy = engines(CheckpointPlan(mode="sync"))
    train(engine, batches, 0, 1)
    folder = tmp_path / "checkpoint-1"
    engine.save_checkpoint(str(folder))
    for name in ("last_value", "last_exc"):  # Python sets these for an uncaught exception
        monkeypatch.setattr(sys, name, error, raising=False)
    lazy.close()
    assert (folder / ".ebbtide").exists() == (error is not None)


def test_signatures_stay(engines):
    import inspect

    engine, _, _ = engines(CheckpointPlan())
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert "load_module_only" in inspect.signature(engine.load_checkpoint).parameters


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("which", ["*optim_states.pt", "*model_states.pt"])
def test_malicious_pickles_are_refused(engines, tmp_path, which):
    # The test first leaves the checkpoint's hashes unchanged, so that they do not match the changed file. It then
    # deletes the manifest, as an attacker may do. The folder now looks like a checkpoint of DeepSpeed, which has no
    # hashes.
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    engine, batches, lazy = engines(CheckpointPlan())
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="t")
    lazy.wait()
    mark = tmp_path / "executed"
    victim = next((tmp_path / "t").glob(which))
    torch.save({"module": Evil(str(mark)), "mp_world_size": 1}, victim)
    torch.load(victim, weights_only=False)
    assert mark.exists(), "the payload must run when it is loaded without ebbtide"
    mark.rmdir()
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(tmp_path), tag="t")
    (tmp_path / "t/ebbtide.json").unlink()
    shutil.rmtree(tmp_path / "t/ebbtide")
    with pytest.raises(CheckpointError, match="weights_only"):
        engine.load_checkpoint(str(tmp_path), tag="t")
    for only_module in (True, False):
        with pytest.raises(Exception):  # noqa: B017, PT011 - DeepSpeed's own paths, too
            engine.load_checkpoint(str(tmp_path), tag="t", load_module_only=only_module, load_optimizer_states=False)
    assert not mark.exists()


def test_destroy_finishes_the_running_checkpoint(engines, tmp_path, held):
    engine, batches, lazy = engines(CheckpointPlan(), files=held)
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    assert lazy.running
    engine.destroy()
    assert (tmp_path / "latest").read_text() == "global_step1"


def test_tags_that_are_no_folder_names_are_refused(engines, tmp_path):
    from ebbtide.runtime.checkpoint.errors import CheckpointError

    engine, _, lazy = engines(CheckpointPlan())
    for tag in ("a/b", ".hidden", "latest", ""):
        with pytest.raises(CheckpointError, match="a tag must name a folder"):
            engine.save_checkpoint(str(tmp_path), tag=tag)


def test_16_bit_export_is_written_at_once(engines, tmp_path):
    engine, _, lazy = engines(CheckpointPlan(), stage3_gather_16bit_weights_on_model_save=True)
    engine.save_16bit_model(str(tmp_path))
    assert [p.name for p in tmp_path.glob("*.tmp")] == []
    assert any(tmp_path.iterdir())


def test_a_failed_16_bit_export_leaves_no_file(engines, tmp_path, monkeypatch):
    def fill(state_dict, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "planted")

    engine, _, lazy = engines(CheckpointPlan(), stage3_gather_16bit_weights_on_model_save=True)
    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(OSError, match="planted"):
        engine.save_16bit_model(str(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_what_every_checkpoint_holds_needs_no_closer_look(engines, tmp_path, monkeypatch):
    # A trial shows whether the file can be loaded, but takes time that training waits for.
    from ebbtide.runtime.checkpoint.format import skeleton

    looks = []
    monkeypatch.setattr(skeleton, "unreadable", lambda path: looks.append(path) or "")
    engine, batches, lazy = engines(CheckpointPlan(dir=str(tmp_path)))
    train(engine, batches, 0, 1)
    engine.save_checkpoint(str(tmp_path), client_state={"seen": collections.Counter(a=1)})
    lazy.wait()
    assert looks == []
