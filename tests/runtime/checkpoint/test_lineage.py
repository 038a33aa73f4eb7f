"""A test of a training run that is killed and restarted many times: it never resumes from an older step than stock
DeepSpeed would.

Each run resumes from its newest checkpoint as the Trainer does, saves a few checkpoints, and deletes the older ones.
The run is killed by SIGKILL before a random change of the filesystem: in a save, in a deletion or in the resume.
"""

import os
import random
import shutil
import signal
import sys

import pytest
from ebbtide.runtime.checkpoint.deepspeed.engine import _over
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.protocol.commit import Commit, Deferred
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.checkpoint.trainers import bystanders, deleted_first, trainers_folder
from ebbtide.runtime.checkpoint.trainers.bystanders import guard, ours

from tests.runtime.checkpoint.conftest import Bench, some_state
from tests.runtime.checkpoint.test_rotation import TRAINERS, killed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a child process")
bystanders.watch()
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree"}
RUNS, SAVES, BROKEN = 8, 3, 3


def die_at(root, number):
    """Kill the process just before the ``number``-th time that it opens, creates, links, renames or deletes a file or
    folder below ``root``.

    The operations of all threads are counted together.
    """
    left = [number]

    def heard(event, args):
        if event in CHANGES and str(root) in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


def saved_steps(root):
    return sorted(int(n.split("-")[1]) for n in os.listdir(root) if n.startswith("checkpoint-"))


def run(root, journal, limit, number):
    """Resume a simulated run from its newest checkpoint, then save and delete checkpoints until the run is
    killed or ends.
    """
    trainer = {"__name__": "transformers.trainer"}
    exec(TRAINERS, trainer)
    die_at(root, number)
    step = max(saved_steps(root), default=0)
    if step and not whole(root / f"checkpoint-{step}"):
        os._exit(BROKEN)
    note(journal, f"resumed {step}")
    for at in range(step + 10, step + 10 * SAVES + 1, 10):
        folder = root / f"checkpoint-{at}"
        trainer["make"](folder)
        deleted_first.remember(folder)
        job = begin(folder, at)
        job.wait_until_placed()
        (folder / "trainer_state.json").write_text("{}")
        note(journal, f"saved {at}")
        trainers_folder.settle()
        for older in saved_steps(root)[:-limit]:
            shutil.rmtree(root / f"checkpoint-{older}")
        assert job.wait(30)
        assert job.failure is None
    os._exit(0)


def whole(folder):
    with ours():
        complete = (folder / "trainer_state.json").exists() and (folder / "latest").exists()
        return complete and not verify(folder, (folder / "latest").read_text())


def note(journal, line):
    with journal.open("a") as out:
        out.write(f"{line}\n")


def begin(folder, step):
    """Start a checkpoint save as the engine does under a Trainer: the checkpoint has its final name before it
    is durable.
    """
    real, start = Files(), Commit.begin

    def waiting(commit):
        commit.note.await_trainer()
        start(commit)

    Commit.begin = waiting  # in this process, which is about to be killed
    job = Bench(folder).begin(
        some_state(step, elements=3000),
        "state",
        step=step,
        files=Deferred(real),
        durably=real,
        nonce=os.urandom(4).hex(),
    )
    Commit.begin = start
    job._when_over = lambda: _over(job)
    trainers_folder.settle(folder)
    guard(job)
    job.start()
    return job


@pytest.mark.parametrize("limit", [1, 2])
def test_what_stock_would_have_is_resumed_from_after_any_number_of_kills(tmp_path, limit):
    rng = random.Random(limit)
    root, journal = tmp_path / "out", tmp_path / "journal"
    root.mkdir()
    stock, kills = 0, 0
    for _ in range(RUNS):
        number = rng.randint(1, rng.choice([60, 250, 500]))
        status = killed(lambda number=number: run(root, journal, limit, number))
        assert status in (0, -signal.SIGKILL), (number, status)
        kills += status != 0
        lines = journal.read_text().split("\n") if journal.exists() else []
        journal.unlink(missing_ok=True)
        told = {
            word: [int(line.split()[1]) for line in lines if line.startswith(word)] for word in ("resumed", "saved")
        }
        assert all(step >= stock for step in told["resumed"]), (number, lines)
        stock = max([stock, *told["saved"]])
    assert kills > RUNS // 2
    assert stock > 0
