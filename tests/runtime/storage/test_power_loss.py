"""Tests that a store of optimizer state can be opened in every state that a power loss can leave on disk
(see `crash_states`).
"""

import shutil

import pytest
import torch
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import ExtentStore

from tests.runtime.crash_states import RecordingFiles, crash_states, in_memory
from tests.runtime.storage.conftest import BLOCK, commit

ELEMENTS = {0: 1_500, 1: 700}  # two blocks, so that one of them may be missing
SIZES = {subgroup: (4 * elements,) for subgroup, elements in ELEMENTS.items()}
GROWN = 2  # a subgroup that is added later
ELEMENTS[GROWN] = 1_100


def state(subgroup, version):
    return (torch.arange(ELEMENTS[subgroup]) + 10_000.0 * version + 0.5 * subgroup,)


def opened(root, files=None, keep=1):
    drives = [Drive(root / "one", 1.0), Drive(root / "other", 1.0)]
    return ExtentStore(drives, SIZES, keep=keep, depth=1, block_bytes=BLOCK, deadline_s=20, files=files)


def run(files, keep):
    """Commit three steps to a store of optimizer state, with one more subgroup from the second step on, and
    write half of a fourth step.
    """
    store = opened(files.root, files, keep)
    for version in (1, 2, 3):
        if version == 2:
            store.grow({GROWN: (4 * ELEMENTS[GROWN],)})
        there = [s for s in ELEMENTS if version > 1 or s != GROWN]
        store.tick()
        assert store.announce(there) == version
        for subgroup in there:
            store.write(subgroup, state(subgroup, version), version)
        commit(store, version, version)
    store.write(0, state(0, 4), 4)
    store.close()


def check(root, commits, keep):
    store = opened(root, keep=keep)
    try:
        assert max((s.step for s in store.steps), default=0) >= commits
        for record in store.steps:
            store.restore(record.name)
            held = {one.subgroup for one in record.extents}
            assert held == set(ELEMENTS) - ({GROWN} if record.step == 1 else set())
            for subgroup in held:
                into = (torch.empty(ELEMENTS[subgroup]),)
                store.read(subgroup, into)
                assert torch.equal(into[0], state(subgroup, record.step)[0])
    finally:
        store.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_every_crash_state_has_every_committed_step(tmp_path, keep):
    files = RecordingFiles(tmp_path / "world")
    files.root.mkdir()
    run(files, keep)
    number = 0
    with in_memory(tmp_path) as memory:
        for number, (disk, commits) in enumerate(crash_states(files.ops, seed=1)):  # noqa: B007
            disk.build(memory / "state")
            check(memory / "state", commits, keep)
            shutil.rmtree(memory / "state")
    assert number > 50


class Careless(RecordingFiles):
    """File operations whose record lacks one kind of sync, as if the tested code had left this sync out.

    The test must notice that the sync is missing.

    Args:
        kind: The missing sync: "fdatasync" or "fsync".
    """

    def __init__(self, root, kind):
        super().__init__(root)
        self.kind = kind

    def on_fdatasync(self, _, descriptor):
        if self.kind != "fdatasync":
            super().on_fsync(_, descriptor)

    def on_fsync(self, _, descriptor):
        if self.kind != "fsync":
            super().on_fsync(_, descriptor)


@pytest.mark.parametrize("kind", ["fdatasync", "fsync"])
def test_the_replay_finds_a_missing_sync(tmp_path, kind):
    files = Careless(tmp_path / "world", kind)
    files.root.mkdir()
    run(files, keep=1)
    with in_memory(tmp_path) as memory:
        for disk, commits in crash_states(files.ops, seed=1):
            disk.build(memory / "state")
            try:
                check(memory / "state", commits, keep=1)
            except (AssertionError, StorageError):
                return
            shutil.rmtree(memory / "state")
    pytest.fail("no crash state showed the missing sync")
