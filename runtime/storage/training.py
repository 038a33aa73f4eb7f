"""The part of a checkpoint's save and load for optimizer state on drives. A save commits the state on the drives,
without a copy. A load uses the committed state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.errors import ManifestError
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, GlobalManifest, dump, parse
from ebbtide.runtime.checkpoint.live_state import StoredTensor
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.pages import CheckpointPage, CommittedStep
from ebbtide.runtime.storage.reader import StepReader
from ebbtide.runtime.storage.store import ExtentStore


@dataclass
class StoredSteps:
    """The optimizer state on drives that checkpoints refer to. It implements the interface `StoredState`.

    Only the training thread uses it.

    Attributes:
        opened: Function that returns the store. The function returns None if this run keeps no state on drives. Such
            a run may still load state that another run has stored.
        subgroups: Function that returns the subgroups with state on a drive at the time of the call.
        updated: Function that waits until no update writes to a drive any more.
        apart: True while a checkpoint collects the engine's state dicts (`committed_apart`). Writes to a drive are
            not waited for in this time, because the checkpoint waits for these writes later.
        loading: True while a checkpoint is loaded (`read`). Restored state is then not yet compared with its hash
            (`check_restored`).
    """

    opened: Callable[[], ExtentStore | None]
    subgroups: Callable[[], frozenset[int]]
    updated: Callable[[], None]
    apart: bool = False
    loading: bool = False

    @property
    def store(self) -> ExtentStore | None:
        return self.opened()

    @contextmanager
    def committed_apart(self) -> Iterator[None]:
        self.apart = True
        try:
            yield
        finally:
            self.apart = False

    def announce(self, target: Path, nonce: str, step: int) -> StoredStep:
        assert self.store is not None  # without a store there are no stored tensors
        version = self.store.announce(subgroups=self.subgroups())
        return StoredStep(self.store, version, target, nonce, step)

    def check_restored(self) -> None:
        """Verify optimizer state on drives that was restored from a checkpoint and that no step has read yet."""
        if self.store is not None and not self.loading:
            self.store.check_restored(self.subgroups())

    def problem(self, page: bytes) -> str:
        try:
            asked = self._parse(page)
            with closing(StepReader(asked)) as reader:
                # The hashes of adopted moments are checked later, before their first use in the next step.
                reader.verify(masters_of=self._adoptable(asked))
        except (StorageError, ManifestError, OSError) as error:
            return str(error)
        return ""

    def _parse(self, page: bytes) -> CheckpointPage:
        asked = parse(page, CheckpointPage, "the checkpoint's page of what is stored")
        if self.store is None or not self._ours(asked):
            return asked
        here = [str(directory) for directory in self.store.directories]  # the folder may have been moved since the save
        return asked.model_copy(update={"directories": here})

    def adopt(self, page: bytes) -> frozenset[int]:
        asked = self._parse(page)
        if not self._ours(asked):
            return frozenset()
        assert self.store is not None
        self.updated()  # otherwise the state written by the last updates would be the newest
        self.store.restore(name=asked.name)
        return self._adoptable(asked)

    def _ours(self, asked: CheckpointPage) -> bool:
        return self.store is not None and asked.store == self.store.nonce

    def _adoptable(self, asked: CheckpointPage) -> frozenset[int]:
        held = frozenset(tensor.subgroup for tensor in asked.tensors)
        return held & self.subgroups() if self._ours(asked) else frozenset()

    @contextmanager
    def read(self, page: bytes, adopted: Collection[int]) -> Iterator[Mapping[tuple[Any, ...], torch.Tensor]]:
        asked = self._parse(page)
        wanted = [t for t in asked.tensors if t.subgroup not in adopted]
        self.loading = True
        try:
            if not wanted:
                yield {}
                return
            with closing(StepReader(asked)) as reader:
                yield {t.path: reader.tensor(t.subgroup, t.index) for t in wanted}
                reader.check_there()
        finally:
            self.loading = False
            if self.store is not None:  # the load may have failed
                self.store.take_adopted()


@dataclass(frozen=True)
class StoredStep:
    """The version of optimizer state on drives that a checkpoint in progress will commit.

    This state stays on the drives and is not copied to the checkpoint's files. The class implements the interface
    `AnnouncedStep`.
    """

    store: ExtentStore
    version: int
    target: Path
    nonce: str
    step: int

    def describe(self, tensors: Sequence[StoredTensor]) -> bytes:
        return dump(
            CheckpointPage(
                store=self.store.nonce,
                name=self.nonce,
                step=self.step,
                rank=self.store.rank,
                directories=[str(d.absolute()) for d in self.store.directories],
                tensors=list(tensors),
            )
        )

    def prepare(self) -> None:
        where = json.dumps({"checkpoint": str(self.target), "nonce": self.nonce})
        self.store.prepare(self.version, self.step, self.nonce, where)

    def settle(self, *, committed: bool) -> None:
        self.store.abandon(self.version)
        if any(step.name == self.nonce for step in self.store.steps):
            self.store.settle(self.nonce, committed=committed)


def checkpoint_of(record: CommittedStep) -> Path:
    """Return the path of a checkpoint's folder. The folder may have been deleted."""
    return Path(json.loads(record.data)["checkpoint"])


def stands(record: CommittedStep) -> bool:
    """Return whether a checkpoint with optimizer state on drives still exists.

    Args:
        record: Description of the checkpoint's optimizer state on the drives. It names the checkpoint's folder.
    """
    try:
        page = (checkpoint_of(record) / GLOBAL_NAME).read_bytes()
        return parse(page, GlobalManifest, GLOBAL_NAME).nonce == json.loads(record.data)["nonce"]
    except (OSError, ManifestError, ValueError, KeyError, TypeError):
        return False
