"""Tests of checkpoints when a trainer deletes an older checkpoint while a newer one is being written. In most tests the
process is then killed.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ebbtide.runtime.checkpoint import files
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol import rotation
from ebbtide.runtime.checkpoint.protocol.commit import Deferred
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.runtime.checkpoint.trainers import bystanders, trainers_folder
from ebbtide.runtime.checkpoint.trainers.bystanders import guard, ours, release

from tests.runtime.checkpoint.conftest import Bench, FaultyFiles, Gate, some_state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a child process")
bystanders.watch()  # as `ebbtide.enable` and `install` do


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError("planted")


def guarded(bench, state, tag, files):
    """Start a checkpoint save as the engine does, with file operations that pause the save. Return the save
    once it has paused.
    """
    job = bench.begin(state, tag, files=files, nonce="next")  # the engine's nonces are random, this one is given
    job._when_over = lambda: release(job)
    guard(job)
    job.start()
    assert files.reached.wait(30)
    return job


def killed(action):
    """Run ``action`` in a forked child, and return the child's exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def saved(folder, step):
    bench = Bench(folder)
    bench.save(some_state(step), "state", step=step)
    (folder / "trainer_state.json").write_text(f'{{"step": {step}}}')
    return bench


def rotate_while_saving(root, at, then, rotate=shutil.rmtree):
    """Save the checkpoint of step 20, and delete the folder with the checkpoint of step 10 while this save is paused.
    Return the save's job once the save has ended.

    A trainer that keeps each checkpoint in a folder of its own may delete an older checkpoint during a save.

    Args:
        at: Name of the point of the save at which it pauses.
        then: Function that the save calls after its pause. It may do nothing, raise an error or kill the process.
        rotate: Function that deletes the folder of step 10.
    """
    (root / "checkpoint-20").mkdir()
    gate = Gate(at, then)
    job = guarded(Bench(root / "checkpoint-20"), some_state(20), "state", gate)
    rotate(root / "checkpoint-10")
    (root / "checkpoint-20" / "trainer_state.json").write_text("{}")
    gate.opened.set()
    assert job.wait(30)
    return job


@pytest.mark.parametrize("at", ["first_block", "payload_fsynced", "voted", "sealed"])
def test_a_kill_during_rotation_leaves_the_older_checkpoint(tmp_path, at):
    saved(tmp_path / "checkpoint-10", 10)
    assert killed(lambda: rotate_while_saving(tmp_path, at, die)) == -signal.SIGKILL
    with ours():
        assert not (tmp_path / "checkpoint-10").exists(), "the trainer must have deleted the older checkpoint"
    assert os.listdir(tmp_path) == ["checkpoint-10"], "a run that lists the folder must find the older checkpoint"
    assert verify(tmp_path / "checkpoint-10", "state") == []
    assert (tmp_path / "checkpoint-10/trainer_state.json").read_text() == '{"step": 10}'
    assert (tmp_path / "checkpoint-10/.uncommitted_checkpoint-20/trainer_state.json").exists()


