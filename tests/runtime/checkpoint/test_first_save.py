"""Tests of several ranks that save their first checkpoint into a common folder that does not exist yet."""

import errno
import multiprocessing
import sys

import pytest
from ebbtide.runtime.checkpoint import files as file_layer
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.commit import Attempt, Commit
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.checkpoint.protocol.rotation import NOTES

from tests.runtime.checkpoint.conftest import Bench, some_state

TIMES = 40


def begin(folder, rank, world_size=2, files=None):
    """Begin the save of a checkpoint into ``folder`` on one rank, and return the save."""
    attempt = Attempt(folder, "state", "n", 1, rank, world_size)
    commit = Commit(attempt, files or Files(), 10.0)
    commit.begin()
    commit.note._over.set()
    return attempt


def save_often(root, rank, world_size, times, ready, failed):
    for number in range(times):
        bench = Bench(root / str(number) / "checkpoint-10", deadline_s=60)
        state = {f"part{rank}": some_state(rank, elements=100)["optim_states"]}
        ready.wait()
        try:
            job = bench.begin(state, "state", rank=rank, world_size=world_size, nonce="n", step=1)
            job.start()
            assert job.wait(60)
            if job.failure is not None:
                raise job.failure
        except Exception as error:  # any error of a rank is a result
            failed.put(f"{number}: rank {rank}: {error!r}")


def save_together(root, world_size, times):
    """Start one process per rank, let all ranks save a checkpoint at the same moment, and return the errors of
    all ranks.
    """
    context = multiprocessing.get_context("fork")
    ready, failed = context.Barrier(world_size), context.Queue()
    ranks = [
        context.Process(target=save_often, args=(root, rank, world_size, times, ready, failed))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0] * world_size
    return [failed.get() for _ in range(failed.qsize())]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_save_at_once_all_save(tmp_path, world_size):
    assert save_together(tmp_path, world_size, TIMES) == []
    for number in range(TIMES):
        folder = tmp_path / str(number) / "checkpoint-10"
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-10"]
        assert not (folder / NOTES).exists()
        assert verify(folder, "state") == []


class MakingMeanwhile(Files):
    """File operations of a save during which another process makes the checkpoint folder, just before this
    process renames its own folder to that name.
    """

    def __init__(self, folder):
        self.folder, self.inode = folder, None

    def call(self, name, function, *args):
        if args[1:2] == (self.folder,) and self.inode is None:
            self.folder.mkdir()
            self.inode = self.folder.stat().st_ino
        return function(*args)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("plain", [False, True])
def test_a_folder_that_another_rank_has_made_is_never_replaced(tmp_path, monkeypatch, rank, plain):
    if plain:  # a file system without renames that fail if the target exists
        monkeypatch.setattr(file_layer, "_renamed", refuse)
    folder = tmp_path / "new/checkpoint-10"
    files = MakingMeanwhile(folder)
    begin(folder, rank, files=files)
    assert files.inode == folder.stat().st_ino
    assert (folder / NOTES / "n.json").exists() == (rank == 0)


def refuse(*_):
    raise OSError(errno.EINVAL, "no such flag")


@pytest.mark.parametrize("plain", [False, True])
def test_whichever_rank_makes_the_folder_it_comes_with_its_note(tmp_path, monkeypatch, plain):
    if plain:
        monkeypatch.setattr(file_layer, "_renamed", refuse)
    attempt = begin(tmp_path / "checkpoint-10", 1)
    assert (attempt.save_dir / NOTES / "n.json").exists()
    begin(tmp_path / "checkpoint-10", 0)
    assert [path.name for path in (attempt.save_dir / NOTES).iterdir()] == ["n.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


# Python -m tests.runtime.checkpoint.test_first_save 300 runs 300 saves each with two and with three ranks.
if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    for ranks in (2, 3):
        with tempfile.TemporaryDirectory() as root:
            found = save_together(Path(root), ranks, int(sys.argv[1]))
            print(f"{ranks} ranks: {len(found)} of {sys.argv[1]} first saves failed", *found[:3], sep="\n")
