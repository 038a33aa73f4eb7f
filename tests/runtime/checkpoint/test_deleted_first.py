"""Tests of a training loop that deletes its older checkpoint before it saves the next one, and is killed
between the deletion and the commit.
"""

import os
import shutil
import signal

import pytest
from ebbtide.runtime.checkpoint.deepspeed.engine import _over
from ebbtide.runtime.checkpoint.protocol import rotation
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.checkpoint.trainers import bystanders, deleted_first
from ebbtide.runtime.checkpoint.trainers.bystanders import guard, ours

from tests.runtime.checkpoint.conftest import Bench, Gate, some_state
from tests.runtime.checkpoint.test_rotation import Cut, cut_at, die, fail, guarded, killed, saved

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a child process")
bystanders.watch()


def killing(**_):
    die()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return an empty folder for checkpoints, like the one in which Accelerate keeps its checkpoints."""
    monkeypatch.setattr(deleted_first, "_used", set())
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def save(folder, step, at, then):
    gate = Gate(at, then)
    job = Bench(folder).begin(some_state(step), "state", step=step, files=gate, nonce="next")
    job._when_over = lambda: _over(job)
    guard(job)
    job.start()
    gate.opened.set()
    assert job.wait(30)
    return job


def delete_then_save(root, new, at, then):
    deleted_first.remember(root / "checkpoint_0")
    shutil.rmtree(root / "checkpoint_0")
    return save(root / new, 20, at, then)


@pytest.mark.parametrize("new", ["checkpoint_1", "checkpoint_0"])
@pytest.mark.parametrize("at", ["first_block", "voted", "sealed"])
def test_a_kill_before_the_commit_gives_the_older_one_back(root, at, new):
    saved(root / "checkpoint_0", 10)
    assert killed(lambda: delete_then_save(root, new, at, die)) == -signal.SIGKILL
    with ours():
        assert not (root / "checkpoint_0/latest").exists(), "the older checkpoint must have been deleted"
    assert os.listdir(root) == ["checkpoint_0"], "a run that lists the folder must find the older checkpoint"
    assert verify(root / "checkpoint_0", "state") == []
    assert (root / "checkpoint_0/trainer_state.json").read_text() == '{"step": 10}'
    assert os.listdir(root.parent) == ["checkpoints"], "nothing else may be left"


@pytest.mark.parametrize("new", ["checkpoint_1", "checkpoint_0"])
def test_a_kill_while_it_is_given_back_is_made_good_by_the_next_run(root, monkeypatch, new):
    saved(root / "checkpoint_0", 10)
    assert killed(lambda: delete_then_save(root, new, "voted", die)) == -signal.SIGKILL
    for number in range(1, 100):
        again = root.parent / f"again_{number}"
        with ours():
            shutil.copytree(root.parent, again, ignore=shutil.ignore_patterns("again_*"))
        with monkeypatch.context() as patch:
            cut_at(patch, number)
            try:
                os.listdir(again / "checkpoints")
                cut = False
            except Cut:
                cut = True
        again = again.rename(f"{again}_and_again")  # under its old name, the folder would be remembered as settled
        assert os.listdir(again / "checkpoints") == ["checkpoint_0"], number
        assert verify(again / "checkpoints/checkpoint_0", "state") == [], number
        left = rotation.twin(again / "checkpoints")  # an empty folder, which another rank may be filling
        assert not any(left.rglob("*")), number
        if not cut:
            break
    assert number > 3, "the resume must have changed the filesystem"


def test_after_the_commit_it_is_gone(root):
    saved(root / "checkpoint_0", 10)
    delete_then_save(root, "checkpoint_1", "voted", lambda: None)
    assert os.listdir(root) == ["checkpoint_1"]
    assert os.listdir(root.parent) == ["checkpoints"]


def test_of_two_engines_the_last_to_commit_gives_the_older_one_up(root):
    saved(root / "checkpoint_0", 10)

    def one_of_two():
        deleted_first.remember(root / "checkpoint_0")
        shutil.rmtree(root / "checkpoint_0")
        slow = guarded(Bench(root / "checkpoint_1/two"), some_state(21), "state", Gate("voted"))
        save(root / "checkpoint_1/one", 20, "voted", lambda: None)
        assert slow.running
        die()

    assert killed(one_of_two) == -signal.SIGKILL
    assert sorted(os.listdir(root)) == ["checkpoint_0", "checkpoint_1"]
    assert verify(root / "checkpoint_0", "state") == []


def test_a_failed_save_undoes_the_deletion_at_once(root):
    saved(root / "checkpoint_0", 10)
    job = delete_then_save(root, "checkpoint_1", "payload_fsynced", fail)
    assert "planted" in str(job.failure)
    assert verify(root / "checkpoint_0", "state") == []
    assert os.listdir(root.parent) == ["checkpoints"]


def test_a_kill_right_after_the_commit_does_not_undo_it(root, monkeypatch):
    saved(root / "checkpoint_0", 10)
    monkeypatch.setattr(deleted_first, "settle", killing)
    assert killed(lambda: delete_then_save(root, "checkpoint_0", "voted", lambda: None)) < 0
    with ours():
        assert rotation.twin(root).exists(), "the kill must come before the older checkpoint is given up"
    assert os.listdir(root) == ["checkpoint_0"]
    assert not (root / "checkpoint_0/trainer_state.json").exists(), "the newer checkpoint must have the name"
    assert verify(root / "checkpoint_0", "state") == []
    assert os.listdir(root.parent) == ["checkpoints"]


def test_others_checkpoints_just_go(root):
    # A script may clear away the checkpoints of an earlier experiment, and these must not be restored.
    saved(root / "checkpoint_0", 10)
    shutil.rmtree(root / "checkpoint_0")
    assert os.listdir(root) == []
    assert os.listdir(root.parent) == ["checkpoints"]


def test_what_a_load_finds(root):
    # ebbtide keeps a copy of the deleted checkpoint until that commit. It restores the checkpoint from the copy when a
    # script lists the folder of checkpoints. A script that loads by path may not list this folder, so the load, too,
    # must restore the checkpoint.
    from ebbtide.runtime.checkpoint.deepspeed.loading import Resumption
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints
    from ebbtide.runtime.checkpoint.protocol.peers import Peers

    saved(root / "checkpoint_0", 10)
    status = killed(lambda: delete_then_save(root, "checkpoint_0", "voted", die))
    assert status == -signal.SIGKILL
    with ours():
        assert Resumption(Peers(10.0)).choose(root / "checkpoint_0", None) == "state"
    assert [entry.step for entry in list_checkpoints(root / "checkpoint_0")] == [10]


def test_whoever_lists_while_the_commit_takes_the_notes_away(root, monkeypatch):
    saved(root / "checkpoint_0", 10)
    deleted_first.remember(root / "checkpoint_0")
    shutil.rmtree(root / "checkpoint_0")
    anybody = rotation._anybody

    def late(notes):
        deleted_first.settle(committed=True)
        return anybody(notes)

    monkeypatch.setattr(rotation, "_anybody", late)
    rotation.settle_below(root)
    assert os.listdir(root) == []
    assert os.listdir(root.parent) == ["checkpoints"]
