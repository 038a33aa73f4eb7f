"""Tests of checkpoints whose optimizer state is on a drive: a save commits this state, and a load resumes
from it, without copying it.
"""

import threading
import time
from contextlib import suppress

import ebbtide.runtime.storage.reader
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from ebbtide.runtime import session_of
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.trainers.limits import TrainersLimit
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.execution import stored as stored_state
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.storage.folder import list_checkpoints
from ebbtide.runtime.storage.reader import export, stored_problems
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.simulator import CheckpointPlan, OpKind
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.schedules.footprint import tally
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.way import Way

from studies.bench.bits import differences
from tests.runtime.contract.training import DEVICES, all_state, assert_same, attached, outcome, plan_for, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
LAST = list(DEVICES)[-1]


def stored(folder, pattern=("stored",), keep=1):
    checkpoint = CheckpointPlan(keep=keep, copy_budget_bytes=2**22)
    return attached(start(), list(pattern), LAST, storage_dir=str(folder / "state"), checkpoint=checkpoint)


def saved(folder, steps, pattern=("stored",), keep=1):
    """Train with optimizer state on a drive, and save a checkpoint after each of the last ``keep`` steps."""
    engine = stored(folder, pattern, keep)
    train(engine, steps - keep)
    for number in range(steps - keep, steps):
        train(engine, 1, first=number)
        engine.save_checkpoint(folder / "ck")
    engine.destroy()


def store_of(engine):
    return session_of(engine)._store


def undisturbed(steps, first):
    stock = start()
    train(stock, first)
    return outcome(stock, steps, first=first)


def test_a_save_does_not_wait_for_what_is_on_its_way_to_storage(tmp_path):
    # A save returns although the last step's optimizer state is not yet on the drive.
    engine, may_write = stored(tmp_path), threading.Event()
    train(engine, 2)
    engine.optimizer.wait()
    executor = session_of(engine).executor
    executor.gradients.before_op = lambda op: op.kind is OpKind.STATE_WRITE and may_write.wait(30)
    train(engine, 1, first=2)
    late = threading.Timer(10, may_write.set)
    late.start()
    engine.save_checkpoint(tmp_path / "ck")
    assert not may_write.is_set()
    may_write.set()
    late.cancel()
    engine.checkpoint_engine.wait()
    engine.destroy()

    again = stored(tmp_path)
    again.load_checkpoint(tmp_path / "ck")
    assert_same(outcome(again, 2, first=3), undisturbed(2, 3))


@pytest.mark.parametrize("pattern", [["stored"], ["stored", "host"]])
def test_a_checkpoint_has_no_byte_of_what_is_stored_and_a_resume_writes_none(pattern, tmp_path):
    engine = stored(tmp_path, pattern)
    train(engine, 3)
    engine.optimizer.wait()
    written, states = store_of(engine).written_bytes, session_of(engine).executor.states
    engine.save_checkpoint(tmp_path / "ck")
    engine.checkpoint_engine.wait()
    assert store_of(engine).written_bytes == written
    in_memory = sum(s.elements for s in states if s.placement == "host")
    (file,) = (tmp_path / "ck").glob("*/*optim_states.pt")
    assert 12 * in_memory < file.stat().st_size < 12 * in_memory + 60_000
    assert 12 * (sum(s.elements for s in states) - in_memory) > 60_000
    engine.destroy()
    again = stored(tmp_path, pattern)
    begun = store_of(again).written_bytes
    again.load_checkpoint(tmp_path / "ck")
    assert store_of(again).written_bytes == begun
    assert store_of(again).read_bytes == 0  # moments are read and checked in the first step
    assert_same(outcome(again, 3, first=3), undisturbed(3, 3))


def test_training_goes_on_beside_each_steps_checkpoint_and_the_newest_can_be_gone_back_to(tmp_path):
    engine = stored(tmp_path)
    losses, _ = train(engine, 5, each=lambda e, _: e.save_checkpoint(tmp_path / "ck"))
    engine.load_checkpoint(tmp_path / "ck", tag="global_step5")
    assert_same(outcome(engine, 2, first=5), undisturbed(2, 5))
    stock = start()
    assert torch.equal(torch.stack(losses), torch.stack(train(stock, 5)[0]))
    stock.destroy()


@pytest.mark.parametrize("pattern", [["stored"], ["stored", "host"]])
def test_a_run_that_goes_back_lets_no_update_under_way_write_behind_it(pattern, tmp_path):
    engine = stored(tmp_path, pattern)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "ck")
    engine.checkpoint_engine.wait()

    def late(op):
        if op.kind == OpKind.STATE_WRITE:
            time.sleep(0.05)

    session_of(engine).executor.gradients.before_op = late
    train(engine, 2, first=1)
    engine.load_checkpoint(tmp_path / "ck", tag="global_step1")
    assert_same(outcome(engine, 2, first=1), undisturbed(2, 1))


