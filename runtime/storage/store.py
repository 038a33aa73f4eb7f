"""A store of subgroups' optimizer state on drives.

State is read and written per subgroup, without overwriting the last step, and is committed step by step.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import block_hash
from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, memory_at
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.storage.extent_file import ExtentFile
from ebbtide.runtime.storage.folder import Drive, Folders
from ebbtide.runtime.storage.layout import Block, Layout, padded
from ebbtide.runtime.storage.pages import ExtentRecord, StepRecord, StorePage
from ebbtide.runtime.storage.view import View, page_aligned
from ebbtide.runtime.storage.workers import Bounce, Telling, Transfer, Workers, told_late
from ebbtide.simulator.plan import BLOCK_BYTES

DEPTH = 4
DEADLINE_S = 300.0


@dataclass
class _Subgroup:
    """The extents of one subgroup: the regions of the drives that hold its state. The store's condition variable guards
    the fields.

    Attributes:
        versions: Version of the state in each extent. None if the extent is empty or partly written.
        hashes: Hashes of each extent's tensors.
        live: The extent written last. -1 if none.
        unchecked: True if the hashes of the live extent must still be compared: at the next read, or before other code
            uses the memory-mapped tensors in ``view``.
        reads: Number of reads in progress.
    """

    versions: list[int | None]
    hashes: list[list[str]]
    live: int = -1
    unchecked: bool = False
    reads: int = 0
    view: View | None = field(default=None, repr=False)

    def of(self, asked: _Announced) -> int | None:
        held = {v: e for e, v in enumerate(self.versions) if v is not None}
        newest = max((v for v in held if v <= asked.version), default=-1)
        return held[newest] if newest >= asked.due else None


def _new(extents: int) -> _Subgroup:
    return _Subgroup([None] * extents, [[]] * extents)


@dataclass(frozen=True)
class _Announced:
    """A version of optimizer state on drives that is to be committed.

    Attributes:
        version: Number of the version. The version consists of the newest state of each subgroup with at most this
            number.
        due: Least number that the state of a subgroup must have. If the state of a subgroup has a lower number, its
            write has not ended yet.
        subgroups: Subgroups that belong to the version.
    """

    version: int
    due: int
    subgroups: frozenset[int]


class ExtentStore:
    """A store of one rank's optimizer state on drives: masters and moments of some subgroups.

    `open` creates a store. The store is thread-safe, but only one thread at a time may read and write a given subgroup.

    A version is the optimizer state after one update. `tick` begins a version, and the update then writes each subgroup
    once. Each subgroup has several extents (regions of the drives), and each extent holds one version of its state. A
    write goes to an extent whose content is neither committed nor being committed, so that committed state stays until
    newer state is committed. The first failed write or sync disables the store: every later write and commit raises its
    error.

    A committed version is called a step. `commit` commits a version alone. A checkpoint calls `prepare` instead, which
    keeps all earlier steps. After the checkpoint has been committed, `settle` drops the oldest steps, beyond the number
    of steps to keep.
    """

    def __init__(
        self,
        folders: Folders,
        layout: Layout,
        files: Sequence[ExtentFile],
        nonce: str,
        steps: list[StepRecord],
        keep: int,
        depth: int,
        block_bytes: int,
        deadline_s: float,
        *,
        verify_reads: bool,
        unclaimed: Sequence[int] = (),
        stands: Callable[[StepRecord], bool] = lambda _: True,
        protects: Callable[[StepRecord], bool] = lambda _: False,
    ) -> None:
        self._folders, self._layout, self._files = folders, layout, files
        self.nonce, self._keep, self._deadline_s = nonce, keep, deadline_s
        self.rank, self.directories = folders.rank, folders.directories
        self._verify_reads = verify_reads
        self._stands, self._protects = stands, protects
        self._condition = threading.Condition()
        self._committing = threading.Lock()  # one at a time: a manifest names all kept steps
        self._subgroups = {s: _new(layout.extents) for s in layout.sizes}
        self._steps = steps
        self._passed_over = set[str]()  # steps that were not restored although they are newer
        self._announced: dict[int, _Announced] = {}
        self._clock = self._due = 0  # the latest version, and the latest of all subgroups
        self._adopted = set[int]()  # restored, and nobody has asked for them yet
        self._unclaimed = unclaimed  # steps that are left from an earlier run
        self._failure: BaseException | None = None
        self._progress_s = 0.0  # when something was written or committed last
        self._readers = [Workers("storage read", depth, block_bytes) for _ in files]
        self._writers = [Workers("storage write", depth, block_bytes) for _ in files]
        self.host_bytes = 2 * depth * len(files) * block_bytes
        self.read_bytes = self.written_bytes = 0

    @classmethod
    def open(
        cls,
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
        stands: Callable[[StepRecord], bool] = lambda _: True,
        protects: Callable[[StepRecord], bool] = lambda _: False,
    ) -> ExtentStore:
        """Open a rank's store of optimizer state: reserve space on the drives, or find an earlier run's store and
        enlarge it.

        A step is the optimizer state that was committed after one training step.

        Args:
            sizes: Bytes of each subgroup's master and moments.
            keep: Number of steps to keep on the drives. Each subgroup also has space for one unfinished step.
            depth: Number of threads per drive and direction.
            block_bytes: Bytes that are moved and hashed at a time, a multiple of 4096.
            verify_reads: If True, every read is compared with the hash taken while writing.
            deadline_s: Seconds without progress after which a drive counts as hanging.
            stands: Function that returns whether the checkpoint of a step exists. It does not exist if the run was
                killed before the checkpoint's commit, or if the checkpoint was deleted. If there are more steps than
                ``keep``, steps without a checkpoint are dropped first.
            protects: Function that returns True for a step that is to outlast newer steps, such as that of the best
                checkpoint.

        Raises:
            StorageError: Space is missing, another run uses the directories, or they hold steps of another layout or
                world size.
        """
        files = files or Files()
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
            try:
                folders = Folders(drives, rank, files)
                undo.callback(folders.close)
                page, steps = folders.claim(wanted)
                layout = Layout(dict(page.sizes), page.weights, block_bytes, keep + 1)
                if len(steps) > keep:  # killed between `prepare` and `settle`
                    steps = retained([s for s in steps if stands(s)] or steps[1:], keep, stands, protects)
                    folders.commit(page.nonce, steps)
                opened = []
                for drive, size_bytes in zip(drives, layout.file_bytes, strict=True):
                    opened.append(ExtentFile(folders.extents(drive), size_bytes, files))
                    undo.callback(opened[-1].close)
                for file in opened:
                    (file.check if steps else file.reserve)()
            except OSError as error:
                raise StorageError(
                    f"the directories for stored state must be writable, but "
                    f"{[str(drive.directory) for drive in drives]} gave: {error}"
                ) from error
            undo.pop_all()
        made = cls(
            folders,
            layout,
            opened,
            page.nonce,
            steps,
            keep,
            depth,
            block_bytes,
            deadline_s,
            verify_reads=verify_reads,
            unclaimed=[s.step for s in steps if stands(s)],
            stands=stands,
            protects=protects,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(made.close)
            made.grow(sizes)
            undo.pop_all()
        return made

    # -- reading and writing, on the lanes' threads

    def adopt(self, subgroup: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Write a subgroup's initial state to the drives. Return memory-mapped tensors, which always show the
        subgroup's latest state on the drives.
        """
        self.write(subgroup, tensors, self._due)
        return self.view(subgroup)

    def grow(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Reserve space on the drives for the state of further subgroups, while training runs.

        Raises:
            StorageError: There is no room. The state on the drives is unchanged.
        """
        more = {s: tuple(tensors) for s, tensors in sizes.items() if s not in self._layout.sizes}
        if not more:
            return
        with self._committing:
            layout = self._layout.with_more(more)
            for file, size_bytes in zip(self._files, layout.file_bytes, strict=True):
                file.grow(size_bytes)
            self._folders.grow(more)
            with self._condition:
                self._layout = layout
                self._subgroups |= {s: _new(layout.extents) for s in more}

    def view(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        """Return fp32 tensors at a fixed address that always show a subgroup's latest state on the drives.

        Changes to these tensors last until the subgroup's next `write`. The tensors may be passed to that call.
        """
        held = self._subgroups[subgroup]
        if held.view is None:
            held.view = View(self._layout, subgroup, torch.float32)
            if held.live >= 0:
                held.view.show(held.live, self._files)
        return held.view.tensors

    def read(self, subgroup: int, into: Sequence[torch.Tensor]) -> None:
        """Read a subgroup's state from the drives into tensors. Return when it is read.

        Args:
            into: Contiguous host tensors, in the order of ``sizes``. Page-aligned ones (`page_aligned`) are filled
                without a copy.

        Raises:
            DamagedError: The state differs from the state that was written.
            StorageError: The drive failed, or made no progress for ``deadline_s``.
        """
        with self._condition:
            held = self._subgroups[subgroup]
            extent, check = held.live, held.unchecked or self._verify_reads
            if extent < 0:
                raise StorageError(f"subgroup {subgroup} must have been written before it is read, but was not")
            held.reads += 1
        try:
            read = partial(self._read_block, check)
            hashes = self._move(subgroup, extent, into, self._readers, read)
        finally:
            with self._condition:
                held.reads -= 1
                self._notify()
        if check and hashes != held.hashes[extent]:
            raise DamagedError(
                f"the state of subgroup {subgroup} in {self._where()} is damaged: its hash is not the "
                "one that was written. Resume from an earlier checkpoint, and check the drive"
            )
        with self._condition:
            if check:  # else a load may have asked for it meanwhile
                held.unchecked = False
            self.read_bytes += sum(map(padded, self._layout.sizes[subgroup]))

    def check_restored(self, subgroups: Collection[int] | None = None) -> None:
        """Compare optimizer state that was restored from the drives with its hashes, if the state has not been read
        since. Return when all of it is compared.

        `read` makes this comparison too, but code that uses the memory-mapped tensors of `view` does not call `read`.
        If ``verify_reads`` is set, state that was written and has not been read since is also compared.

        Args:
            subgroups: Subgroups to check. None checks all subgroups.

        Raises:
            StorageError: The state is damaged or cannot be read (see `read`).
        """
        with self._condition:
            late = [
                s
                for s in (self._subgroups if subgroups is None else subgroups)
                if s in self._subgroups and self._subgroups[s].unchecked
            ]
        for s in late:
            sizes = self._layout.sizes[s]
            self.read(s, [page_aligned(n // torch.float32.itemsize) for n in sizes])

    def write(self, subgroup: int, source: Sequence[torch.Tensor], version: int | None = None) -> None:
        """Write a subgroup's new state to a free place on the drives. Return when it is written.

        Later reads of the subgroup return the new state.

        Args:
            version: Version of the state, from `tick`. None creates a new version of this subgroup alone.

        Raises:
            StorageError: The drive failed, or made no progress for ``deadline_s``. Or no place became free,
                because a commit in progress never ended.
        """
        with self._condition:
            held = self._subgroups[subgroup]
            self._clock = max(self._clock, version or 0) + (version is None)
            version = self._clock if version is None else version
            extent = self._free_extent(subgroup)
            held.versions[extent] = None
        own = held.view is not None and source[0].data_ptr() == held.view.tensors[0].data_ptr()
        try:
            hashes = self._move(subgroup, extent, source, self._writers, partial(self._write_block, own))
            if held.view is not None:
                held.view.show(extent, self._files)
        except BaseException as error:
            self._fail(error)
            raise
        with self._condition:
            held.versions[extent], held.hashes[extent] = version, hashes
            held.live, held.unchecked = extent, self._verify_reads
            self.written_bytes += sum(map(padded, self._layout.sizes[subgroup]))
            self._notify()

    def _free_extent(self, subgroup: int) -> int:
        held = self._subgroups[subgroup]
        waiting = self._telling(f"a commit that frees space for subgroup {subgroup}")
        while True:
            kept = {record.extent for step in self._steps for record in step.extents if record.subgroup == subgroup}
            kept |= {e for one in self._announced.values() if (e := held.of(one)) is not None}
            free = [extent for extent in range(self._layout.extents) if extent not in kept]
            if free:
                return next((extent for extent in free if extent != held.live), free[0])
            self._wait(
                waiting,
                f"a write of subgroup {subgroup} must find free space",
                f"versions {sorted(self._announced)} are still being committed",
            )

    def _telling(self, what: str) -> Telling:
        return Telling(f"{what} in {self._where()}", self._deadline_s)

    def _wait(self, waiting: Telling, rule: str, fact: str) -> None:
        self._raise_failure()
        stuck_s = time.monotonic() - max(waiting.begin_s, self._progress_s)
        waiting.stuck(stuck_s)
        if stuck_s > self._deadline_s:
            raise StorageError(
                f"{rule} within {self._deadline_s:g} s, but {fact}: the drive hangs or is too slow. "
                "Check the drive, then resume"
            )
        self._condition.wait(min(1.0, self._deadline_s / 4))

    def _move(
        self, subgroup: int, extent: int, tensors: Sequence[torch.Tensor], workers: Sequence[Workers], job: partial[str]
    ) -> list[str]:
        sizes = tuple(t.numel() * t.element_size() for t in tensors)
        if sizes != self._layout.sizes[subgroup]:
            raise StorageError(
                f"the tensors of subgroup {subgroup} must have {self._layout.sizes[subgroup]} bytes, but got {sizes}"
            )
        self._raise_failure()
        blocks = list(self._layout.blocks(subgroup))
        hashes = [""] * len(blocks)
        transfer = Transfer(len(blocks))

        def one(number: int, block: Block, bounce: Bounce) -> None:
            start = self._layout.start(block.drive, subgroup, extent) + block.offset
            address = tensors[block.tensor].data_ptr() + block.begin
            hashes[number] = job(block, address, start, bounce)

        for number, block in enumerate(blocks):
            workers[block.drive].submit(transfer, partial(one, number, block))
        transfer.wait(f"subgroup {subgroup} in {self._where()}", self._deadline_s)
        return hashes_of_tensors(blocks, hashes)

    def _write_block(self, copies: bool, block: Block, address: int, start: int, bounce: Bounce) -> str:
        if copies or not _straight(block, address):
            ctypes.memset(bounce.address(), 0, padded(block.size_bytes))
            ctypes.memmove(bounce.address(), address, block.size_bytes)
            data = bounce.view(padded(block.size_bytes))
        else:
            data = memoryview(memory_at(address, block.size_bytes)).cast("B")
        hashed = block_hash(data[: block.size_bytes])
        self._files[block.drive].write(data, start)
        return hashed

    def _read_block(self, check: bool, block: Block, address: int, start: int, bounce: Bounce) -> str:
        straight = _straight(block, address)
        data = bounce.view(padded(block.size_bytes))
        if straight:
            data = memoryview(memory_at(address, block.size_bytes)).cast("B")
        self._files[block.drive].read(data, start)
        hashed = block_hash(data[: block.size_bytes]) if check else ""
        if not straight:
            ctypes.memmove(address, bounce.address(), block.size_bytes)
        return hashed

    # -- committing

    def tick(self) -> int:
        """Begin a new version of the optimizer state on drives, which the update that is being started will
        write.

        Return the version's number.

        Raises:
            StorageError: The directories hold steps of an earlier run that this run has not restored and
                would overwrite.
        """
        with self._condition:
            if self._unclaimed:
                raise StorageError(
                    f"{self._where()} holds the state of checkpoints (steps {self._unclaimed}) that this "
                    "run would overwrite, because it did not resume from them. Resume from one of them, "
                    "export (`tune checkpoint export`) and delete them, or give another directory"
                )
            self._due = self._clock = self._clock + 1
            return self._clock

    def announce(self, version: int | None = None, subgroups: Collection[int] = ()) -> int:
        """Protect the present optimizer state on the drives from being overwritten until it is committed or
        abandoned.

        Call this before the next update is launched. It never blocks.

        Args:
            version: Version of the state to protect. None selects the latest version launched so far.
            subgroups: Subgroups that belong to the version. Empty selects all.

        Returns:
            The version.
        """
        with self._condition:
            due = self._due if version is None else version
            version = self._clock if version is None else version
            named = frozenset(subgroups or self._subgroups)
            self._announced[version] = _Announced(version, due, named)
            return version

    def abandon(self, version: int) -> None:
        """Stop protecting a version of the state on the drives that was announced for a commit."""
        with self._condition:
            self._announced.pop(version, None)
            self._notify()

    def commit(self, version: int, step: int, data: str = "") -> StepRecord:
        """Commit a version of the optimizer state on the drives as a step, so that it survives a power loss. Drop the
        oldest steps, beyond the number of steps to keep.

        Call `announce` for the version first. This method waits for the version's writes and for the previous commit,
        so call it on a thread that may block.

        Args:
            step: Number under which the step can be restored, higher than all earlier numbers.
            data: Text to keep with the step.

        Raises:
            StorageError: A write or a sync failed. Earlier steps are intact.
        """
        with self._committing:
            before = self._not_passed_over()
            if before and step <= before[0].step:
                raise StorageError(
                    f"the step must be greater than that of the last checkpoint, but got {step} after {before[0].step}"
                )
            record = self._make_durable(version, step, str(step), data)
            self._name(self._retained([record, *before]), version)
            self._passed_over = set()
            return record

    def prepare(self, version: int, step: int, name: str, data: str = "") -> StepRecord:
        """Make a version of the state on the drives durable, as `commit` does, but keep all earlier steps
        until `settle`.

        Args:
            version, step, data: The arguments of `commit`.
            name: Unique name under which the step can be restored.
        """
        with self._committing:
            record = self._make_durable(version, step, name, data)
            self._name([record, *self._steps], version)
            return record

    def settle(self, name: str, *, committed: bool) -> None:
        """Keep or drop the optimizer state that `prepare` has made durable on the drives for a checkpoint.

        If the state is kept, the oldest steps are dropped, beyond the number of steps to keep. Dropped state cannot
        return after a power loss. Its regions of the drives are overwritten only after this method returns.

        Args:
            name: Name that was given to `prepare`.
            committed: True if the checkpoint was committed, so that the state is kept. False drops the state.

        Raises:
            StorageError: The list of steps could not be written.
        """
        with self._committing:
            if committed:
                self._name(self._retained(self._not_passed_over()))
                self._passed_over = set()
            else:
                self._name([s for s in self._steps if s.name != name])

    def _retained(self, steps: list[StepRecord]) -> list[StepRecord]:
        return retained(steps, self._keep, self._stands, self._protects)

    def _not_passed_over(self) -> list[StepRecord]:
        return [s for s in self._steps if s.name not in self._passed_over]

    def _make_durable(self, version: int, step: int, name: str, data: str) -> StepRecord:
        try:
            extents = self._written(version)
            for file in self._files:
                with told_late(f"syncing {file.path}"):
                    file.sync()
        except BaseException as error:
            self._fail(error)
            raise
        return StepRecord(step=step, name=name, extents=extents, data=data)

    def _name(self, steps: list[StepRecord], version: int | None = None) -> None:
        try:
            self._folders.commit(self.nonce, steps)
        except BaseException as error:
            self._fail(error)
            raise
        with self._condition:
            self._steps = steps
            if version is not None:
                self._announced.pop(version, None)
            self._notify()

    def _written(self, version: int) -> list[ExtentRecord]:
        with self._condition:
            asked = self._announced.get(version)
            if asked is None:
                raise StorageError(
                    "a version of the stored state must be announced with announce() before commit() is called, but "
                    f"version {version} was not"
                )
            held, waiting = self._subgroups, self._telling(f"the writing of version {version}")
            while late := [s for s in sorted(asked.subgroups) if held[s].of(asked) is None]:
                self._wait(waiting, f"version {version} must be written", f"subgroups {late[:5]} are not")
            found = [(s, held[s].of(asked)) for s in sorted(asked.subgroups)]
            return [ExtentRecord(subgroup=s, extent=e, hashes=held[s].hashes[e]) for s, e in found if e is not None]

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """Return the numbers of an earlier run's steps that are on the drives, as long as this run has not resumed from
        one of them.

        The result is empty after `restore`. Only steps with a checkpoint are listed.
        """
        return tuple(self._unclaimed)

    @property
    def steps(self) -> list[StepRecord]:
        """Return the committed steps of optimizer state on the drives, newest first."""
        with self._condition:
            return list(self._steps)

    def restore(self, step: int | None = None, name: str = "") -> StepRecord:
        """Let training continue from a committed step on the drives. The state of the step is not read now.

        The first read of each subgroup compares the subgroup's state with the hash that was stored for the step.

        Args:
            step, name: Number or name of the step. None and an empty name select the newest step.

        Returns:
            The restored step: its number, its name, the text kept with it, and the places and hashes of its state.

        Raises:
            StorageError: There is no such step.
        """
        with self._condition:
            waiting = self._telling("the reads in progress")
            while any(held.reads for held in self._subgroups.values()):  # the next step's
                self._wait(waiting, "the reads in progress must end", "they did not")
            found = [s for s in self._steps if (s.name == name if name else step in (None, s.step))]
            if not found:
                raise StorageError(
                    f"the step to restore must be one of {[s.step for s in self._steps]}, which "
                    f"{self._where()} holds, but got {name or step}"
                )
            record = found[0]
            self._passed_over = {s.name for s in self._steps[: self._steps.index(record)]}
            self._due, self._unclaimed = 0, ()
            for one in record.extents:
                held = self._subgroups[one.subgroup]
                held.versions = [None] * self._layout.extents
                held.versions[one.extent], held.hashes[one.extent] = 0, one.hashes
                held.live, held.unchecked = one.extent, True
                self._adopted.add(one.subgroup)
                if held.view is not None:
                    held.view.show(one.extent, self._files)
            return record

    def take_adopted(self) -> set[int]:
        """Return the subgroups with state that was restored directly on the drives since the last call of this method.

        The state of these subgroups need not be written to the drives again.
        """
        with self._condition:
            taken, self._adopted = self._adopted, set()
            return taken

    # -- all

    def _where(self) -> str:
        return ", ".join(str(file.path) for file in self._files)

    def _notify(self) -> None:
        self._progress_s = time.monotonic()
        self._condition.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StorageError(f"the stored state cannot be used after an error: {self._failure}") from self._failure

    def close(self) -> None:
        """Stop the store's threads and release its directories for other runs.

        Tensors from `view` stay readable.
        """
        idle = [workers.close() for workers in (*self._readers, *self._writers)]
        if all(idle):  # else what is stuck in the kernel keeps its file
            for file in self._files:
                file.close()
        self._folders.close()


def retained(
    steps: Sequence[StepRecord], keep: int, stands: Callable[[StepRecord], bool], protects: Callable[[StepRecord], bool]
) -> list[StepRecord]:
    """Return the steps with optimizer state that stays on the drives: at most ``keep`` of the given steps, newest
    first.

    The newest step always stays. Steps without a checkpoint are dropped first, then the oldest steps that are not
    protected, then the oldest protected steps.

    Args:
        stands: Function that returns whether a step's checkpoint exists.
        protects: Function that returns True for a step that is to outlast newer steps, such as that of the best
            checkpoint.
    """
    kept, excess = list(steps), len(steps) - keep
    if excess <= 0:
        return kept
    oldest_first = kept[:0:-1]  # without the newest
    first_to_go = sorted(oldest_first, key=lambda s: (stands(s), protects(s)))
    gone = {s.name for s in first_to_go[:excess]}
    return [s for s in kept if s.name not in gone]


def hashes_of_tensors(blocks: Sequence[Block], hashes: Sequence[str]) -> list[str]:
    """Return one hash for each tensor of a subgroup on the drives, in order, from the hashes of the
    tensor's blocks.
    """
    parts: dict[int, list[str]] = {}
    for block, hashed in zip(blocks, hashes, strict=True):
        parts.setdefault(block.tensor, []).append(hashed)
    return [block_hash("".join(part).encode()) for part in parts.values()]


def _straight(block: Block, address: int) -> bool:
    return address % ALIGNMENT == 0 and block.size_bytes % ALIGNMENT == 0
