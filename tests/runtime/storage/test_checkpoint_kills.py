"""Tests of checkpoints whose optimizer state is on a drive: a run is killed at every point of a commit,
and then resumed.
"""

import mmap
import os
import signal
import struct
from contextlib import contextmanager

import pytest
import torch
from ebbtide.runtime.checkpoint.deepspeed.loading import newest_whole
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import stored_name
from ebbtide.runtime.checkpoint.live_state import StoredTensor
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.training import StoredSteps, stands

from studies.bench.killed import POINTS, STEP_POINTS, STORED_POINTS
from tests.runtime.checkpoint.conftest import Bench
from tests.runtime.storage.conftest import BLOCK, ELEMENTS, SIZES, equal, read, state, write_all

STEPS = 4
IN_JOB = POINTS[POINTS.index("job_started") :]


class Killing(Files):
    """File operations of the optimizer-state store or of a checkpoint save, which kill this process at a given point.

    The code under test reports each named point that it reaches to the method `point`.

    Args:
        name: Name of the point at which the process is killed.
        left: 1 to kill the process when it reaches the point for the first time, 2 for the second time, and so on.
    """

    def __init__(self, name, left):
        self.name, self.left = name, left

    def point(self, name):
        self.left -= name == self.name
        if name == self.name and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def opened(place, files, keep):
    store = ExtentStore(
        [Drive(place / "state")],
        SIZES,
        keep=keep,
        depth=2,
        block_bytes=BLOCK,
        deadline_s=20.0,
        files=files,
        stands=stands,
    )
    try:
        yield store, StoredSteps(lambda: store, lambda: frozenset(ELEMENTS), lambda: None)
    finally:
        store.close()


def resumed(place, store, steps):
    """Restore the newest valid checkpoint into the store of optimizer state, check the state, and return the
    checkpoint's step. 0 means that there is no checkpoint.
    """
    newest = newest_whole([place / "ck"])
    if newest is None:
        return 0
    step = newest.manifest.step
    page = (newest.folder / stored_name(0)).read_bytes()
    assert steps.problem(page) == ""
    assert steps.adopt(page) == frozenset(ELEMENTS)
    assert torch.load(newest.folder / "rank0_memory.pt")["step"] == step
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, step))
    return step


def run(place, files, keep, note=lambda *_: None):
    """Run simulated training from the newest checkpoint to the last step. A checkpoint of each step is saved
    while the next step writes its optimizer state to the store.
    """
    bench = Bench(place / "ck")
    with opened(place, files, keep) as (store, steps):
        job = None
        for step in range(resumed(place, store, steps) + 1, STEPS + 1):
            write_all(store, store.tick(), step)
            finish(job, note)
            note(0, step)

            def stored(attempt, step=step):
                held = steps.announce(attempt.target, attempt.nonce, step)
                return held, held.describe([StoredTensor("f", ("a", 0), s, 0) for s in ELEMENTS])

            job = bench.begin(
                {"memory": {"step": step}},
                files=files,
                step=step,
                keep=keep,
                stored=stored,
                nonce=f"{os.getpid()}.{step}",
            )
            job.start()
        finish(job, note)


def finish(job, note):
    if job is not None:
        assert job.wait(30)
        assert job.failure is None
        note(1, job.attempt.step)


def killed(place, kill, keep):
    """Run the simulated training in a child process that is killed at a named point. Return the last finished
    step and the last committed step, or None if the process was not killed.
    """
    memory = mmap.mmap(-1, 16)
    child = os.fork()
    if not child:
        try:
            note = lambda at, step: struct.pack_into("q", memory, 8 * at, step)
            run(place, Killing(*kill), keep, note)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return struct.unpack("2q", memory) if os.WIFSIGNALED(status) else None


CASES = [(point, 1) for point in (*STEP_POINTS, *STORED_POINTS, *IN_JOB)]
CASES += [(point, 2) for point in (*STEP_POINTS, "stored_prepared")]


@pytest.mark.parametrize(("point", "keep"), CASES)
def test_a_kill_leaves_this_step_or_the_one_before_and_never_a_mix(point, keep, tmp_path):
    fired = 0
    for occurrence in (2, 5):
        place = tmp_path / str(occurrence)
        done = killed(place, (point, occurrence), keep)
        if done is not None:
            fired += 1
            with opened(place, Files(), keep) as (store, steps):
                step = resumed(place, store, steps)
            finished, committed = done
            assert committed <= step
            assert finished - 1 <= step
        run(place, Files(), keep)
        with opened(place, Files(), keep) as (store, steps):
            assert resumed(place, store, steps) == STEPS
            assert [record.step for record in store.steps] == [*range(STEPS, STEPS - keep, -1)]
    assert fired
