"""Tests of other code during a checkpoint save: readers of the checkpoint's files, forked child processes,
a trainer, and the exit of the process.
"""

import contextlib
import ctypes
import glob
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from ebbtide.runtime.checkpoint.protocol import commit
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.runtime.checkpoint.trainers import ending
from ebbtide.runtime.checkpoint.trainers.bystanders import foreign_trainer, guard, ours, release

from tests.runtime.checkpoint.conftest import Bench, Gate, some_state
from tests.runtime.checkpoint.test_rotation import guarded, placed
from tests.runtime.checkpoint.test_stopped_rank import ended

# ruff: noqa: SIM115 - other code opens files so


def a_file(folder):
    return os.path.join(folder, "state", "rank0_optim_states.pt")


LOOKS = {
    "exists": lambda f: os.path.exists(a_file(f)),
    "isfile": lambda f: os.path.isfile(os.path.join(f, "latest")),
    "open": lambda f: open(os.path.join(f, "latest")).read() == "state",
    "listdir": lambda f: "state" in os.listdir(f),
    "glob": lambda f: glob.glob(os.path.join(f, "st*")),
    "walk": lambda f: any(a_file(f).endswith(n) for _, _, names in os.walk(f) for n in names),
    "load": lambda f: torch.load(a_file(f), weights_only=True)["step"] == 3,
    "child": lambda f: (
        subprocess.run(
            [sys.executable, "-S", "-c", "import os, sys; sys.exit(not os.path.exists(sys.argv[1]))", a_file(f)],
            check=False,
        ).returncode
        == 0
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_it(tmp_path, look):
    folder = tmp_path / "run"
    gate = Gate("payload_fsynced")
    job = guarded(Bench(folder), some_state(3), "state", gate)
    with ours():
        assert not (folder / "state").exists(), "the checkpoint must still be in progress"
    found = []
    looking = threading.Thread(target=lambda: found.append(LOOKS[look](str(folder))))
    looking.start()
    gate.opened.set()
    looking.join(30)
    assert found[0]
    assert not job.running


def test_through_a_symbolic_link_too(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    gate = Gate("payload_fsynced")
    guarded(Bench(folder), some_state(3), "state", gate)
    threading.Timer(0, gate.opened.set).start()
    assert os.path.exists(a_file(tmp_path / "link"))


def test_who_moves_two_checkpoints_at_once_waits_for_both(tmp_path):
    gates = [Gate("payload_fsynced") for _ in range(2)]
    flying = [
        guarded(Bench(tmp_path / f"new/{name}"), some_state(3), "state", gate)
        for name, gate in zip(("actor", "critic"), gates, strict=True)
    ]
    moving = threading.Thread(target=os.rename, args=(tmp_path / "new", tmp_path / "old"))
    moving.start()
    gates[0].opened.set()
    assert flying[0].wait(30)
    moving.join(0.2)
    gates[1].opened.set()
    moving.join(30)
    assert [job.failure for job in flying] == [None, None]
    assert not any(verify(tmp_path / f"old/{name}", "state") for name in ("actor", "critic"))


def test_other_paths_wait_for_nothing(tmp_path):
    gate = Gate("payload_fsynced")
    job = guarded(Bench(tmp_path / "run"), some_state(3), "state", gate)
    (tmp_path / "run/trainer_state.json").write_text("{}")
    assert os.listdir(tmp_path) == ["run"]
    assert job.running
    gate.opened.set()
    assert job.wait(30)


def test_a_placed_one_is_read_while_it_is_made_durable(tmp_path):
    gate, job = placed(tmp_path, "placed", lambda: None)
    assert gate.reached.wait(30)
    assert torch.load(a_file(tmp_path / "checkpoint-20"), weights_only=True)["step"] == 20
    assert job.running
    gate.opened.set()
    assert job.wait(30)
    assert job.failure is None


def test_what_is_listed_of_a_placed_one_is_there_afterwards(tmp_path):
    gate, job = placed(tmp_path, "placed", lambda: None)
    assert gate.reached.wait(30)
    threading.Timer(0, gate.opened.set).start()
    names = os.listdir(tmp_path / "checkpoint-20")
    assert job.wait(30)
    assert sorted(names) == sorted(os.listdir(tmp_path / "checkpoint-20"))


def test_os_stat_is_itself_again_afterwards(tmp_path):
    before = os.stat
    gate = Gate("payload_fsynced")
    job = guarded(Bench(tmp_path / "run"), some_state(3), "state", gate)
    assert os.stat is not before
    gate.opened.set()
    assert job.wait(30)
    job._thread.join()
    assert os.stat is before


def test_a_trainer_is_known_by_its_frames():
    space = {"__name__": "transformers.trainer", "ask": foreign_trainer}
    exec("def save(): return ask()", space)
    assert space["save"]() == "transformers"
    assert foreign_trainer() is None


def in_flight(folder, at="payload_fsynced"):
    gate = Gate(at)
    job = Bench(folder).begin(some_state(3), "state", files=gate)
    job.start()
    assert gate.reached.wait(30)
    return gate, job


def test_the_end_of_a_multiprocessing_child_waits_for_the_commit(tmp_path):
    def child():
        gate, _ = in_flight(tmp_path / "run")
        gate.opened.set()  # it returns long before the commit

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert verify(tmp_path / "run", "state") == []


def test_a_forked_child_waits_for_its_parent_not_for_ever(tmp_path):
    gate, job = in_flight(tmp_path / "run")
    job._when_over = lambda: release(job)
    guard(job)
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(out, b"x")
        os._exit(0 if os.path.exists(a_file(tmp_path / "run")) else 3)
    assert os.read(into, 1) == b"x"
    gate.opened.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert job.wait(30)


class Saver:
    def __init__(self, job):
        self.finish = job.wait


def test_sigterm_commits_what_is_in_flight(tmp_path):
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gate, job = in_flight(tmp_path / "run")
        saver = Saver(job)
        ending.finish_at_sigterm(saver)
        os.write(out, b"x")
        while not commit.sigterm_came.wait(0.05):
            pass
        gate.opened.set()
        threading.Event().wait(60)
        os._exit(0)
    assert os.read(into, 1) == b"x"
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert verify(tmp_path / "run", "state") == []


def never_returns():
    """Block the thread in C code for ever, so that the Python interpreter does not regain control."""
    # A collective call that waits for a dead rank blocks in the same way.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def in_a_child(work, *, stock=True):
    """Fork a child process that runs ``work``. Return its process id and the pipe through which ``work``
    reports that it is ready.

    Args:
        stock: Whether the child restores the default action of SIGTERM, so that the signal ends it whatever
            handler it inherited.
    """
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        if stock:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            work(lambda note=b"x": os.write(out, note))
        finally:
            os._exit(9)
    assert os.read(into, 1) == b"x"
    return pid, into


def told_to_end(pid):
    os.kill(pid, signal.SIGTERM)
    try:
        return os.waitstatus_to_exitcode(ended(pid, limit_s=20))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_inside_a_collective_commits_and_ends_at_sigterm(tmp_path):
    def rank(ready):
        gate, job = in_flight(tmp_path / "run")
        saver = Saver(job)
        ending.finish_at_sigterm(saver)
        threading.Thread(target=lambda: commit.sigterm_came.wait() and gate.opened.set()).start()
        ready()
        never_returns()

    pid, _ = in_a_child(rank)
    assert told_to_end(pid) == -signal.SIGTERM
    assert verify(tmp_path / "run", "state") == []


def test_nobody_waits_for_a_dead_ranks_vote_after_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "GRACE_S", 0.2)

    def rank(ready):
        bench = Bench(tmp_path / "run", deadline_s=600.0)
        job = bench.begin(some_state(3), "state", world_size=2)
        saver = Saver(job)
        ending.finish_at_sigterm(saver)
        job.start()
        ready()
        never_returns()

    pid, _ = in_a_child(rank)
    assert told_to_end(pid) == -signal.SIGTERM
    assert list_checkpoints(tmp_path / "run") == []


def test_what_stands_still_is_given_up(tmp_path):
    gate, job = in_flight(tmp_path / "run")
    job.wait_while_moving(0.05)
    assert job.running
    gate.opened.set()
    job.wait_while_moving(30.0)
    assert not job.running


def test_a_forked_worker_dies_of_sigterm_as_with_stock_and_alone(tmp_path):
    def rank(ready):
        saver = Saver(Bench(tmp_path / "run").begin(some_state(3), "state"))
        ending.finish_at_sigterm(saver)
        worker, _ = in_a_child(lambda ready: (ready(), never_returns()), stock=False)
        ready(b"x" if told_to_end(worker) == -signal.SIGTERM else b"?")
        commit.sigterm_came.wait(0.5)
        os._exit(3 if commit.sigterm_came.is_set() else 0)

    pid, _ = in_a_child(rank)
    assert os.waitstatus_to_exitcode(ended(pid)) == 0


class Composed:
    """A SIGTERM handler like Lightning's, which calls its own handler first and then the one installed before it."""

    __module__ = "lightning.pytorch.trainer"

    def __init__(self, handlers):
        self.handlers = handlers

    def __call__(self, number, frame):
        for handler in self.handlers:
            handler(number, frame)


def test_a_trainer_that_ends_gracefully_at_sigterm_still_does(tmp_path):
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        came = threading.Event()
        gate, job = in_flight(tmp_path / "run")
        saver = Saver(job)
        ending.finish_at_sigterm(saver)
        met = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, Composed([lambda *_: came.set(), met]))
        os.write(out, b"x")
        while not came.wait(0.05):
            pass
        gate.opened.set()
        job.wait()
        os._exit(8 if commit.sigterm_came.is_set() else 7)  # as the scheduler of a batch system ends a job
    assert os.read(into, 1) == b"x"
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert verify(tmp_path / "run", "state") == []


def test_a_script_that_handles_sigterm_itself_keeps_its_handler(tmp_path):
    def mine(*_):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        job = Bench(tmp_path / "run").begin(some_state(3), "state")
        ending.finish_at_sigterm(Saver(job))
        assert signal.getsignal(signal.SIGTERM) is mine
        job.start()
        assert job.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
