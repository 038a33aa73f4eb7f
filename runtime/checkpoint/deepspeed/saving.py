"""The part of ``engine.save_checkpoint`` that training waits for: everything before background writing starts."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.deepspeed.loading import random_file, random_states
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import stored_name
from ebbtide.runtime.checkpoint.format.memory import Slots
from ebbtide.runtime.checkpoint.format.plain_data import tensors_of
from ebbtide.runtime.checkpoint.format.skeleton import PlannedFile, lay_out, plain
from ebbtide.runtime.checkpoint.live_state import AnnouncedStep, LiveState, StoredTensor
from ebbtide.runtime.checkpoint.protocol.commit import Attempt, Commit, Deferred
from ebbtide.runtime.checkpoint.stream.job import BackgroundSave
from ebbtide.runtime.checkpoint.stream.persist import BlockWriter, Pace
from ebbtide.simulator.plan import CheckpointPlan


@dataclass(frozen=True)
class Means:
    """The settings and reserved host buffers that all checkpoints of one training engine share.

    Attributes:
        budget: Buffers to which an update copies state that a checkpoint has not written yet.
        bounce: Buffers of the writer threads, one per thread.
    """

    plan: CheckpointPlan
    live: LiveState
    files: Files
    pace: Pace
    budget: Slots
    bounce: Slots

    @classmethod
    def reserve(cls, plan: CheckpointPlan, live: LiveState, files: Files, block_bytes: int) -> "Means":
        """Reserve the host buffers that all checkpoints of a training engine share, as the checkpoint settings say."""
        return cls(
            plan,
            live,
            files,
            Pace(plan.write_bytes_per_s),
            Slots(plan.copy_budget_bytes // block_bytes, block_bytes),
            Slots(plan.writer_threads, block_bytes),
        )

    def close(self) -> None:
        self.budget.close()
        self.bounce.close()


class Save:
    """A collection of the files that DeepSpeed saves in one checkpoint. Only the training thread uses it."""

    def __init__(self, attempt: Attempt, means: Means, *, in_place: bool) -> None:
        """Begin a checkpoint that has no files yet. `add` adds the files that DeepSpeed saves.

        Args:
            in_place: If True, files get their final names before they are durable on disk.
        """
        self.attempt = attempt
        self._means = means
        self._in_place = in_place
        self._files: Files = Deferred(means.files) if in_place else means.files
        self._planned: list[PlannedFile] = []
        self._stored: list[StoredTensor] = []
        self.commit = Commit(attempt, self._files, means.plan.deadline_s)

    def covers(self, path: Path) -> bool:
        """Return whether a path is inside the checkpoint being saved."""
        return path.is_relative_to(self.attempt.target)

    def add(self, state_dict: Any, path: Path) -> None:
        """Add a file, given as a state dict, to the checkpoint and plan its layout. A background thread
        writes it later.
        """
        zero = path.name.endswith("optim_states.pt")
        layout = lay_out(state_dict, self._means.live, stream_device=zero)
        if layout.unreadable:
            _say_unreadable(path.name, layout.unreadable)
        name = path.relative_to(self.attempt.target)
        self._planned.append(PlannedFile(name, layout))
        self._stored += [
            StoredTensor(name.as_posix(), where, *found)
            for where, tensor in tensors_of(state_dict)
            if (found := self._means.live.stored_at(tensor)) is not None
        ]

    def add_random_states(self) -> None:
        layout = lay_out(random_states(), self._means.live, stream_device=False)
        self._planned.append(PlannedFile(Path(random_file(self.attempt.rank)), layout))

    def _announce(self) -> AnnouncedStep | None:
        attempt, stored = self.attempt, self._means.live.stored
        if stored is None or not self._stored:
            return None
        step = stored.announce(attempt.target, attempt.nonce, attempt.step)
        page = plain(step.describe(self._stored))
        self._planned.append(PlannedFile(Path(stored_name(attempt.rank)), page))
        return step

    def make_job(self, when_over: Callable[[BackgroundSave], None]) -> BackgroundSave:
        """Build the background job that writes the files added to the checkpoint so far. The job is not started."""
        means, attempt, plan = self._means, self.attempt, self._means.plan
        for planned in self._planned:
            means.files.mkdir((attempt.staging / planned.path).parent)
        stored = self._announce()
        writer = BlockWriter(
            attempt.staging,
            self._planned,
            self._files,
            means.budget,
            means.bounce,
            means.pace,
            writers=plan.writers,
            progress_deadline_s=plan.deadline_s,
            turns=means.live.turns,
            direct=not self._in_place,
        )
        job = BackgroundSave(
            attempt,
            self.commit,
            writer,
            means.live,
            means.files,
            plan.keep,
            durably=means.files if self._in_place else None,
            when_over=lambda: when_over(job),
            stored=stored,
        )
        return job


def checked_name(save_dir: str | Path | None, tag: str | None, step: int) -> str:
    """Return the tag under which a checkpoint is to be saved, after a check. Without a tag it is ``global_stepN``.

    Raises:
        ValueError: No folder to save to is given. DeepSpeed raises the same error.
        CheckpointError: The tag cannot be the name of a folder.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty path, but got {save_dir!r}")
    name = f"global_step{step}" if tag is None else str(tag)
    if not name or "/" in name or "\0" in name or name.startswith(".") or name == "latest":
        raise CheckpointError(
            f"a tag must name a folder ('latest', '/' and a leading '.' are not allowed), but got {name!r}"
        )
    return name


def check_replaceable(target: Path) -> None:
    """Check that a checkpoint can get its name without deleting something that is no folder.

    Raises:
        CheckpointError: The name belongs to a file, which the checkpoint would replace.
    """
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(
            f"the checkpoint {target.name!r} needs the folder {target}, but a file has this name: move the file away, "
            "or save with another tag"
        )


@cache  # cached, so that the warning is shown once
def _say_unreadable(name: str, what: str) -> None:
    warnings.warn(
        f"{name} holds an object that torch.load(weights_only=True) will refuse to load: {what}. "
        "Save plain data in client_state instead, or call torch.serialization.add_safe_globals with the "
        "class before load_checkpoint",
        stacklevel=2,
    )
