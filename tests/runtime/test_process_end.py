"""Tests of the end of a process whose daemon threads still run PyTorch: the process ends with its own exit
code and soon, whatever the threads do.
"""

import ast
import textwrap
from pathlib import Path

import pytest

from tests.prepared import run

ROOT = Path(__file__).parents[2]

# Each script ends while a daemon thread is inside PyTorch, or waits.
BEGIN = """
import sys, threading, time
import torch
from ebbtide.runtime.hardware import background
from ebbtide.runtime.devices.lane import Completion, LaneQueue

torch.set_num_threads(1)
background.LIMIT_S = 600  # a thread that only waits must not delay the end at all
inside, state = threading.Event(), torch.zeros(1000)

def compute(seconds=0.5):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state.add_(1).mul_(1.0)
        inside.set()

class Window:  # while this is freed, the interpreter ends, and daemon threads try to go on
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

window = Window()

class Held:  # as tensors that only an op refers to: to free them is work in PyTorch
    def __del__(self):
        compute()
"""
SCRIPTS = {
    "an op computes": """
        LaneQueue("update").submit(compute, (), Completion())
        inside.wait()
    """,
    "an op computes, and many are queued after it": """
        lane = LaneQueue("update")
        for _ in range(1000):
            lane.submit(compute, (), Completion())
        inside.wait()
    """,
    "an op computes, and another lane waits for it": """
        first, other = Completion(), LaneQueue("copy")
        LaneQueue("update").submit(compute, (), first)
        other.submit(compute, (first,), Completion())
        inside.wait()
    """,
    "an op frees what only its lane still refers to": """
        def submit(held):
            LaneQueue("update").submit(lambda: compute() or held, (), Completion())
        submit(Held())
        inside.wait()
    """,
    "a worker of the store frees what only it still refers to": """
        from ebbtide.runtime.storage.workers import Transfer, Workers
        workers = Workers("write", 1, 4096)
        def submit(held):
            workers.submit(Transfer(1), lambda bounce: held)
        submit(Held())
        workers.submit(Transfer(1), lambda bounce: None)  # takes the place of the first block
        inside.wait()
    """,
    "an op waits for another op that is never submitted": """
        LaneQueue("update").submit(compute, (Completion(),), Completion())
        inside.set()
    """,
    "a worker of the store computes": """
        from ebbtide.runtime.storage.workers import Transfer, Workers
        workers, transfer = Workers("write", 2, 4096), Transfer(4)
        for _ in range(4):
            workers.submit(transfer, lambda bounce: compute())
        inside.wait()
    """,
    "the profiler's neighbour computes when the measured work fails": """
        from ebbtide.profiler.rates import contention
        contention.repeat_s = lambda work, budget_s: [work()]
        calls = iter([1.0])
        def work():
            for call in calls:
                return call
            inside.wait()
            threading.Thread.join = lambda self, timeout=None: None  # the error comes before the join
            raise KeyboardInterrupt
        try:
            contention.slowdown(work, lambda: compute(0.2), 0.1, "measured")
        except KeyboardInterrupt:
            pass
    """,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_process_ends_with_its_own_exit_code_while_background_threads_compute(script):
    lines = BEGIN + textwrap.dedent(script) + "\nprint('over', flush=True)\nsys.exit(3)"
    done = run(["-c", lines], cwd=ROOT, finalize=True, timeout=400)
    assert done.returncode == 3, done.stderr
    assert "over" in done.stdout
    assert "terminate called" not in done.stderr


LAST_SAVE = """
import atexit, multiprocessing, resource, sys
log = open(sys.argv[1] + "/log", "w")
atexit.register(log.write, "an earlier handler, ")

def script():
    import deepspeed
    from studies.bench.rank import become_only_rank
    from tests.runtime.contract.training import attached, start, train
    become_only_rank()
    deepspeed.init_distributed()
    global engine
    engine = attached(start(), ["host"], "unified", seed=None)
    train(engine, 1)
    log.write("the script, ")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1] if sys.argv[2] == "whole" else 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    engine.save_checkpoint(sys.argv[1] + "/checkpoint-1")

def forked(target):
    fork = multiprocessing.get_context("fork").Process(target=target)
    fork.start()
    fork.join()
    sys.exit(fork.exitcode)

"""
TRAINER = """
def trainer():
    from ebbtide.runtime.checkpoint.deepspeed import engine as checkpoint_engine
    checkpoint_engine.foreign_trainer = lambda: "transformers"
    script()
    engine.checkpoint_engine.wait()
    if sys.argv[3] == "error":
        raise OSError("the disk is full")

forked(trainer)
"""


def ended(folder, disk, environment, how="script()"):
    """Run a script that ends right after its save of a checkpoint, on a disk that is full or not. Check its exit code,
    and that the error of the save is on its standard error.
    """
    words = ["-c", LAST_SAVE + how, folder, disk]
    done = run(words, cwd=ROOT, env=environment, finalize=True, timeout=400)
    assert done.returncode == (disk == "full"), done.stderr
    assert ("EFBIG" in done.stderr) == (disk == "full")
    assert (folder / "checkpoint-1" / "latest").exists() == (disk == "whole")


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["whole", "full"])
def test_the_exit_code_says_whether_a_scripts_last_checkpoint_was_written(
    deepspeed_ops, child_environment, tmp_path, disk
):
    ended(tmp_path, disk, child_environment)
    assert (tmp_path / "log").read_text() == "the script, an earlier handler, "


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["whole", "full"])
def test_the_exit_code_of_a_fork_says_whether_its_last_checkpoint_was_written(
    deepspeed_ops, child_environment, tmp_path, disk
):
    ended(tmp_path, disk, child_environment, "forked(script)")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["success", "error"])
