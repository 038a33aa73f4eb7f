"""Tests of the commit protocol of checkpoints: failing system calls, failing or late ranks, and crashes
between two system calls.
"""

import errno
import json
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch
from ebbtide.runtime.checkpoint.deepspeed.loading import Resumption, newest_whole
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import rank_manifest_name
from ebbtide.runtime.checkpoint.protocol import folders
from ebbtide.runtime.checkpoint.protocol.folders import being_read, publish_folder, recover_replaced
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, prune, verify

from tests.runtime.checkpoint.conftest import Bench, FaultyFiles, Gate, some_state


def visible(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_committed_checkpoint_is_named_by_latest(bench):
    bench.save(some_state(1), "a")
    bench.save(some_state(2), "b")
    assert (bench.folder / "latest").read_text() == "b"
    assert [e.tag for e in list_checkpoints(bench.folder)] == ["b", "a"]
    assert newest_whole([bench.folder]).folder.name == "b"


def test_a_small_file_that_cannot_be_replaced_leaves_no_other_file(tmp_path):
    path = tmp_path / "latest"
    counted = FaultyFiles()
    counted.write_durably(path, b"old")
    renamed = counted.calls.index("rename")
    for at in range(renamed + 1):
        with pytest.raises(OSError, match="No space left"):
            FaultyFiles(at, errno.ENOSPC).write_durably(path, b"new")
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes() == b"old"


def call_count(tmp_path):
    files = FaultyFiles()
    bench = Bench(tmp_path / "count")
    bench.save(some_state(1), "a")
    bench.save(some_state(2), "b", files=files, keep=1)
    return len(files.calls)


def check_after_fault(bench, job):
    """Check the list of checkpoints after a fault in the save of checkpoint "b", which followed checkpoint "a".

    All listed checkpoints must be complete. If the fault came before "b" was complete, "a" must be listed. Otherwise
    "b" is listed, and "a" may be deleted, because the save keeps only one checkpoint.
    """
    tags = [e.tag for e in list_checkpoints(bench.folder)]
    assert "a" in tags or "b" in tags
    for tag in tags:
        assert verify(bench.folder, tag) == []
    if job.failure is not None and "b" not in tags:
        assert "a" in tags
    assert newest_whole([bench.folder]).folder.name in ("a", "b")
    assert (bench.folder / "latest").read_text() in tags


@pytest.mark.parametrize(("error", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_every_system_call_fails_in_turn(tmp_path, error, lasting):
    heard = 0
    total = call_count(tmp_path)
    assert total > 20
    for at in range(total):
        bench = Bench(tmp_path / f"at{at}")
        bench.save(some_state(1), "a")
        files = FaultyFiles(at, error, lasting=lasting)
        try:
            job = bench.begin(some_state(2), "b", files=files, keep=1)
        except OSError:  # a fault in the foreground
            assert files.fired
            heard += 1
            continue
        job.start()
        assert job.wait(30)
        assert files.fired or job.failure is None
        heard += job.failure is not None
        check_after_fault(bench, job)
    assert heard > total / 2


@pytest.mark.parametrize("at_share", [0.0, 0.4, 0.8])
def test_interrupted_and_short_calls_do_not_matter(tmp_path, at_share):
    for files in (
        FaultyFiles(int(at_share * call_count(tmp_path / "i")), errno.EINTR),
        FaultyFiles(int(at_share * call_count(tmp_path / "s")), short=True, lasting=True),
    ):
        bench = Bench(tmp_path / f"run{files.short}")
        bench.save(some_state(1), "a")
        job = bench.save(some_state(2), "b", files=files, keep=1)
        assert files.fired, (at_share, files.calls)
        assert job.failure is None
        assert verify(bench.folder, "b") == []


def two_ranks(tmp_path, files0=None, files1=None, *, step1=7, deadline_s=20.0, begin_only=()):
    folder = tmp_path / "ck"
    jobs = []
    for rank, files in enumerate((files0, files1)):
        bench = Bench(folder, deadline_s=deadline_s)
        if files is not None:
            files.armed = False  # count faults only in the background
        state = {f"part{rank}": some_state(rank)["optim_states"]}
        step = step1 if rank == 1 else 7
        jobs.append(bench.begin(state, "t", files=files, rank=rank, world_size=2, nonce="n", step=step))
    for files in (files0, files1):
        if files is not None:
            files.armed = True
    for rank, job in enumerate(jobs):
        if rank not in begin_only:
            job.start()
    for rank, job in enumerate(jobs):
        if rank not in begin_only:
            assert job.wait(60)
    return folder, jobs


def test_two_ranks_commit_together(tmp_path):
    folder, jobs = two_ranks(tmp_path)
    assert [j.failure for j in jobs] == [None, None]
    assert verify(folder, "t") == []
    assert len(verify(folder, "t", share=(1, 2))) == 0


def test_no_rank_has_saved_before_latest_is_written(tmp_path):
    gate = Gate("latest_written")
    folder, jobs = two_ranks(tmp_path, gate, begin_only={0, 1})
    for job in jobs:
        job.start()
    assert gate.reached.wait(30)
    assert not jobs[1].wait(0.3)
    gate.opened.set()
    assert jobs[1].wait(30)
    assert (folder / "latest").read_text() == "t"
    assert jobs[0].wait(30)
    assert [job.failure for job in jobs] == [None, None]


def test_a_vote_is_counted_before_the_rank_that_gave_it_goes_on(tmp_path):
    # In an earlier version rank 1 synced the folder after its vote, and took the save for failed if the folder had been
    # renamed. The other ranks then waited for rank 1 in a collective forever.
    gate = Gate("vote_renamed")
    folder, jobs = two_ranks(tmp_path, None, gate, begin_only={0, 1})
    for job in jobs:
        job.start()
    assert gate.reached.wait(30)
    assert jobs[0].wait(30)
    gate.opened.set()
    assert jobs[1].wait(30)
    assert [job.failure for job in jobs] == [None, None]
    assert verify(folder, "t") == []


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("at", [3, 5, 9, 12])
def test_a_fault_on_one_rank_is_heard_on_both(tmp_path, faulty_rank, at):
    faulty = FaultyFiles(at, errno.EIO)
    files = (faulty, None) if faulty_rank == 0 else (None, faulty)
    folder, jobs = two_ranks(tmp_path, *files)
    assert faulty.fired
    assert all(j.failure is not None for j in jobs)
    assert visible(folder) == []


class HeldWrites(Files):
    def __init__(self):
        self.opened = threading.Event()
        self.opened.set()

    def call(self, name, function, *args):
        assert name != "pwrite" or self.opened.wait(30)
        return function(*args)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_was_ready_gives_way_with_one_that_was_not(tmp_path, late):
    held = HeldWrites()
    files = (None, held) if late else (held, None)
    folder, jobs = two_ranks(tmp_path, *files, begin_only={0, 1})
    held.opened.clear()
    for job in jobs:
        job.start()
    while not (folder / f".t.n.partial/{rank_manifest_name(1 - late)}").exists():
        time.sleep(0.01)
    for job in jobs:
        job.cancel()
    held.opened.set()
    assert all(job.wait(30) for job in jobs)
    assert [job.cancelled for job in jobs] == [True, True], [job.failure for job in jobs]
    assert visible(folder) == []


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_votes_is_an_error_by_the_deadline(tmp_path, missing, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.checkpoint.protocol.commit.OUTCOME_GRACE_S", 0.3)
    folder, jobs = two_ranks(tmp_path, deadline_s=0.4, begin_only={missing})
    assert isinstance(jobs[1 - missing].failure, CheckpointError)
    assert "deadline_s" in str(jobs[1 - missing].failure)
    assert visible(folder) == []


def test_two_steps_never_mix(tmp_path):
    folder, jobs = two_ranks(tmp_path, step1=8)
    assert "same step" in str(jobs[0].failure)
    assert jobs[1].failure is not None
    assert visible(folder) == []


def test_saving_a_tag_again_replaces_it_whole(bench):
    bench.save(some_state(1), "a")
    bench.save(some_state(2), "a")
    assert torch.load(bench.folder / "a/rank0_optim_states.pt")["step"] == 2
    assert verify(bench.folder, "a") == []
    assert visible(bench.folder) == ["a", "latest"]
    assert [p.name for p in bench.folder.iterdir() if p.name.startswith(".")] == []


def test_a_swap_without_exchange_is_recovered_after_a_crash(bench):
    class NoExchange(Files):
        def exchange(self, one, other):
            return False

        def point(self, name):
            if name == "tag_set_aside":
                raise KeyboardInterrupt

    bench.save(some_state(1), "a")
    staging = bench.folder / ".a.n9.partial"
    staging.mkdir()
    with pytest.raises(KeyboardInterrupt):
        publish_folder(staging, bench.folder / "a", NoExchange())
    assert not (bench.folder / "a").exists()
    recover_replaced(bench.folder, Files())
    assert verify(bench.folder, "a") == []


def test_leftovers_of_crashed_attempts_go(bench):
    left = bench.folder / ".a.dead.partial"
    left.mkdir(parents=True)
    (left / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": 999999999}))
    (left / "big.pt").write_bytes(b"x" * 100)
    bench.save(some_state(), "b")
    assert not left.exists()


def test_prune_keeps_the_newest_and_what_is_read(bench):
    for tag in "abcd":
        bench.save(some_state(), tag)
    with being_read(bench.folder / "b"):
        assert prune(bench.folder, 1) == ["c", "a"]
    assert visible(bench.folder) == ["b", "d", "latest"]
    assert prune(bench.folder, 1) == ["b"]
    assert prune(bench.folder, 1) == []
    with pytest.raises(CheckpointError, match="keep must be >= 1"):
        prune(bench.folder, 0)


@pytest.mark.parametrize("call", ["list", "rename"])
def test_an_old_checkpoint_that_the_trainer_deletes_first_is_no_error(bench, monkeypatch, call):
    bench.save(some_state(1), "a")

    class Overtaken(Files):
        def call(self, name, function, *args):
            if name == call and str(args[1]).endswith(".trash"):
                shutil.rmtree(args[0])
            return function(*args)

    if call == "list":
        listed = folders.committed

        def deleted_behind_the_list(folder):
            found = listed(folder)
            shutil.rmtree(folder / "a")
            return found

        monkeypatch.setattr(folders, "committed", deleted_behind_the_list)
    bench.save(some_state(2), "b", files=Overtaken(), keep=1)
    assert visible(bench.folder) == ["b", "latest"]


def test_prune_keeps_what_latest_names(bench):
    for tag in "abc":
        bench.save(some_state(), tag)
    (bench.folder / "latest").write_text("a")
    assert prune(bench.folder, 1) == ["b"]


def test_cancel_leaves_nothing(bench):
    gate = threading.Event()

    class Slow(Files):
        def call(self, name, function, *args):
            if name == "pwrite" and len(args[1]) >= 4096:
                gate.wait(5)
            return function(*args)

    job = bench.begin(some_state(), "a", files=Slow())
    job.start()
    job.cancel()
    gate.set()
    assert job.wait(30)
    assert job.cancelled
    assert visible(bench.folder) == []


def test_a_file_that_may_not_grow(tmp_path):
    bench = Bench(tmp_path / "ck")
    bench.save(some_state(1), "a")
    job = bench.begin(some_state(2), "b")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        job.start()
        assert job.wait(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert "EFBIG" in str(job.failure)
    assert verify(bench.folder, "a") == []
    assert visible(bench.folder) == ["a", "latest"]


@pytest.fixture
def small_tmpfs(tmp_path):
    mount = shutil.which("mount")
    made = (
        mount
        and subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, check=False
        ).returncode
        == 0
    )
    if not made:
        pytest.skip("mounting a tmpfs needs privileges that are not here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_tmpfs(small_tmpfs):
    bench = Bench(small_tmpfs / "ck")
    bench.save(some_state(1), "a")
    with pytest.raises(CheckpointError, match="ENOSPC"):
        bench.save(some_state(2, elements=100_000), "b")
    assert verify(bench.folder, "a") == []
    assert visible(bench.folder) == ["a", "latest"]
    bench.save(some_state(2), "b")  # the abandoned checkpoint has released its memory
    assert verify(bench.folder, "b") == []


def test_a_rank_that_comes_before_latest_is_written_loads_what_the_others_load(tmp_path):
    bench = Bench(tmp_path / "ck")
    bench.save(some_state(1), "a")
    latest = bench.folder / "latest"
    latest.unlink()

    class Peers:
        rank, world_size = 1, 2

        def concat(self, items):
            latest.write_text("a")  # rank 0 reaches the load after its save is complete
            return items

    assert Resumption(Peers()).choose(bench.folder, None) == "a"
