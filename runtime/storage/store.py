"""The state of subgroups on storage: read, written out of place, committed step by step."""

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
    """The extents of one subgroup. Guarded by the store's condition.

    Attributes:
        versions: version of the state in each extent. None: empty or partly written.
        hashes: hashes of each extent's tensors.
        live: the extent written last; -1: none.
        unchecked: compare the hash at the next read, or before a view is read.
        reads: number of reads in flight.
    """

    versions: list[int | None]
    hashes: list[list[str]]
    live: int = -1
    unchecked: bool = False
    reads: int = 0
    view: View | None = field(default=None, repr=False)

    def of(self, asked: _Announced) -> int | None:
        """Return the extent that holds an announced version; None: it is not written yet."""
        held = {v: e for e, v in enumerate(self.versions) if v is not None}
        newest = max((v for v in held if v <= asked.version), default=-1)
        return held[newest] if newest >= asked.due else None


def _new(extents: int) -> _Subgroup:
    return _Subgroup([None] * extents, [[]] * extents)


@dataclass(frozen=True)
class _Announced:
    """A version that is to be committed: of each subgroup the newest state up to it, which is not
    older than ``due``.

    Attributes:
        subgroups: those that belong to it.
    """

    version: int
    due: int
    subgroups: frozenset[int]


