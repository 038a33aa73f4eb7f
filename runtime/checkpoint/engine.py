"""The lazy asynchronous checkpoint engine, in the place of DeepSpeed's own.

Lazy: a checkpoint copies nothing up front; writers stream from the live buffers while training
goes on, and only what an update is about to overwrite is copied (copy on update).
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from runtime.checkpoint.blocks import BLOCK_BYTES, PlannedFile
from runtime.checkpoint.commit import Attempt, Commit
from runtime.checkpoint.drain import Drainer, Tiers
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.files import Files
from runtime.checkpoint.inspect import verify
from runtime.checkpoint.job import Job, Report
from runtime.checkpoint.live_state import LiveState
from runtime.checkpoint.manifest import GLOBAL_NAME
from runtime.checkpoint.memory import Slots
from runtime.checkpoint.output import Pace
from runtime.checkpoint.peers import Peers
from runtime.checkpoint.persist import BlockWriter
from runtime.checkpoint.random_state import random_states, restore_random_states
from runtime.checkpoint.restore import Choice, newest_of_tiers
from runtime.checkpoint.retention import being_read
from runtime.checkpoint.safe_load import load_file, only_weights
from runtime.checkpoint.skeleton import lay_out, tensors_of
from simulator import CheckpointPlan

logger = logging.getLogger("ebbtide.checkpoint")

DEADLINE_S = 600.0


class LazyCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves in the background, commits atomically, loads verified files only.

    Made by `install`. DeepSpeed calls `create`, `makedirs`, `save` and `load`; the training loop
    calls `on_step`, `wait` and `close`. One checkpoint runs at a time.

    Attributes:
        client_state: called for what a save at the planned interval gives DeepSpeed as
            ``client_state`` (data position and the like).
        last: what the last committed checkpoint cost.
        chosen: the checkpoint the last ``load_checkpoint`` without a tag picked, and why.
    """

    def __init__(
        self,
        engine: Any,
        plan: CheckpointPlan,
        live: LiveState,
        *,
        files: Files | None = None,
        plan_digest: str = "",
        deadline_s: float = DEADLINE_S,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__()
        self.name = "LazyCheckpointEngine"
        self.client_state: Callable[[], dict[str, Any]] = dict
        self.last: Report | None = None
        self.chosen: Choice | None = None
        self._engine = weakref.proxy(engine)
        self._plan = plan
        self._plan_digest = plan_digest
        self._live = live
        self._files = files or Files()
        self._deadline_s = deadline_s
        self._peers = Peers(deadline_s)
        self._budget = Slots(plan.copy_budget_bytes // block_bytes, block_bytes)
        self._bounce = Slots(plan.writers, block_bytes)
        self._pace = Pace(plan.write_bytes_per_s)
        self._tiers = _tiers(plan)
        self._drainer: Drainer | None = None
        self._caught_up = False
        if self._tiers is not None and self._peers.rank == 0:
            self._drainer = Drainer(self._tiers, self._files, self._pace, deadline_s)
        self._job: Job | None = None
        self._attempt: Attempt | None = None  # between begin and end of save_checkpoint
        self._planned: list[PlannedFile] = []
        self._into: dict[tuple[Any, ...], torch.Tensor] = {}
        self._closed = False
        self._before_save: Callable[[], None] = lambda: None
        self._at_exit = _weak_close(self)
        atexit.register(self._at_exit)

    # -- what the training loop calls

    def on_step(self, global_step: int) -> None:
        """After each optimizer step: raises a failed checkpoint, saves at the planned interval.

        Raises:
            CheckpointError: an earlier checkpoint failed in the background; the cause is chained.
        """
        self._reap()
        if self._drainer is not None and not self._caught_up:
            self._caught_up = True  # what an earlier run had no time for; loading is over by now
            self._drainer.wake(catching_up=True)
        every = self._plan.interval_steps
        if every and self._plan.dir and global_step > 0 and global_step % every == 0:
            self._engine.save_checkpoint(self._plan.dir, client_state=self.client_state())

    def wait(self) -> Report | None:
        """Until the running checkpoint is committed; returns what the last one cost.

        Raises:
            CheckpointError: it failed; the cause is chained.
        """
        if self._job is not None:
            self._job.wait()
        self._reap()
        return self.last

    def wait_for_drain(self) -> None:
        """Until the durable tier (``checkpoint.drain_dir``) holds the newest checkpoint.

        Raises:
            CheckpointError: it could not be written, or made no progress within the deadline.
        """
        self.wait()
        if self._drainer is not None:
            self._drainer.wait()

    @property
    def running(self) -> bool:
        return self._job is not None and self._job.running

    def close(self) -> None:
        """Finishes the running checkpoint and lets go of the reserved memory.

        Raises:
            CheckpointError: a checkpoint failed that training has not heard of yet.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self.wait_for_drain()
        finally:
            self._budget.close()
            self._bounce.close()
            self._peers.close()

    def _reap(self) -> None:
        if self._drainer is not None:
            self._drainer.reap()
        job = self._job
        if job is None or job.running:
            return
        self._job = None
        if job.report is not None:
            self.last = job.report
        if job.failure is not None and not job.cancelled:
            raise CheckpointError(
                f"checkpoint {job.attempt.tag!r} of step {job.attempt.step} failed in the "
                f"background and was not committed: {job.failure}"
            ) from job.failure

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
        """Stands for ``engine.save_checkpoint``; returns as soon as training may go on.

        Returns:
            False: skipped, because one is running and ``checkpoint.busy`` is ``skip``.

        Raises:
            CheckpointError: an earlier checkpoint failed, on any rank.
        """
        begin = time.monotonic()
        name = _checked_tag(tag, self._engine.global_steps)
        if self._tiers is not None and Path(save_dir).resolve() == self._tiers.durable.resolve():
            self.wait_for_drain()  # one at a time makes hidden folders there
        nonce = self._agree_to_begin()
        if nonce is None:
            logger.info("checkpoint %s skipped: one is being written (busy: skip)", name)
            return False
        self._files.point("save_begun")
        self._before_save()
        self._attempt = self._make_attempt(save_dir, name, nonce, save_latest=save_latest)
        self._planned = []
        commit = Commit(self._attempt, self._files, self._deadline_s)
        try:
            commit.begin()
            original(
                save_dir, tag=name, client_state=client_state or {}, save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )  # fmt: skip
            layout = lay_out(random_states(), self._live, stream_device=False)
            self._planned.append(PlannedFile(Path(self._random_file), layout))
            self._job = self._make_job(self._attempt, commit)
            self._files.point("skeleton_made")
        except BaseException as error:
            commit.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._attempt = None
        self._job.start()
        self._job.stall_s = time.monotonic() - begin
        if self._plan.mode == "sync":
            self.wait()
        return True

    def _agree_to_begin(self) -> str | None:
        """The attempt's nonce, the same on all ranks; None: skip.

        All ranks must decide the same, although one may have finished where another has not.
        """
        if self.running and self._plan.busy == "replace":
            assert self._job is not None
            self._job.cancel()
        if self.running and self._plan.busy != "skip":
            assert self._job is not None
            self._job.wait()
        failure = None
        try:
            self._reap()
        except CheckpointError as error:
            failure = error
        verdict = self._peers.agree(running=self.running, failure=str(failure or ""))
        if failure is not None:
            raise failure
        if verdict.failure:
            raise CheckpointError(f"a checkpoint failed on another rank: {verdict.failure}")
        return None if verdict.running else verdict.nonce

    def _make_attempt(
        self, save_dir: str, tag: str, nonce: str, *, save_latest: bool
    ) -> Attempt:  # fmt: skip
        return Attempt(
            save_dir=Path(save_dir).absolute(), tag=tag, nonce=nonce, rank=self._peers.rank,
            step=self._engine.global_steps, world_size=self._peers.world_size,
            save_latest=save_latest, plan=self._plan_digest, versions=_versions(),
            other_tier=self._other_tier(save_dir),
        )  # fmt: skip

    def _make_job(self, attempt: Attempt, commit: Commit) -> Job:
        for planned in self._planned:
            self._files.mkdir((attempt.staging / planned.path).parent)
        writer = BlockWriter(
            attempt.staging, self._planned, self._files, self._budget, self._bounce, self._pace,
            writers=self._plan.writers, progress_deadline_s=self._deadline_s,
            turns=self._live.turns,
        )  # fmt: skip
        self._planned = []
        return Job(
            attempt, commit, writer, self._live, self._files, self._keep_in(attempt.save_dir),
            self._drainer.wake if self._drainer is not None else lambda: None,
        )  # fmt: skip

    def _other_tier(self, folder: str | Path) -> Path | None:
        if self._tiers is None or not self._tiers.holds(folder):
            return None
        fast = Path(folder).resolve() == self._tiers.fast.resolve()
        return self._tiers.durable if fast else self._tiers.fast

    def _keep_in(self, folder: Path) -> int:
        durable = self._tiers is not None and folder.resolve() == self._tiers.durable.resolve()
        return self._plan.drain_keep if durable else self._plan.keep

    # -- what DeepSpeed calls

    def create(self, info: CheckpointCommitInfo) -> None:
        """DeepSpeed is about to save; `save_checkpoint` has begun the attempt already."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A checkpoint's own folder gets its name when it is committed, not before."""
        attempt = self._attempt
        if attempt is None or not Path(path).absolute().is_relative_to(attempt.target):
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Lays the file out; the background writes it. Outside of ``save_checkpoint`` (16-bit
        export) it is written at once, whole or not at all.
        """
        target = Path(path).absolute()
        attempt = self._attempt
        if attempt is None or not target.is_relative_to(attempt.target):
            temporary = target.with_name(f".{target.name}.tmp")
            torch.save(state_dict, temporary)
            self._files.rename(temporary, target)
            return
        zero = target.name.endswith("optim_states.pt")
        layout = lay_out(state_dict, self._live, stream_device=zero)
        self._planned.append(PlannedFile(target.relative_to(attempt.target), layout))

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002 - always to the host
        """The file's content, on the host; state goes straight into the live buffers."""
        return load_file(path, self._into if path.endswith("optim_states.pt") else None)

    def commit(self, info: CheckpointCommitInfo) -> bool:  # noqa: ARG002
        """The background commits; see `wait`."""
        return True

    def is_decoupled(self) -> bool:
        """DeepSpeed leaves ``latest`` and the commit to us, and calls `cleanup` in destroy."""
        return True

    def get_commit_info(self) -> None:
        """Nothing for DeepSpeed to commit at the next step."""

    def cleanup(self) -> None:
        self.close()

    def preserves_storage_sharing(self) -> bool:
        """No clones wanted: a file holds just the bytes of its tensors."""
        return False

    # -- loading: around engine.load_checkpoint

    def load_checkpoint(
        self,
        original: Callable[..., Any],
        load_dir: str,
        tag: str | None = None,
        **options: Any,
    ) -> Any:
        """Stands for ``engine.load_checkpoint``: verifies first, then loads, executes nothing.

        Without a tag: the newest checkpoint that verifies. A checkpoint written without ebbtide is
        loaded as DeepSpeed would, but for ``weights_only``.

        Raises:
            CheckpointError: the checkpoint asked for, or every one there is, does not verify.
        """
        self.wait_for_drain()
        self._before_save()
        universal = self._engine.load_universal_checkpoint()
        folder = Path(load_dir)
        if not universal:
            folder, tag = self._locate(folder, tag)
        with only_weights():
            if universal or tag is None or not (folder / tag / GLOBAL_NAME).exists():
                return original(str(folder), tag=tag, **options)
            with being_read(folder / tag):
                if self.chosen is None or (self.chosen.directory, self.chosen.tag) != (folder, tag):
                    self._require_whole(folder, tag)
                self._into = self._targets()
                try:
                    result = original(str(folder), tag=tag, **options)
                finally:
                    self._into = {}
                self._restore_random(folder / tag)
                return result

    def _locate(self, load_dir: Path, tag: str | None) -> tuple[Path, str | None]:
        """The tier and the tag to load; without a tag, the newest that verifies."""
        if tag is None:
            tag = self._choose(load_dir)
            return (self.chosen and self.chosen.directory) or load_dir, tag
        other = self._other_tier(load_dir)
        if other is not None and not (load_dir / tag / GLOBAL_NAME).exists():
            return (other if (other / tag / GLOBAL_NAME).exists() else load_dir), tag
        return load_dir, tag

    def _choose(self, load_dir: Path) -> str | None:
        """The tag of the newest checkpoint that verifies; None: there is none of ours at all."""
        tiers = [load_dir]
        if self._tiers is not None and self._tiers.holds(load_dir):
            tiers = [self._tiers.fast, self._tiers.durable]
        self.chosen = choice = newest_of_tiers(tiers, self._problems)
        if choice.tag is None and choice.passed_over:
            raise CheckpointError(
                f"{load_dir} must hold a checkpoint that verifies, but {choice.summary}; to load "
                "one without verification, remove its file ebbtide.json and give its tag"
            )
        if self._peers.rank == 0 and (choice.tag is not None):
            logger.log(logging.WARNING if choice.passed_over else logging.INFO, choice.summary)
        return choice.tag

    def _problems(self, load_dir: Path, tag: str) -> list[Any]:
        """Of all ranks, each having read its share."""
        share = (self._peers.rank, self._peers.world_size)
        return self._peers.concat(verify(load_dir, tag, share=share))

    def _require_whole(self, load_dir: Path, tag: str) -> None:
        problems = self._problems(load_dir, tag)
        if problems:
            raise CheckpointError(
                f"checkpoint {tag!r} must match its manifest, but {problems[0]} "
                f"({len(problems)} problems; `tune checkpoint verify {load_dir}` lists them); load "
                "without a tag to take the newest one that verifies"
            )

    def _targets(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """Live host tensors by their path in the optimizer's file, to read straight into."""
        optimizer = self._engine.optimizer
        if optimizer is None or not self._engine.zero_optimization():
            return {}
        tree = {"optimizer_state_dict": optimizer.state_dict()}
        return {
            path: tensor
            for path, tensor in tensors_of(tree)
            if tensor.device.type == "cpu" and tensor.is_contiguous()
            and self._live.runs(
                tensor.data_ptr(), tensor.numel() * tensor.element_size()
            ) is not None
        }  # fmt: skip

    @property
    def _random_file(self) -> str:
        """Of this rank: below ZeRO-3 all ranks are given rank 0's client_state."""
        return f"random_states_rank{self._peers.rank:05d}.pt"

    def _restore_random(self, folder: Path) -> None:
        path = folder / self._random_file
        if path.exists():
            restore_random_states(load_file(path))


def _tiers(plan: CheckpointPlan) -> Tiers | None:
    if plan.dir is None or plan.drain_dir is None:
        return None
    return Tiers(Path(plan.dir).absolute(), Path(plan.drain_dir).absolute(), plan.drain_keep)


def _checked_tag(tag: str | None, step: int) -> str:
    name = f"global_step{step}" if tag is None else str(tag)
    if not name or "/" in name or "\0" in name or name.startswith(".") or name == "latest":
        raise CheckpointError(
            "a tag is the name of a folder: not empty, no '/', no leading '.', not 'latest'; "
            f"but got {name!r}"
        )
    return name


@cache
def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in ("ebbtide", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _weak_close(lazy: LazyCheckpointEngine) -> Callable[[], None]:
    held = weakref.ref(lazy)

    def close() -> None:
        engine = held()
        if engine is not None:
            try:
                engine.close()
            except CheckpointError:  # too late to raise: the interpreter is going
                logger.exception("a checkpoint failed while the program ended")

    return close