def test_kept_steps_stay_and_a_resume_from_the_older_one_passes_the_newer_one_over(tmp_path):
    saved(tmp_path, 4, keep=2)
    engine = stored(tmp_path, keep=2)
    session = session_of(engine)
    (extents,) = (tmp_path / "state").glob("*.extents")
    sizes, padding = session.engine.sizes(), 4096 * 3 * 3 * session.plan.subgroup_count
    held = Holding.of(ADAM, 2, 2, kept=2).bytes(tally(zip(sizes, Way.each(session.plan.placements), strict=True)), 0)
    assert held["storage"] <= extents.stat().st_size <= held["storage"] + padding
    engine.load_checkpoint(tmp_path / "ck", tag="global_step3")
    train(engine, 1, first=3)
    engine.save_checkpoint(tmp_path / "ck")  # replaces the checkpoint that was skipped
    engine.checkpoint_engine.wait()
    assert [record.step for record in store_of(engine).steps] == [4, 3]
    for step in (4, 3):
        engine.load_checkpoint(tmp_path / "ck", tag=f"global_step{step}")
        stock = start()
        train(stock, step)
        assert differences(all_state(engine), all_state(stock)) == ()
        stock.destroy()
    engine.destroy()


@pytest.mark.parametrize(("keep", "said"), [(0, 1), (1, 0), (2, 0)])
def test_what_cannot_be_kept_is_said_at_the_start(tmp_path, caplog, keep, said):
    with caplog.at_level("WARNING", "ebbtide"):
        engine = stored(tmp_path, keep=keep)
    assert (
        caplog.text.count("checkpoint.keep is 0, but the drives hold the optimizer state of only 1 checkpoint") == said
    )
    engine.destroy()


@pytest.mark.parametrize(("keep", "limit", "said"), [(2, None, True), (2, 3, True), (2, 2, False), (0, 2, False)])
def test_a_trainer_that_keeps_more_than_the_drives_is_told(tmp_path, monkeypatch, caplog, keep, limit, said):
    monkeypatch.setattr(stored_state, "trainers_limit", lambda: TrainersLimit(limit))
    with caplog.at_level("WARNING", "ebbtide"):
        engine = stored(tmp_path, keep=keep)
    told = f"the trainer keeps {limit or 'all'} checkpoints, but the drives hold the optimizer state of only 2"
    assert (told in caplog.text) is said
    engine.destroy()


@pytest.mark.parametrize("keep", [1, 3])
def test_another_number_of_kept_checkpoints_is_refused_in_the_keys_words(tmp_path, keep):
    saved(tmp_path, 3, keep=2)
    with pytest.raises(StorageError, match=rf"state of 2 checkpoints, but checkpoint.keep asks for {keep}\. Set"):
        stored(tmp_path, keep=keep)


def test_without_a_number_a_run_goes_on_with_that_of_the_store(tmp_path):
    saved(tmp_path, 4, keep=2)
    engine = stored(tmp_path, keep=0)
    for step in (3, 4):
        engine.load_checkpoint(tmp_path / "ck", tag=f"global_step{step}")
    engine.destroy()


def test_a_checkpoint_whose_state_was_written_over_is_refused_and_the_newest_named(tmp_path):
    engine = stored(tmp_path, keep=0)  # no checkpoint is deleted, but only one step's state is kept
    for tag in ("global_step2", "other"):
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "ck", tag=tag)
    engine.checkpoint_engine.wait()
    told = [(e.tag, e.status.partition(" in ")[0]) for e in list_checkpoints(tmp_path / "ck")]
    assert told == [("other", "committed"), ("global_step2", "cannot be loaded: the state of step 2")]
    with pytest.raises(CheckpointError, match=r"overwritten by later .*newest .*ck/other"):
        engine.load_checkpoint(tmp_path / "ck", tag="global_step2")
    engine.load_checkpoint(tmp_path / "ck", tag="other")
    engine.destroy()


def test_a_run_that_resumes_from_nothing_writes_over_no_checkpoint(tmp_path):
    saved(tmp_path, 2)
    engine = stored(tmp_path)
    with pytest.raises(StorageError, match=r"steps \[2\].* did not resume from"):
        train(engine, 1)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same(outcome(engine, 2, first=2), undisturbed(2, 2))


