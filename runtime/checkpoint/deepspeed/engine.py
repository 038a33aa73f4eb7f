"""The checkpoint engine that replaces DeepSpeed's own and writes checkpoints in the background.

A checkpoint copies nothing when it starts. Writer threads read the tensors of optimizer state while
training continues. Only state that an update is about to overwrite is copied first (copy on update).
`Save` is the part of ``engine.save_checkpoint`` that training waits for.
"""

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from ebbtide.runtime.checkpoint.deepspeed.loading import Loading, random_file, random_states
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import stored_name
from ebbtide.runtime.checkpoint.format.memory import Slots
from ebbtide.runtime.checkpoint.format.plain_data import tensors_of
from ebbtide.runtime.checkpoint.format.safe_load import load_file
from ebbtide.runtime.checkpoint.format.skeleton import PlannedFile, lay_out, plain
from ebbtide.runtime.checkpoint.live_state import AnnouncedStep, LiveState, StoredTensor
from ebbtide.runtime.checkpoint.protocol.commit import GRACE_S, OUTCOME_GRACE_S, Attempt, Commit, Deferred
from ebbtide.runtime.checkpoint.protocol.peers import Agreement, Peers
from ebbtide.runtime.checkpoint.protocol.rotation import Note
from ebbtide.runtime.checkpoint.stream.job import BackgroundSave, SaveReport
from ebbtide.runtime.checkpoint.stream.persist import BlockWriter, Pace
from ebbtide.runtime.checkpoint.trainers import deleted_first, trainers_folder
from ebbtide.runtime.checkpoint.trainers.bystanders import (
    foreign_trainer,
    guard,
    others_in_flight,
    release,
    wait_for_jobs,
)
from ebbtide.runtime.hardware.background import fail_at_the_end
from ebbtide.simulator.page import versions
from ebbtide.simulator.plan import BLOCK_BYTES, CheckpointPlan


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
        """Begin a checkpoint without files. With ``in_place``, files get their final names before they are durable."""
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


logger = logging.getLogger("ebbtide.checkpoint")
_LAST = -1000  # priority of a finalizer: after those of libraries, which use -100 and more