def test_killed_at_the_same_step_again_and_again(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    for _ in range(3):
        assert killed(lambda: rotate_while_saving(tmp_path, "voted", die)) == -signal.SIGKILL
        assert os.listdir(tmp_path) == ["checkpoint-10"]
    assert verify(tmp_path / "checkpoint-10", "state") == []


def test_a_kill_after_the_commit_leaves_the_newer_one(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    assert killed(lambda: rotate_while_saving(tmp_path, "latest_written", die)) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["checkpoint-20"]
    assert verify(tmp_path / "checkpoint-20", "state") == []
    assert not (tmp_path / "checkpoint-20" / rotation.NOTES).exists()


def half(folder):
    bystanders._heard("shutil.rmtree", (str(folder), None))  # the event with which shutil.rmtree begins
    next(folder.glob("state/*optim_states.pt")).unlink()


def test_a_failed_save_undoes_the_rotation_at_once(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    job = rotate_while_saving(tmp_path, "payload_fsynced", fail)
    assert "planted" in str(job.failure)
    assert verify(tmp_path / "checkpoint-10", "state") == []


def test_nothing_stays_behind_when_all_goes_well(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    rotate_while_saving(tmp_path, "payload_fsynced", lambda: None)
    assert os.listdir(tmp_path) == ["checkpoint-20"]
    assert sorted(os.listdir(tmp_path / "checkpoint-20")) == ["latest", "state", "trainer_state.json"]


def test_without_hard_links_the_deletion_waits_for_the_commit(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refused)
    saved(tmp_path / "checkpoint-10", 10)
    gate = Gate("payload_fsynced")
    job = guarded(Bench(tmp_path / "checkpoint-20"), some_state(20), "state", gate)
    seen = []
    rotating = threading.Thread(target=lambda: (shutil.rmtree(tmp_path / "checkpoint-10"), seen.append(job.running)))
    rotating.start()
    with ours():
        assert (tmp_path / "checkpoint-10/state/ebbtide.json").exists()
    gate.opened.set()
    rotating.join(30)
    assert seen == [False]
    assert not (tmp_path / "checkpoint-10").exists()


@pytest.mark.parametrize("at", ["half_written", "sealed"])
def test_tags_of_one_folder_rotate_too(tmp_path, at):
    folder = tmp_path / "run"
    Bench(folder).save(some_state(1), "a")

    def rotate():
        gate = Gate(at, die)
        job = guarded(Bench(folder), some_state(2), "b", gate)
        shutil.rmtree(folder / "a")
        gate.opened.set()
        job.wait(30)

    assert killed(rotate) == -signal.SIGKILL
    rotation.settle(folder)
    assert [entry.tag for entry in list_checkpoints(folder)] == ["a"]
    assert verify(folder, "a") == []
    assert (folder / "latest").read_text() == "a"


def test_a_live_process_is_left_alone(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    gate = Gate("payload_fsynced")
    job = guarded(Bench(tmp_path / "checkpoint-20"), some_state(20), "state", gate)
    shutil.rmtree(tmp_path / "checkpoint-10")
    listing = (
        "import sys, pathlib; from ebbtide.runtime.checkpoint.protocol.rotation import "
        "settle_below; settle_below(pathlib.Path(sys.argv[1]))"
    )
    with ours():
        subprocess.run([sys.executable, "-c", listing, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
        assert not (tmp_path / "checkpoint-10").exists()
    gate.opened.set()
    assert job.wait(30)
    assert job.failure is None


class Cut(BaseException):
    """An exception that stands for a kill: no code catches it, since it is not an ``Exception``."""


def cut_at(monkeypatch, number, cut=None):
    """Replace Python's functions that change the filesystem, so that one call raises `Cut`.

    Args:
        number: Number of the call that raises, counted from now on.
        cut: Function to call just before. None: no function.
    """
    left = [number]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if cut is not None:
                    cut()
                raise Cut
            return function(*args, **kwargs)

        return call

    for name in ("rename", "unlink", "rmdir", "mkdir", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(files, "_renamed", counted(files._renamed))


def torn(root):
    with ours():
        victim = next((root / "checkpoint-20/state").glob("*optim_states.pt"))
        victim.write_bytes(bytes(victim.stat().st_size))


def place_and_die(root):
    placed(root, "placed", lambda: None)
    shutil.rmtree(root / "checkpoint-10")
    die()


LEFT_BY_A_KILL = {  # kind of the first kill, and what the machine did then -> files that must exist
    "not committed": (lambda root: rotate_while_saving(root, "voted", die), None, 10),
    "committed": (lambda root: rotate_while_saving(root, "latest_written", die), None, 20),
    "torn": (place_and_die, torn, 10),
    "deleted by half": (lambda root: rotate_while_saving(root, "voted", die, half), None, 10),
}


@pytest.mark.parametrize("case", LEFT_BY_A_KILL)
def test_a_kill_anywhere_in_the_resume_is_made_good_by_the_next(tmp_path, monkeypatch, case):
    save, then, step = LEFT_BY_A_KILL[case]
    left = tmp_path / "left"
    saved(left / "checkpoint-10", 10)
    assert killed(lambda: save(left)) == -signal.SIGKILL
    if then is not None:
        then(left)
    for number in range(1, 100):
        root = tmp_path / str(number)
        with ours():
            shutil.copytree(left, root)
        with monkeypatch.context() as patch:
            cut_at(patch, number)
            try:
                os.listdir(root)
                cut = False
            except Cut:
                cut = True
        # Under its old name, the folder would be remembered as settled.
        root = root.rename(tmp_path / f"{number}-again")
        assert os.listdir(root) == [f"checkpoint-{step}"], number
        assert verify(root / f"checkpoint-{step}", "state") == [], number
        if not cut:
            break
    assert number > 3, "the resume must have changed the filesystem"


def placed(root, at, then):
    gate = Gate(at, then)
    bench = Bench(root / "checkpoint-20")
    real = bench.in_place = gate
    job = bench.begin(some_state(20), "state", files=Deferred(real), durably=real, nonce="next")
    job._when_over = lambda: release(job)
    guard(job)
    job.start()
    job.wait_until_placed()
    return gate, job


def test_placed_before_it_is_durable(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)

    def save_and_die():
        placed(tmp_path, "placed", lambda: None)
        assert (tmp_path / "checkpoint-20/latest").read_text() == "state"
        shutil.rmtree(tmp_path / "checkpoint-10")
        die()

    assert killed(save_and_die) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["checkpoint-20"]
    assert verify(tmp_path / "checkpoint-20", "state") == []


def test_two_ranks_place_and_sync_together(tmp_path):
    jobs = []
    for rank in range(2):
        real = Files()
        state = {f"part{rank}": some_state(rank)["optim_states"]}
        jobs.append(
            Bench(tmp_path).begin(state, "t", files=Deferred(real), durably=real, rank=rank, world_size=2, nonce="n")
        )
    for job in jobs:
        job.start()
    for job in jobs:
        job.wait_until_placed()
        assert (tmp_path / "latest").read_text() == "t"
    assert all(job.wait(30) and job.failure is None for job in jobs)
    assert verify(tmp_path, "t") == []
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]
    assert sorted(os.listdir(tmp_path / "t/ebbtide")) == ["rank_00000.json", "rank_00001.json"]


def test_a_rank_that_never_syncs_is_an_error_and_the_older_checkpoint_stays(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    real, jobs, gates = Files(), [], [Gate("placed") for _ in range(2)]
    for rank, gate in enumerate(gates):
        bench = Bench(tmp_path / "checkpoint-20")
        state = {f"part{rank}": some_state(rank)["optim_states"]}
        jobs.append(bench.begin(state, "t", files=Deferred(gate), durably=real, rank=rank, world_size=2, nonce="n"))
    guard(jobs[0])
    for job in jobs:
        job.start()
    for job in jobs:
        job.wait_until_placed()
    shutil.rmtree(tmp_path / "checkpoint-10")
    jobs[0]._commit._deadline_s = 0.5
    gates[0].opened.set()
    assert jobs[0].wait(30)
    release(jobs[0])
    assert "rank 1 did not report its files as synced" in str(jobs[0].failure)
    gates[1].opened.set()
    assert jobs[1].wait(30)
    assert verify(tmp_path / "checkpoint-10", "state") == []


def test_a_tag_replaced_in_place_lives_until_the_new_one_is_durable(tmp_path):
    folder = tmp_path / "checkpoint-20"
    saved(folder, 10)

    def save_and_die():
        placed(tmp_path, "placed", lambda: None)
        die()

    assert killed(save_and_die) == -signal.SIGKILL
    torn = next((folder / "state").glob("*optim_states.pt"))
    torn.write_bytes(bytes(torn.stat().st_size))
    rotation.settle(folder)
    assert verify(folder, "state") == []
    assert list_checkpoints(folder)[0].step == 10


def test_nothing_is_left_of_a_tag_replaced_in_place(tmp_path):
    folder = tmp_path / "checkpoint-20"
    saved(folder, 10)
    _, job = placed(tmp_path, "nowhere", lambda: None)
    assert job.wait(30)
    assert list_checkpoints(folder)[0].step == 1  # the new bench counts steps from 1
    assert sorted(os.listdir(folder)) == ["latest", "state", "trainer_state.json"]


def as_trainer(root, step, *, complete):
    bench = Bench(root / f"checkpoint-{step}")
    job = bench.begin(some_state(step), "state", nonce=f"n{step}")
    job.note.await_trainer()
    job.note.write()
    job.start()
    assert job.wait(30)
    if complete:
        (root / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    die()


def test_a_folder_that_its_trainer_did_not_complete_is_out_of_the_way(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    status = killed(lambda: as_trainer(tmp_path, 20, complete=False))
    assert status == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    assert verify(tmp_path / "checkpoint-10/.uncommitted_checkpoint-20", "state") == []
    assert killed(lambda: as_trainer(tmp_path, 20, complete=True)) == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-20"]


def test_a_folder_whose_save_failed_is_out_of_the_way(tmp_path):
    # ebbtide moves the incomplete folder into the folder of an older checkpoint. Otherwise the next run would try to
    # resume from the incomplete folder and fail, although the older checkpoint is complete.
    saved(tmp_path / "checkpoint-10", 10)

    def fail_and_end():
        gate = Gate("payload_fsynced", fail)
        gate.opened.set()
        job = Bench(tmp_path / "checkpoint-20").begin(some_state(20), "state", files=gate)
        job.note.await_trainer()
        job.note.write()
        job.start()
        assert job.wait(30)
        assert "planted" in str(job.failure)
        os._exit(0)

    assert killed(fail_and_end) == 0
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    assert verify(tmp_path / "checkpoint-10", "state") == []


def test_the_very_first_one_too(tmp_path):
    assert killed(lambda: as_trainer(tmp_path, 10, complete=False)) == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".uncommitted_checkpoint-10"]


TRAINERS = """
import os

def make(folder):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as config:
        config.write("{}")
"""


def make_folder(root, then):
    """Make a checkpoint folder as the Trainer does, in a function of a module named ``transformers.trainer``. Then
    call ``then``.

    The Trainer calls `save_checkpoint` only later, so no save has begun when ``then`` is called.
    """
    library = {"__name__": "transformers.trainer"}
    exec(TRAINERS, library)
    library["make"](root / "checkpoint-20")
    then()


def test_a_folder_whose_save_never_began_is_out_of_the_way(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    assert killed(lambda: make_folder(tmp_path, die)) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    assert (tmp_path / "checkpoint-10/.uncommitted_checkpoint-20/config.json").exists()


def test_a_kill_while_the_folder_is_made_leaves_none(tmp_path, monkeypatch):
    # The next run would otherwise take the empty folder for its newest checkpoint.
    saved(tmp_path / "checkpoint-10", 10)
    for number in range(1, 100):
        root = tmp_path / str(number)
        with ours():
            shutil.copytree(tmp_path / "checkpoint-10", root / "checkpoint-10")

        class Cutting(rotation.Note):
            def write(self, number=number):
                cut_at(monkeypatch, number, die)
                super().write()

        monkeypatch.setattr(trainers_folder, "Note", Cutting)
        code = killed(lambda root=root: make_folder(root, lambda: os._exit(0)))
        assert os.listdir(root) == ["checkpoint-10"], number
        if code == 0:
            break
    assert number > 3, "the save must have changed the filesystem"


@pytest.mark.parametrize("at", range(3))
def test_on_a_full_disk_a_trainer_makes_no_folder(tmp_path, monkeypatch, at):
    # Every later run would otherwise try to resume from a folder that holds no checkpoint.
    saved(tmp_path / "checkpoint-10", 10)
    full = FaultyFiles(at, errno.ENOSPC, lasting=True)
    monkeypatch.setattr(trainers_folder, "Files", lambda: full)
    with pytest.raises(OSError, match="No space left"):
        make_folder(tmp_path, lambda: None)
    assert os.listdir(tmp_path) == ["checkpoint-10"]


def test_the_folder_of_a_save_that_failed_is_out_of_the_next_runs_way(tmp_path):
    # A loop that resumes from the highest step would otherwise train on with the initial weights of its script.
    saved(tmp_path / "checkpoint-10", 10)

    def fail_and_end():
        with pytest.raises((OSError, CheckpointError)):
            Bench(tmp_path / "checkpoint-20").save(some_state(20), "state", files=FaultyFiles(30))
        (tmp_path / "checkpoint-20/zero_to_fp32.py").write_text("")
        assert (tmp_path / "checkpoint-20").exists()  # the run's own listings move no files
        os._exit(0)

    assert killed(fail_and_end) == 0
    assert os.listdir(tmp_path) == ["checkpoint-10"]


def test_a_save_behind_one_that_failed_leaves_no_note(tmp_path):
    bench = Bench(tmp_path / "checkpoint-20")
    with pytest.raises((OSError, CheckpointError)):
        bench.save(some_state(20), "state", files=FaultyFiles(30))
    assert (tmp_path / "checkpoint-20" / rotation.NOTES).exists()
    bench.save(some_state(20), "state")
    assert not (tmp_path / "checkpoint-20" / rotation.NOTES).exists()


def test_a_kill_while_a_save_begins_leaves_no_folder_that_looks_whole(tmp_path, monkeypatch):
    # The save is killed at each change that the beginning of the save makes to the filesystem, in one run per change. A
    # training loop that resumes from the checkpoint with the highest step would otherwise choose the incomplete folder.
    # It would load nothing from there, and train on with the initial weights of its script.
    saved(tmp_path / "checkpoint-10", 10)
    for number in range(1, 100):
        root = tmp_path / str(number)
        with ours():
            shutil.copytree(tmp_path / "checkpoint-10", root / "checkpoint-10")

        def begin(root=root, number=number):
            cut_at(monkeypatch, number, die)
            Bench(root / "checkpoint-20").begin(some_state(20), "state")
            os._exit(0)

        code = killed(begin)
        assert os.listdir(root) == ["checkpoint-10"], number
        if code == 0:
            break
    assert number > 3, "the save must have changed the filesystem"


@pytest.mark.parametrize("settled", [True, False])
def test_a_folder_without_optimizer_state_is_a_checkpoint_when_its_trainer_says_so(tmp_path, settled):
    # A Trainer's checkpoint folder counts as complete if it contains ``trainer_state.json``, the file that the Trainer
    # writes last. This must hold even if DeepSpeed's `save_checkpoint` never ran. With the option ``save_only_model``
    # the Trainer saves no optimizer state, and so does not call DeepSpeed.
    def complete_and_die():
        (tmp_path / "checkpoint-20/trainer_state.json").write_text("{}")
        if settled:
            trainers_folder.settle()
            assert not (tmp_path / "checkpoint-20" / rotation.NOTES).exists()
        die()

    assert killed(lambda: make_folder(tmp_path, complete_and_die)) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["checkpoint-20"]
    assert sorted(os.listdir(tmp_path / "checkpoint-20")) == ["config.json", "trainer_state.json"]


def test_a_run_with_a_number_in_its_name_stays_where_it_is(tmp_path):
    saved(tmp_path / "run-1", 10)
    folder = tmp_path / "run-2"

    def save_and_die():
        gate = Gate("voted", die)
        job = guarded(Bench(folder), some_state(20), "state", gate)
        gate.opened.set()
        job.wait(30)

    assert killed(save_and_die) == -signal.SIGKILL
    (folder / "log").write_text("mine")
    assert sorted(os.listdir(tmp_path)) == ["run-1", "run-2"]
    assert (folder / "log").exists()


def test_what_was_kept_at_the_very_end_stays_deleted(tmp_path):
    saved(tmp_path / "checkpoint-10", 10)
    saved(tmp_path / "checkpoint-20", 20)
    late = rotation.Note(tmp_path / "checkpoint-20", "state", "late", Files())
    late.keep(tmp_path / "checkpoint-10")
    with ours():
        shutil.rmtree(tmp_path / "checkpoint-10")
    assert os.listdir(tmp_path) == ["checkpoint-20"]
    assert not (tmp_path / "checkpoint-20" / rotation.NOTES).exists()
    late.close(committed=True)
    with pytest.raises(FileNotFoundError, match="has already ended"):
        late.keep(tmp_path / "checkpoint-20")
