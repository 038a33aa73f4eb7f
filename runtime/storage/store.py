"""A store that keeps subgroups' optimizer state on drives.

State is read and written one subgroup at a time. A commit records the state that belongs to one training step, so that
training can resume from it. While the state of a commit is kept, later writes do not overwrite it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.memory import padded
from ebbtide.runtime.storage.blocks import BlockMover
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.storage.extent_file import ExtentFile
from ebbtide.runtime.storage.folder import Drive, Folders
from ebbtide.runtime.storage.layout import Layout
from ebbtide.runtime.storage.pages import CommittedStep, ExtentRecord, StorePage
from ebbtide.runtime.storage.versions import Retention, Versions
from ebbtide.runtime.storage.view import View, page_aligned
from ebbtide.runtime.storage.waiting import DriveProgress, Telling
from ebbtide.simulator.plan import BLOCK_BYTES

DEPTH = 4
DEADLINE_S = 300.0


class ExtentStore:
    """A store of one rank's optimizer state on drives: masters and moments of some subgroups.

    A new store reserves space on the drives, or finds an earlier run's store and enlarges it. The store is thread-safe,
    but only one thread at a time may read and write a given subgroup.

    A version is the optimizer state after one update. `tick` begins a version, and the update then writes each subgroup
    once. Each subgroup has several extents (regions of the drives), and each extent holds one version of its state. A
    write goes to an extent with content that is neither committed nor being committed. The first failed write or sync
    disables the store: every later write and commit raises its error.

    A committed version is called a step. A checkpoint calls `prepare`, which commits a version and keeps all earlier
    steps. When the checkpoint itself has been committed, `settle` drops the oldest steps beyond ``keep``.

    Args:
        keep: Number of steps to keep on the drives. Each subgroup also has space for one version that is not committed
            yet.
        depth: Number of threads per drive and direction.
        block_bytes: Bytes that are moved and hashed at a time, a multiple of 4096.
        verify_reads: If True, every read is compared with the hash taken while writing.
        deadline_s: Seconds without progress after which a drive counts as hanging.

    Raises:
        StorageError: Space is missing, another run uses the directories, or they hold steps of another layout or world
            size.
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        sizes: Mapping[int, Sequence[int]],
        *,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 1,
        depth: int = DEPTH,
        block_bytes: int = BLOCK_BYTES,
        verify_reads: bool = False,
        deadline_s: float = DEADLINE_S,
        files: Files | None = None,
        stands: Callable[[CommittedStep], bool] = lambda _: True,
        protects: Callable[[CommittedStep], bool] = lambda _: False,
    ) -> None:
        self.rank, self.directories = rank, [drive.directory for drive in drives]
        self._verify_reads, self._deadline_s = verify_reads, deadline_s
        self._retention = Retention(keep, stands, protects)
        self._progress = DriveProgress(deadline_s)
        self._condition = self._progress.condition
        self._committing = threading.Lock()  # one commit at a time, because a manifest names all kept steps
        self._views: dict[int, View] = {}
        self.read_bytes = self.written_bytes = 0
        wanted = StorePage(
            nonce="",
            rank=rank,
            world_size=world_size,
            drive=0,
            block_bytes=block_bytes,
            weights=[float(d.weight) for d in drives],
            extents=keep + 1,
            sizes=[(s, list(tensors)) for s, tensors in sizes.items()],
        )
        with contextlib.ExitStack() as undo:
            self._claim(wanted, drives, depth, files or Files(), undo)
            self.grow(sizes)
            undo.pop_all()

    def _claim(
        self, wanted: StorePage, drives: Sequence[Drive], depth: int, files: Files, undo: contextlib.ExitStack
    ) -> None:
        keep, stands = self._retention.keep, self._retention.stands
        try:
            self._folders = Folders(drives, self.rank, files)
            undo.callback(self._folders.close)
            page, steps = self._folders.claim(wanted)
            self.nonce = page.nonce
            if len(steps) > keep:  # an earlier run was killed between `prepare` and `settle`
                steps = self._retention.of([s for s in steps if stands(s)] or steps[1:])
                self._folders.commit(self.nonce, steps)
            layout = Layout(dict(page.sizes), page.weights, page.block_bytes, page.extents)
            sized = zip(drives, layout.file_bytes, strict=True)
            opened = [ExtentFile(self._folders.extents(drive), size_bytes, files) for drive, size_bytes in sized]
            self._blocks = BlockMover(layout, opened, depth, self._deadline_s)
            undo.callback(self._blocks.close)
            for file in opened:
                (file.check if steps else file.reserve)()
        except OSError as error:
            raise StorageError(
                f"the directories for stored state must be writable, but {[str(d) for d in self.directories]} "
                f"gave: {error}"
            ) from error
        self._versions = Versions(layout.sizes, page.extents, steps, [s.step for s in steps if stands(s)])

    # -- reading and writing, on the lanes' threads

    def adopt(self, subgroup: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Write a subgroup's initial state to the drives."""
        self.write(subgroup, tensors, self._versions.due)
        return self.view(subgroup)

    def grow(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Reserve space on the drives for the state of further subgroups, while training runs.

        Raises:
            StorageError: There is no room. The state on the drives is unchanged.
        """
        more = {s: tensors for s, tensors in sizes.items() if s not in self._blocks.layout.sizes}
        if not more:
            return
        with self._committing:
            layout = self._blocks.layout.with_more(more)
            for file, size_bytes in zip(self._blocks.files, layout.file_bytes, strict=True):
                file.grow(size_bytes)
            self._folders.grow(more)
            with self._condition:
                self._blocks.layout = layout
                self._versions.grow(more)

    def view(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        """Return memory-mapped fp32 tensors, at fixed addresses, that always show a subgroup's latest state on drives.

        Changes to them are lost at the subgroup's next `write`, unless they are passed to that call.
        """
        if subgroup not in self._views:
            self._views[subgroup] = View(self._blocks.layout, subgroup)
            self._show(subgroup)
        return self._views[subgroup].tensors

    def _show(self, subgroup: int) -> None:
        live = self._versions.subgroups[subgroup].live
        if live >= 0 and subgroup in self._views:
            self._views[subgroup].show(live, self._blocks.files)

    def read(self, subgroup: int, into: Sequence[torch.Tensor]) -> None:
        """Read a subgroup's state from the drives into tensors. Return when it is read.

        Args:
            into: Contiguous host tensors for the subgroup's master and moments, in this order. Page-aligned ones
                (`page_aligned`) are filled without a copy.

        Raises:
            DamagedError: The state differs from the state that was written.
            StorageError: The drive failed, or made no progress for ``deadline_s``.
        """
        with self._condition:
            held = self._versions.subgroups[subgroup]
            extent, check = held.live, held.unchecked or self._verify_reads
            if extent < 0:
                raise StorageError(f"subgroup {subgroup} must have been written before it is read, but was not")
            held.reads += 1
        try:
            self._progress.raise_failure()
            hashes = self._blocks.read(subgroup, extent, into, check=check)
        finally:
            with self._condition:
                held.reads -= 1
                self._progress.made()
        if check and hashes != held.hashes[extent]:
            raise DamagedError(
                f"the state of subgroup {subgroup} in {self._blocks} is damaged: its hash is not the "
                "one that was written. Resume from an earlier checkpoint, and check the drive"
            )
        with self._condition:
            if check:  # otherwise a load may have asked for the check meanwhile
                held.unchecked = False
            self.read_bytes += sum(map(padded, self._blocks.layout.sizes[subgroup]))

    def check_restored(self, subgroups: Collection[int] | None = None) -> None:
        """Compare the optimizer state that a checkpoint load has restored on the drives with its stored hashes.

        Call this before code uses the tensors of `view`, because that code does not call `read`. State that `read` has
        verified since the restore is skipped. If ``verify_reads`` is set, state that was written and not read back yet
        is verified too.

        Raises:
            StorageError: The state is damaged or cannot be read (see `read`).
        """
        with self._condition:
            held = self._versions.subgroups
            late = [s for s in (held if subgroups is None else subgroups) if s in held and held[s].unchecked]
        for s in late:
            sizes = self._blocks.layout.sizes[s]
            self.read(s, [page_aligned(n // torch.float32.itemsize) for n in sizes])

    def write(self, subgroup: int, source: Sequence[torch.Tensor], version: int | None = None) -> None:
        """Write a subgroup's new optimizer state to a free place on the drives. Return when it is written.

        Later reads of the subgroup return the new state.

        Args:
            version: Number that `tick` returned for the update that computed the state. All subgroups of an update have
                the same number. None if no update computed the state: the state then gets a new number, for this
                subgroup alone.

        Raises:
            StorageError: The drive failed or made no progress for ``deadline_s`` seconds. Or no place became free,
                because a commit in progress did not end.
        """
        with self._condition:
            version = self._versions.begin(version)
            extent = self._free_extent(subgroup)
        view = self._views.get(subgroup)
        own = view is not None and source[0].data_ptr() == view.tensors[0].data_ptr()
        with self._progress.failing():
            self._progress.raise_failure()
            hashes = self._blocks.write(subgroup, extent, source, own=own)
            if view is not None:
                view.show(extent, self._blocks.files)
        with self._condition:
            self._versions.end_write(subgroup, extent, version, hashes, unchecked=self._verify_reads)
            self.written_bytes += sum(map(padded, self._blocks.layout.sizes[subgroup]))
            self._progress.made()

    def _free_extent(self, subgroup: int) -> int:
        waiting = self._telling(f"a commit that frees space for subgroup {subgroup}")
        while (extent := self._versions.take_extent(subgroup)) is None:
            fact = f"versions {sorted(self._versions.announced)} are still being committed"
            self._progress.wait(waiting, f"a write of subgroup {subgroup} must find free space", fact)
        return extent

    def _telling(self, what: str) -> Telling:
        return Telling(f"{what} in {self._blocks}", self._deadline_s)

    # -- committing

    def tick(self) -> int:
        """Begin a new version of the optimizer state on drives, and return its number.

        The update that is being started will write this version.

        Raises:
            StorageError: The store's directories hold optimizer state of an earlier run's checkpoints. This run would
                overwrite the state, since it has not resumed from any of them.
        """
        with self._condition:
            if self._versions.unclaimed:
                raise StorageError(
                    f"{self._blocks} holds the state of checkpoints (steps {self._versions.unclaimed}) that this "
                    "run would overwrite, because it did not resume from them. Resume from one of them, "
                    "export (`tune checkpoint export`) and delete them, or give another directory"
                )
            return self._versions.tick()

    def announce(self, subgroups: Collection[int] = ()) -> int:
        """Protect the latest version of the optimizer state on the drives, so that no update overwrites it."""
        # The protection ends when the version is committed or abandoned. Call this before the next update is launched.
        # The call never blocks.
        with self._condition:
            return self._versions.announce(subgroups)

    def abandon(self, version: int) -> None:
        """Give up the commit of a version that `announce` has protected, so that later updates may overwrite it."""
        with self._condition:
            self._versions.announced.pop(version, None)
            self._progress.made()

    def prepare(self, version: int, step: int, name: str, data: str) -> CommittedStep:
        """Commit a version after its `announce`, under a unique name. Earlier commits are kept.

        This waits for the version's writes and for the previous commit, so call it on a thread that may block.

        Raises:
            StorageError: A write or a sync failed. Versions that were committed earlier are intact.
        """
        with self._committing:
            with self._progress.failing():
                extents = self._written(version)
                self._blocks.sync()
            record = CommittedStep(step=step, name=name, extents=extents, data=data)
            self._name([record, *self._versions.steps])
            self.abandon(version)  # the step now protects the extents of the version
            return record

    def settle(self, name: str, *, committed: bool) -> None:
        """Keep or drop the optimizer state that `prepare` has made durable on the drives for a checkpoint.

        If it is kept, the state of surplus steps is dropped (see `Retention.of`). When this method returns, the list of
        kept steps is durable, so that dropped state cannot come back after a power loss. Only then may the regions of
        dropped state be overwritten.

        Raises:
            StorageError: The list of steps could not be written.
        """
        with self._committing:
            if committed:
                self._name(self._retention.of(self._versions.not_passed_over()))
                self._versions.passed_over = set()
            else:
                self._name([s for s in self._versions.steps if s.name != name])

    def _name(self, steps: list[CommittedStep]) -> None:
        with self._progress.failing():
            self._folders.commit(self.nonce, steps)
        with self._condition:
            self._versions.steps = steps
            self._progress.made()

    def _written(self, version: int) -> list[ExtentRecord]:
        with self._condition:
            waiting = self._telling(f"the writing of version {version}")
            while late := self._versions.missing(version):
                self._progress.wait(waiting, f"version {version} must be written", f"subgroups {late[:5]} are not")
            return self._versions.extents_of(version)

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """Return the steps of an earlier run's checkpoints on the drives that this run would overwrite."""
        return tuple(self._versions.unclaimed)

    @property
    def steps(self) -> list[CommittedStep]:
        """Return the committed steps of optimizer state on the drives, newest first."""
        with self._condition:
            return list(self._versions.steps)

    def restore(self, name: str = "") -> CommittedStep:
        """Let training continue from the optimizer state that was committed to the drives at an earlier step.

        The state is not read now. The first read of each subgroup compares the subgroup's state with the hash that was
        stored at the commit. Return the stored description of the committed state, with its places on the drives and
        its hashes.

        Args:
            name: Name of the committed step. An empty name selects the newest committed step.

        Raises:
            StorageError: There is no such step.
        """
        with self._condition:
            waiting = self._telling("the reads in progress")
            subgroups = self._versions.subgroups.values()
            while any(held.reads for held in subgroups):  # reads for the next step
                self._progress.wait(waiting, "the reads in progress must end", "they did not")
            steps = self._versions.steps
            found = [s for s in steps if name in ("", s.name)]
            if not found:
                raise StorageError(
                    f"the step to restore must be one of {[s.step for s in steps]}, which "
                    f"{self._blocks} holds, but got {name or 'none'}"
                )
            self._versions.restore(found[0])
            for one in found[0].extents:
                self._show(one.subgroup)
            return found[0]

    def take_adopted(self) -> set[int]:
        """Return subgroups restored on the drives since the last call, which need not be written there again."""
        with self._condition:
            taken, self._versions.adopted = self._versions.adopted, set()
            return taken

    # -- all

    def close(self) -> None:
        """Stop the store's threads and release its directories for other runs. Tensors from `view` stay readable."""
        self._blocks.close()
        self._folders.close()