class LazyCheckpointEngine(CheckpointEngine):
    """A checkpoint engine that saves in the background, commits atomically and loads only verified files.

    `install` creates this engine. DeepSpeed calls `create`, `makedirs`, `save` and `load`. The training
    loop calls `on_step`, `wait` and `close`. Only one checkpoint is written at a time.

    Attributes:
        client_state: Function that returns the ``client_state`` (such as the data position) for a save that
            the plan's checkpoint interval starts.
        last: A report of the last committed checkpoint: its bytes, and the seconds that training waited for it.
    """

    def __init__(
        self,
        engine: Any,
        plan: CheckpointPlan,
        live: LiveState,
        *,
        files: Files | None = None,
        plan_digest: Callable[[], str] = str,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__()
        self.name = "LazyCheckpointEngine"
        self.client_state: Callable[[], dict[str, Any]] = dict
        self.last: SaveReport | None = None
        self._engine = weakref.proxy(engine)
        self._plan = plan
        self._plan_digest = plan_digest
        self._live = live
        self._files = files or Files()
        self._peers = Peers(plan.deadline_s)
        self._means = Means.reserve(plan, live, self._files, block_bytes)
        self._loading = Loading(self._engine, live, self._peers, restore_random=plan.restore_random)
        self._job: BackgroundSave | None = None
        self._logged: BackgroundSave | None = None  # the failed job whose error was logged
        self._save: Save | None = None  # set while save_checkpoint runs
        self._note: Note | None = None  # note of the last save, while its trainer still writes to the folder
        self._saved: tuple[Any, ...] = ()  # the arguments of the last save
        self._closed = False
        self._pid = os.getpid()
        self._before_save: Callable[[], None] = lambda: None
        self._at_exit = _weak_close(self)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such a process runs no atexit functions
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=_LAST)

    # -- what the training loop calls

    def on_step(self, global_step: int) -> None:
        """Start a checkpoint if the plan's checkpoint interval has passed.

        Call this function after each optimizer step. If an earlier checkpoint has failed in the background, log it. The
        next save raises the error, also on the other ranks.

        Raises:
            CheckpointError: A checkpoint is due, and an earlier one has failed in the background.
        """
        job = self._job
        if job is None or job.running or job.failure is None or job.cancelled:
            self._reap()
        elif job is not self._logged:
            self._logged = job
            logger.error("%s. The next save raises this error", _failed(job))
        every = self._plan.interval_steps
        if every and self._plan.dir and global_step > 0 and global_step % every == 0:
            self._engine.save_checkpoint(self._plan.dir, client_state=self.client_state())

    def wait(self) -> SaveReport | None:
        """Wait until the checkpoint in progress is committed. Return the report of the last committed one, or None.

        Raises:
            CheckpointError: The checkpoint failed. The cause is chained.
        """
        if self._job is not None:
            self._job.wait()
        self._reap()
        return self.last

    def wait_for_reading(self) -> None:
        """Wait until no checkpoint reads optimizer state any more. If it has failed, the next save raises the error."""
        if self._job is not None:
            self._job.wait()

    def finish(self) -> None:
        """Wait until no checkpoint is being written, or until the writing of the checkpoint makes no more progress."""
        job = self._job
        if job is not None and not job.elsewhere:
            job.wait_while_moving(GRACE_S + 1.5 * OUTCOME_GRACE_S)

    @property
    def running(self) -> bool:
        return self._job is not None and self._job.running

    def close(self) -> None:
        """Wait until the checkpoint in progress is committed or has failed, and release the host memory
        that is reserved for copies of state.

        Raises:
            CheckpointError: A checkpoint failed, and this error has not been raised before.
        """
        if self._closed or self._pid != os.getpid():  # a forked child does not own this checkpoint engine
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        by_an_error = _by_an_error()
        try:
            self.wait()
        finally:
            if not by_an_error:
                if self._note is not None and self._note.waiting and not self._note.failed:
                    self._note.remove()  # the Trainer does not complete this checkpoint any more
                trainers_folder.settle(over=True)
            deleted_first.settle(committed=True)  # no new checkpoint will replace the deleted ones
            self._means.close()
            self._peers.close()

    def _reap(self) -> None:
        trainers_folder.settle()
        job = self._job
        if job is not None and job.running:
            return
        self._job = self._logged = None
        try:
            if job is not None:
                self._report(job)
        finally:
            if self._note is not None and not self._note.stays:
                note, self._note = self._note, None
                with contextlib.suppress(OSError):
                    note.remove()

    def _report(self, job: BackgroundSave) -> None:
        if job.report is not None:
            self.last = job.report
        if job.failure is not None and not job.cancelled:
            raise CheckpointError(_failed(job)) from job.failure

    # -- saving: around engine.save_checkpoint

    def save_checkpoint(
        self,
        original: Callable[..., Any],
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Start to save a checkpoint, and return as soon as training may continue. Replaces ``engine.save_checkpoint``.

        Returns:
            False if this save is skipped, because an earlier one is still being written and the setting
                ``checkpoint.busy`` is ``skip``.

        Raises:
            CheckpointError: An earlier checkpoint failed on any rank, the training engine was destroyed, or a file has
                the checkpoint's name. Nothing is written.
        """
        if self._closed:
            raise CheckpointError("this engine was destroyed, so it can no longer save or load checkpoints")
        begin = time.monotonic()
        name = checked_name(save_dir, tag, self._engine.global_steps)
        folder = Path(save_dir).absolute()
        steps = self._engine.global_steps, self._engine.micro_steps
        state = (str(folder), name, *steps, exclude_frozen_parameters, save_latest)
        if state == self._saved and not client_state and foreign_trainer() is not None:
            return True  # the Trainer saves each of its checkpoints twice, and nothing has changed since the first time
        verdict = self._begin(folder, name)
        if verdict is None:
            return False
        write = partial(
            original,
            save_dir,
            tag=name,
            client_state=client_state or {},
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if not verdict.together:
            _say_apart(verdict.targets)
            self._saved = ()
            self._save_apart(write, folder / "latest" if save_latest else None, name)
            return True
        attempt = self._attempt(folder, name, verdict.nonce, save_latest)
        self._note = self._save_in_background(attempt, write, begin)
        self._saved = state
        return True

    def _begin(self, folder: Path, name: str) -> Agreement | None:
        verdict = self._agree_to_begin(str(folder / name))
        if verdict.running:
            logger.info(
                "checkpoint %s was skipped, because an earlier one is still being written (checkpoint.busy is 'skip')",
                name,
            )
            return None
        # Also wait for jobs of another engine in this process. A folder allows one attempt at a time, because an
        # attempt first removes leftovers.
        wait_for_jobs(folder)
        self._files.point("save_begun")
        self._before_save()
        deleted_first.remember(folder)
        return verdict

    def _attempt(self, folder: Path, name: str, nonce: str, save_latest: bool) -> Attempt:
        step, peers = self._engine.global_steps, self._peers
        digest, installed = self._plan_digest(), versions("torch", "ebbtide", "deepspeed")
        return Attempt(folder, name, nonce, step, peers.rank, peers.world_size, save_latest, digest, installed)

    def _save_in_background(self, attempt: Attempt, write: Callable[[], Any], begin: float) -> Note:
        in_place = self._returns_in_place()
        save = Save(attempt, self._means, in_place=in_place)
        if foreign_trainer() == "transformers":
            save.commit.note.await_trainer()
        self._save = save
        try:
            save.commit.begin()
            trainers_folder.settle(attempt.save_dir)
            stored = self._live.stored
            with contextlib.nullcontext() if stored is None else stored.committed_apart():
                write()
            save.add_random_states()
            self._job = job = save.make_job(_over)
            self._files.point("skeleton_made")
        except BaseException as error:
            save.commit.abort(error)
            deleted_first.settle(committed=False)
            if isinstance(error, OSError):
                raise CheckpointError(_unwritable(attempt, error)) from error
            raise
        finally:
            self._save = None
        guard(job)
        job.start()
        if in_place:
            job.wait_until_placed()
        job.stall_s = time.monotonic() - begin
        if self._plan.mode == "sync":
            self.wait()
        self._reap()
        return save.commit.note

    def _save_apart(self, write: Callable[[], Any], latest: Path | None, tag: str) -> None:
        write()
        if latest is not None and self._peers.rank == 0:
            self._files.write_durably(latest, tag.encode(), "latest")
        deleted_first.settle(committed=True)
        self._peers.concat([])  # as in DeepSpeed, all files exist when any rank continues

    def _returns_in_place(self) -> bool:
        mode = self._plan.mode
        if mode in ("in_place", "sync") or foreign_trainer() is None:
            return mode == "in_place"
        # A trainer looks for its newest checkpoint before it builds an engine. Leftovers of a killed run are resolved
        # at that moment only if ebbtide wraps `deepspeed.initialize`.
        return mode == "auto" or not hasattr(deepspeed.initialize, "_ebbtide_original")

    def _agree_to_begin(self, target: str) -> Agreement:
        if self.running and self._plan.busy == "replace":
            assert self._job is not None
            self._job.cancel()
        if self.running and self._plan.busy != "skip":
            assert self._job is not None
            self._job.wait()
        failure = None
        try:
            self._reap()
            check_replaceable(Path(target))
        except CheckpointError as error:
            failure = error
        verdict = self._peers.agree(running=self.running, failure=str(failure or ""), target=target)
        if failure is not None:
            raise failure
        if verdict.failure:
            raise CheckpointError(f"a checkpoint failed on another rank: {verdict.failure}")
        return verdict

    # -- what DeepSpeed calls

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing when DeepSpeed announces a save, since `save_checkpoint` has already begun the checkpoint."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder that DeepSpeed asks for, unless it is a folder of the checkpoint that is being saved."""
        if self._save is None or not self._save.covers(Path(path).absolute()):
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Plan the layout of one checkpoint file that DeepSpeed saves. Background threads write the file later.

        A file that DeepSpeed saves outside of a checkpoint's folder, such as a 16-bit export, is written
        immediately, completely or not at all.
        """
        target = Path(path).absolute()
        if self._save is not None and self._save.covers(target):
            self._save.add(state_dict, target)
            return
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            torch.save(state_dict, temporary)
            self._files.rename(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)  # it would take space on a disk that may be full
            raise

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a checkpoint's file, as ``torch.load`` would."""
        # Where possible, a tensor is read directly into the model's or optimizer's own tensor, so that host memory
        # holds no second copy.
        return load_file(path, self._loading.into)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True to DeepSpeed without committing. A background thread commits the checkpoint (see `wait`)."""
        return True

    def is_decoupled(self) -> bool:
        """Return True, so that DeepSpeed leaves the file ``latest`` and the commit of checkpoints to ebbtide."""
        # DeepSpeed then also calls `cleanup` when it destroys the training engine.
        return True

    def get_commit_info(self) -> None:
        """Return None, so that DeepSpeed commits no checkpoint at the next training step. ebbtide commits it itself."""

    def cleanup(self) -> None:
        self.close()

    def preserves_storage_sharing(self) -> bool:
        """Return whether DeepSpeed must clone tensors before `save`: False while ebbtide saves a checkpoint."""
        return self._save is None

    # -- loading: around engine.load_checkpoint

    def load_checkpoint(
        self, original: Callable[..., Any], load_dir: str, tag: str | None = None, **options: Any
    ) -> Any:
        """Load a checkpoint into the DeepSpeed engine, as a replacement of ``engine.load_checkpoint`` (see
        `Loading.load`).
        """
        self.wait()
        wait_for_jobs()  # another engine of this process may be writing the checkpoint to load
        self._before_save()
        deleted_first.remember(Path(load_dir))
        return self._loading.load(original, load_dir, tag, options)


def _failed(job: BackgroundSave) -> str:
    became = (
        "failed in the background and was not committed"
        if job.report is None
        else "was committed, but older checkpoints could not be deleted"
    )
    return f"checkpoint {job.attempt.tag!r} of step {job.attempt.step} {became}: {job.failure}"


@cache  # cached, so that the warning is logged once
def _say_apart(targets: tuple[str, ...]) -> None:
    folders = sorted(set(targets))
    logger.warning(
        "ranks save this checkpoint to different folders (%s, ...), so DeepSpeed alone writes each part while training "
        "waits, and checkpoint.keep is not applied. Give all ranks the same folder and tag",
        ", ".join(folders[:2]),
    )


def _unwritable(attempt: Attempt, error: OSError) -> str:
    exists = attempt.save_dir.is_dir()
    why = f"{'to which nothing can be written' if exists else 'which cannot be made'}: {error.strerror or error}"
    return (
        f"checkpoint {attempt.tag!r} of step {attempt.step} needs the folder {attempt.save_dir}, {why}. Make the "
        f"folder{'' if exists else ' above it'} writable, free space on its disk, or save to another folder"
    )


def _over(job: BackgroundSave) -> None:
    # If two engines save together, the last one to commit settles deletions, which concern the state of both.
    if job.failure is not None or not others_in_flight(job):
        deleted_first.settle(committed=job.failure is None)
    release(job)


def _by_an_error() -> bool:
    if getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None:
        return True
    error = sys.exc_info()[1] if multiprocessing.parent_process() is not None else None
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _weak_close(lazy: LazyCheckpointEngine) -> Callable[[], None]:
    held = weakref.ref(lazy)

    def close() -> None:
        engine = held()
        if engine is None:
            return
        try:
            engine.close()
            return
        except CheckpointError:  # too late to raise, because the interpreter is ending
            logger.exception("a checkpoint failed while the program ended, so the exit code is 1")
            fail_at_the_end()
        if multiprocessing.parent_process() is not None and not _by_an_error():
            raise SystemExit(1)  # a forked process ends before `fail_at_the_end` has an effect

    return close
