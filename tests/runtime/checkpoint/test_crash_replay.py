"""Tests that every state of the disk that a crash during a checkpoint save can leave has a loadable checkpoint.

The system calls of a save are recorded, and all states that a crash may leave are built (`crash_states`).
"""

import shutil
from pathlib import Path

import pytest
from ebbtide.runtime.checkpoint.deepspeed.loading import newest_whole
from ebbtide.runtime.checkpoint.protocol.commit import Deferred
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.runtime.checkpoint.trainers.bystanders import watch

from tests.runtime.checkpoint.conftest import Bench, some_state
from tests.runtime.crash_states import RecordingFiles, crash_states, in_memory


def check(folder: Path, commits: int):
    if not folder.exists():
        assert commits == 0, "the folder that holds the checkpoints is gone after a commit"
        return
    for entry in list_checkpoints(folder):
        assert entry.status == "committed"
        assert verify(folder, entry.tag) == []
    newest = newest_whole([folder])  # also restores the name of a checkpoint that was swapped out
    assert (newest.manifest.step if newest else 0) >= commits
    tags = {e.tag for e in list_checkpoints(folder)}
    shown = {p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")}
    assert shown == tags, "a folder without a manifest is visible"
    latest = folder / "latest"
    if latest.exists():
        assert latest.read_text() in tags
    else:
        assert commits == 0


@pytest.fixture(autouse=True)
def readers_end_what_a_crash_left():
    """Install the hook that ebbtide installs in every process that saves checkpoints."""
    watch()


@pytest.fixture
def memory(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("scenario", ["new tags", "same tag", "same tag, no exchange"])
def test_every_crash_state_opens(tmp_path, memory, scenario):
    files = RecordingFiles(tmp_path / "world")
    files.root.mkdir()
    files.exchanges = "no exchange" not in scenario
    bench = Bench(files.root / "ck", writers=1)
    for number in (1, 2):
        tag = "t" if "same" in scenario else f"t{number}"
        bench.save(some_state(number, elements=64), tag, files=files, keep=1)
    tried = 0
    for tried, (disk, commits) in enumerate(crash_states(files.ops, seed=1)):  # noqa: B007
        disk.build(memory / "state")
        check(memory / "state/ck", commits)
        shutil.rmtree(memory / "state")
    assert tried > 100


def test_a_checkpoint_that_was_made_durable_behind_its_name_survives_every_crash(tmp_path, memory):
    files = RecordingFiles(tmp_path / "world")
    files.root.mkdir()
    bench = Bench(files.root / "new/ck", writers=1)
    for number in (1, 2):
        bench.save(some_state(number, elements=64), f"t{number}", files=Deferred(files), durably=files)
    tried = 0
    for disk, durable in crash_states(files.ops, seed=1, durable="done"):
        if durable:
            tried += 1
            disk.build(memory / "state")
            newest = newest_whole([memory / "state/new/ck"])
            assert newest is not None
            assert newest.manifest.step >= durable
            shutil.rmtree(memory / "state")
    assert tried > 100


def test_the_replay_finds_a_missing_fsync(tmp_path, memory):
    class Careless(RecordingFiles):
        def on_fsync(self, _, descriptor):
            path_is_payload = any(
                op.kind == "write" and op.touches == self.open_files[descriptor] and len(op.args[1]) >= 4096
                for op in self.ops
            )
            if not path_is_payload:
                super().on_fsync(_, descriptor)

    files = Careless(tmp_path / "world")
    files.root.mkdir()
    Bench(files.root / "ck", writers=1).save(some_state(1, elements=64), "t", files=files)
    for disk, commits in crash_states(files.ops, seed=1):
        disk.build(memory / "state")
        try:
            check(memory / "state/ck", commits)
        except AssertionError:
            return
        shutil.rmtree(memory / "state")
    pytest.fail("no crash state showed the missing fsync")