def test_a_flipped_bit_is_found_when_it_is_loaded(tmp_path):
    saved(tmp_path, 2)
    engine = stored(tmp_path)
    extents = tmp_path / "state/rank_00000.extents"
    content = bytearray(extents.read_bytes())
    assert stored_problems(tmp_path / "ck/global_step2") == []
    engine.load_checkpoint(tmp_path / "ck")
    state = session_of(engine).executor.states[1].p.numpy().tobytes()
    content[content.index(state) + 1000] ^= 4
    extents.write_bytes(content)
    assert "is damaged: its hash" in stored_problems(tmp_path / "ck/global_step2")[0]
    with pytest.raises(CheckpointError, match=r"subgroup 1 at step 2 .* is damaged: its hash"):
        engine.load_checkpoint(tmp_path / "ck")
    engine.destroy()


@pytest.fixture
def flipped_moment(tmp_path):
    """Save a checkpoint with optimizer state on a drive, flip one bit of a moment there, and return the folder."""
    saved(tmp_path, 2)
    engine = stored(tmp_path)
    engine.load_checkpoint(tmp_path / "ck")
    moment = session_of(engine).executor.states[1].state[2].numpy().tobytes()
    engine.destroy()
    extents = tmp_path / "state/rank_00000.extents"
    content = bytearray(extents.read_bytes())
    content[content.index(moment) + 1000] ^= 4
    extents.write_bytes(content)
    return tmp_path


def step_on(engine):
    train(engine, 2, first=2)
    engine.optimizer.wait()


def look(engine):
    parameters = engine.module.parameters()
    assert all(safe_get_full_optimizer_state(p, "exp_avg_sq") is not None for p in parameters)


def move(engine):
    switch_plan(engine, plan_for(engine, ["host"]))


@pytest.mark.parametrize("use", [step_on, look, move])
def test_a_flipped_bit_of_a_moment_is_found_before_it_is_used(use, flipped_moment):
    engine = stored(flipped_moment)
    engine.load_checkpoint(flipped_moment / "ck")
    with pytest.raises((BackgroundError, DamagedError)) as caught:
        use(engine)
    assert "is damaged: its hash" in f"{caught.value} {caught.value.__cause__}"
    with suppress(BackgroundError):
        engine.destroy()


def test_a_flipped_bit_of_a_moment_is_found_by_another_plan_when_it_is_loaded(flipped_moment):
    engine = attached(start(), ["host"], LAST)
    with pytest.raises(CheckpointError, match=r"subgroup 1 at step 2 .* is damaged: its hash"):
        engine.load_checkpoint(flipped_moment / "ck")
    engine.destroy()


def test_a_folder_that_has_moved_is_resumed_from_and_one_that_is_missed_is_named(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / "state").rename(tmp_path / "elsewhere")
    lost = stored(tmp_path)  # makes a new store in the old folder
    with pytest.raises(CheckpointError, match=r"must be in .*/state, .*Move the folder with"):
        lost.load_checkpoint(tmp_path / "ck")
    lost.destroy()
    found = attached(
        start(), ["stored"], LAST, storage_dir=str(tmp_path / "elsewhere"), checkpoint=CheckpointPlan(keep=1)
    )
    found.load_checkpoint(tmp_path / "ck")
    assert_same(outcome(found, 2, first=2), undisturbed(2, 2))


def test_two_engines_store_in_folders_of_their_own_and_never_in_one(tmp_path):
    one, other = (stored(tmp_path / name) for name in ("one", "other"))
    third = start()
    with pytest.raises(StorageError, match=r"belongs to one run at a time, .* is locked by"):
        attached(third, ["stored"], LAST, storage_dir=str(tmp_path / "one/state"))
    third.destroy()
    for number in range(3):
        for engine, name in ((one, "one"), (other, "other")):
            train(engine, 1, first=number)
            engine.save_checkpoint(tmp_path / name / "ck")
    for engine, name in ((one, "one"), (other, "other")):
        engine.load_checkpoint(tmp_path / name / "ck")
        assert_same(outcome(engine, 2, first=3), undisturbed(2, 3))


def test_another_plan_reads_what_is_stored_from_where_it_lies(tmp_path):
    saved(tmp_path, 3, ["stored", "host"])
    ours = attached(start(), ["host", "device"], LAST)
    ours.load_checkpoint(tmp_path / "ck")
    assert_same(outcome(ours, 2, first=3), undisturbed(2, 3))


def test_what_training_writes_over_meanwhile_leaves_no_export(tmp_path, monkeypatch):
    saved(tmp_path, 2)
    engine = stored(tmp_path)
    engine.load_checkpoint(tmp_path / "ck")

    def write(*args):
        train(engine, 1, first=engine.global_steps)
        engine.save_checkpoint(tmp_path / "other")
        engine.checkpoint_engine.wait()
        stock_write(*args)

    stock_write = ebbtide.runtime.storage.reader._write
    monkeypatch.setattr(ebbtide.runtime.storage.reader, "_write", write)
    with pytest.raises(StorageError, match=r"step 2 .* was overwritten"):
        export(tmp_path / "ck", "global_step2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    engine.destroy()