class ExtentStore:
    """Master and moments of one rank's stored subgroups. Made by `open`; thread-safe, but a
    subgroup is read and written by one thread at a time.

    A version is what one launched update makes: all subgroups are written once for it (`tick`). A
    write goes to an extent that no committed step names, and that holds no announced version: so a
    committed step stays until a newer one is. The first failure to write or to sync ends the
    store's life: every later write and commit raises it.

    A step is committed alone (`commit`), or as part of something larger: `prepare` makes it durable
    beside those before it, which go only when `settle` is told what became of the larger one.
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
        """Reserve the space, or finds what an earlier run has left there, and grow it.

        Args:
            sizes: bytes of master and moments, by subgroup.
            keep: finished steps that stay; there is one extent more per subgroup.
            depth: threads per drive and direction.
            block_bytes: moved and hashed at once, a multiple of 4096.
            verify_reads: every read is compared with the hash that was taken while writing.
            deadline_s: without a block that arrives, a drive counts as hanging.
            stands: whether what a step was prepared for is there: a kill may have come between
                `prepare` and `settle`, or somebody has deleted it. A step that does not stand is
                the first one to be dropped.
            protects: whether a step stays longer than newer ones.

        Raises:
            StorageError: space is missing, another run has the directories, or they hold steps of
                another layout or world size.
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
        """Write a subgroup's first state, that of the latest update; return `view`."""
        self.write(subgroup, tensors, self._due)
        return self.view(subgroup)

    def grow(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Make room for further subgroups after the present ones, while training runs.

        Raises:
            StorageError: there is no room. The stored state is unchanged.
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
        """fp32 tensors at a fixed address that show the subgroup's state on storage, whichever
        extent it is in. What is written to them lasts until the next `write` of the subgroup, which
        may be given them.
        """
        held = self._subgroups[subgroup]
        if held.view is None:
            held.view = View(self._layout, subgroup, torch.float32)
            if held.live >= 0:
                held.view.show(held.live, self._files)
        return held.view.tensors

    def read(self, subgroup: int, into: Sequence[torch.Tensor]) -> None:
        """Fill the tensors with the subgroup's state; blocks.

        Args:
            into: contiguous host tensors, in the order of ``sizes``; page-aligned ones
                (`page_aligned`) without a copy.

        Raises:
            DamagedError: it is not what was written.
            StorageError: the drive said no, or nothing for ``deadline_s``.
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
        """Verify the hashes of state that was restored, or written with ``verify_reads``, and not read since.

        Views show such state without reading it through the store. Blocks while it reads.

        Args:
            subgroups: None: all.

        Raises:
            StorageError: as `read`.
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
        """Write a subgroup's state to a free extent; blocks. From then on it is the live one.

        Args:
            version: of the state, a `tick`; None: a new one of this subgroup alone.

        Raises:
            StorageError: the drive said no, or nothing for ``deadline_s``; or no extent became
                free, since the commit of an announced version never ended.
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
        """Wait for a change. The caller holds the condition and checks again."""
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
        """Move all blocks of one extent on all drives concurrently, and return the tensors' hashes."""
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
        """Return the version of the update that is launched now, which writes every subgroup.

        Raises:
            StorageError: the directories hold steps that nobody has restored, and that would go.
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
        """Protect the version's extents until `commit`, `settle` or `abandon`.

        Call it before the next update is launched. It never blocks.

        Args:
            version: None: the version of everything launched so far.
            subgroups: the subgroups that belong to it. Empty: all.

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
        """Give up what was announced."""
        with self._condition:
            self._announced.pop(version, None)
            self._notify()

    def commit(self, version: int, step: int, data: str = "") -> StepRecord:
        """Make an announced version durable: when this returns it survives a power loss, and the
        oldest kept step's extents are free. Waits for the version's writes and for the commit
        before; on a thread that may.

        Args:
            step: the name under which it can be restored; higher than all before.
            data: kept beside it.

        Raises:
            StorageError: a write or a sync failed; the steps before are intact.
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
        """Make a version durable like `commit`, but keep all earlier steps until `settle`.

        Args:
            name: a unique name for restoring it.
        """
        with self._committing:
            record = self._make_durable(version, step, name, data)
            self._name([record, *self._steps], version)
            return record

    def settle(self, name: str, *, committed: bool) -> None:
        """Commit a prepared step and drop the oldest ones, or drop the prepared step itself.

        After the return no power loss restores what was dropped. Only then are its extents overwritten.

        Raises:
            StorageError: the manifest could not be written.
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
        """Return the version's extents; no manifest names them yet."""
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
        """Write the list of committed steps durably, and release the version's own protection."""
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
        """Wait until all extents of the version are written, and return them."""
        with self._condition:
            asked = self._announced.get(version)
            if asked is None:
                raise StorageError(f"a version must be announced before it is committed, but {version} was not")
            held, waiting = self._subgroups, self._telling(f"the writing of version {version}")
            while late := [s for s in sorted(asked.subgroups) if held[s].of(asked) is None]:
                self._wait(waiting, f"version {version} must be written", f"subgroups {late[:5]} are not")
            found = [(s, held[s].of(asked)) for s in sorted(asked.subgroups)]
            return [ExtentRecord(subgroup=s, extent=e, hashes=held[s].hashes[e]) for s, e in found if e is not None]

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """Return steps of an earlier run's checkpoints, if none of them was restored."""
        return tuple(self._unclaimed)

    @property
    def steps(self) -> list[StepRecord]:
        """Return the committed steps, newest first."""
        with self._condition:
            return list(self._steps)

    def restore(self, step: int | None = None, name: str = "") -> StepRecord:
        """Take a committed step's extents as they lie, as version 0; nothing is read yet. The
        first read of each subgroup is compared with its hash.

        Args:
            step, name: None and empty: the newest.

        Raises:
            StorageError: there is no such step.
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
        """Return the subgroups restored since the last call. They need not be written."""
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
        """End the threads and give the directories to others. Views stay readable."""
        idle = [workers.close() for workers in (*self._readers, *self._writers)]
        if all(idle):  # else what is stuck in the kernel keeps its file
            for file in self._files:
                file.close()
        self._folders.close()


def retained(
    steps: Sequence[StepRecord], keep: int, stands: Callable[[StepRecord], bool], protects: Callable[[StepRecord], bool]
) -> list[StepRecord]:
    """Return the ``keep`` steps to retain, newest first.

    Steps of deleted checkpoints are dropped first, then the oldest ones that are not protected, then
    the oldest ones. The newest step stays in any case.
    """
    kept, excess = list(steps), len(steps) - keep
    if excess <= 0:
        return kept
    oldest_first = kept[:0:-1]  # without the newest
    first_to_go = sorted(oldest_first, key=lambda s: (stands(s), protects(s)))
    gone = {s.name for s in first_to_go[:excess]}
    return [s for s in kept if s.name not in gone]


def hashes_of_tensors(blocks: Sequence[Block], hashes: Sequence[str]) -> list[str]:
    """Return, for each tensor, the hash of its blocks' hashes in order."""
    parts: dict[int, list[str]] = {}
    for block, hashed in zip(blocks, hashes, strict=True):
        parts.setdefault(block.tensor, []).append(hashed)
    return [block_hash("".join(part).encode()) for part in parts.values()]


def _straight(block: Block, address: int) -> bool:
    return address % ALIGNMENT == 0 and block.size_bytes % ALIGNMENT == 0