def test_what_a_trainer_never_completed_stays_marked_if_an_error_ends_a_fork(
    deepspeed_ops, child_environment, tmp_path, end
):
    words = ["-c", LAST_SAVE + TRAINER, tmp_path, "whole", end]
    done = run(words, cwd=ROOT, env=child_environment, finalize=True, timeout=400)
    assert done.returncode == (end == "error"), done.stderr
    assert (tmp_path / "checkpoint-1" / ".ebbtide").exists() == (end == "error")


# Functions whose daemon threads may be abandoned at any moment, and why.
ABANDONED = {
    "runtime/hardware/builds.py:slow_builds_logged": "sleeps, and reads Python frames",
    "runtime/replan/hint.py:tell_faster": "waits for another process, and logs",
    "runtime/checkpoint/trainers/ending.py:_watch": "waits in os.read",
    "runtime/checkpoint/trainers/ending.py:_at_sigterm": "waits for a checkpoint, then ends the process",
    "runtime/checkpoint/protocol/rotation.py:write": "sleeps, and touches a file",
    "runtime/checkpoint/stream/persist.py:__init__": "the checkpoint's thread, which is no daemon, joins them",
    "runtime/storage/waiting.py:late_wait_logged": "sleeps, and logs",
    "tuner/progress.py:progress_after": "sleeps, and prints",
    "profiler/nvml.py:__enter__": "calls NVML through ctypes, which is C",
    "tuner/service/worker.py:main": "reads a pipe",
}


def daemon_threads():
    """Find the functions in ebbtide's packages that start a daemon thread. Return a dict: its keys are the names of
    these functions, and each value is the set of all names that the function's module uses.

    A daemon thread must enter PyTorch through ``native_work``. So a test looks for this name in the sets.
    """
    found = {}
    for package in ("ebbtide", "profiler", "runtime", "simulator", "tuner"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef) and _starts_a_daemon(function):
                    found[f"{path.relative_to(ROOT).as_posix()}:{function.name}"] = names
    return found


def _starts_a_daemon(function):
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="Thread"), keywords=words):
                if any(word.arg == "daemon" and ast.unparse(word.value) == "True" for word in words):
                    return True
            case ast.Assign(targets=[ast.Attribute(attr="daemon")], value=ast.Constant(value=True)):
                return True
    return False


def test_every_daemon_thread_enters_pytorch_through_native_work_or_may_be_abandoned():
    found = daemon_threads()
    assert set(ABANDONED) <= set(found), "a function in ABANDONED starts no daemon thread any more"
    unguarded = {where for where, names in found.items() if "native_work" not in names}
    assert unguarded == set(ABANDONED)
