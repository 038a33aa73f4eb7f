"""Helpers for the tests of checkpoints: file operations that fail on request, and saves without DeepSpeed."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import stored_name
from ebbtide.runtime.checkpoint.format.memory import Slots
from ebbtide.runtime.checkpoint.format.skeleton import PlannedFile, lay_out, plain
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.protocol.commit import Attempt, Commit
from ebbtide.runtime.checkpoint.stream.job import BackgroundSave
from ebbtide.runtime.checkpoint.stream.persist import BlockWriter, Pace
from ebbtide.simulator.plan import READY_BLOCKS

BLOCK = 16384


class FaultyFiles(Files):
    """File operations of a checkpoint save that count the system calls. They fail at the n-th call, or at all
    calls from the n-th on.
    """

    def __init__(self, at=None, error=errno.EIO, *, short=False, lasting=False):
        self.at, self.error, self.short, self.lasting = at, error, short, lasting
        self.calls = []
        self.fired = 0
        self.armed = True

    def call(self, name, function, *args):
        if not self.armed:
            return function(*args)
        number = len(self.calls)
        self.calls.append(name)
        hit = self.at is not None and (number == self.at or (self.lasting and number > self.at))
        if hit and self.short and name == "pwrite":
            self.fired += 1
            descriptor, data, offset = args
            return os.pwrite(descriptor, bytes(data[: max(1, len(data) // 3)]), offset)
        if hit and not self.short:
            self.fired += 1
            raise OSError(self.error, os.strerror(self.error))
        return function(*args)


class Gate(Files):
    """File operations of a checkpoint save that pause at a named point of the save until the test opens the gate.

    After the pause they call the function ``then``, which may do nothing, raise an error or kill the process.
    """

    def __init__(self, at, then=lambda: None):
        self.at, self.then = at, then
        self.reached, self.opened = threading.Event(), threading.Event()

    def point(self, name):
        if name == self.at:
            self.reached.set()
            assert self.opened.wait(30)
            self.then()


def bytes_of_tensors(layout):
    """Return how many bytes of a checkpoint file are written directly from the tensors that training uses, and how many
    bytes of tensors were copied for it.
    """
    sizes = [0, 0]
    for source in (extent.source for extent in layout.extents):
        if source.subgroup is not None or isinstance(source.owner, torch.Tensor):
            sizes[source.subgroup is None] += source.size_bytes
    return tuple(sizes)


class Bench:
    """A helper that saves checkpoints of state dicts without a training engine, with ebbtide's real block
    writer, commit and retention.

    It saves as one rank unless `begin` is given another rank and world size.
    """

    def __init__(self, folder, *, budget_blocks=64, writers=2, deadline_s=20.0):
        self.folder = Path(folder)
        self.live = LiveState()
        self.budget = Slots(budget_blocks, BLOCK)
        self.bounce = Slots(writers + READY_BLOCKS, BLOCK)
        self.writers, self.deadline_s = writers, deadline_s
        self.saved = 0

    def begin(
        self,
        state,
        tag=None,
        *,
        files=None,
        step=None,
        rank=0,
        world_size=1,
        nonce=None,
        keep=0,
        pace=None,
        durably=None,
        stored=None,
    ):
        """Return a job that saves a state dict as a checkpoint. The job is prepared, but not started.

        Args:
            stored: Function for optimizer state that lives on a drive. It returns the number of the training step
                whose state is committed on the drive, and the checkpoint's entry for this state.
        """
        files = files or Files()
        self.saved += 1
        step = self.saved if step is None else step
        attempt = Attempt(
            self.folder,
            tag or f"step{step}",
            nonce or f"n{self.saved}",
            step,
            rank,
            world_size,
            versions={"torch": torch.__version__},
        )
        commit = Commit(attempt, files, self.deadline_s)
        commit.begin()
        planned = [
            PlannedFile(Path(f"rank{rank}_{name}.pt"), lay_out(value, self.live, stream_device=True))
            for name, value in state.items()
        ]
        announced, page = (None, None) if stored is None else stored(attempt)
        if page is not None:
            planned.append(PlannedFile(Path(stored_name(rank)), plain(page)))
        writer = BlockWriter(
            attempt.staging,
            planned,
            files,
            self.budget,
            self.bounce,
            pace or Pace(None),
            writers=self.writers,
            progress_deadline_s=self.deadline_s,
            turns=self.live.turns,
        )
        return BackgroundSave(attempt, commit, writer, self.live, files, keep, durably=durably, stored=announced)

    def save(self, state, tag=None, **options):
        """Save a state dict as a checkpoint and wait until the checkpoint is committed. If the save fails, raise
        its error.
        """
        job = self.begin(state, tag, **options)
        job.start()
        assert job.wait(60)
        if job.failure:
            raise job.failure
        return job


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "checkpoints")


def some_state(seed=0, elements=20_000):
    generator = torch.Generator().manual_seed(seed)
    return {
        "optim_states": {"fp32": [torch.randn(elements, generator=generator) for _ in range(3)], "step": seed},
        "model_states": {"buffers": torch.arange(7), "name": "model"},
    }
