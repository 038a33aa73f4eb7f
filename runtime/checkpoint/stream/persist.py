"""The writing of a checkpoint's files, block by block, by several threads while training continues."""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import Cancelled, CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import FileRecord, block_hash
from ebbtide.runtime.checkpoint.format.memory import Slots, view_at
from ebbtide.runtime.checkpoint.format.skeleton import FileBlock, PlannedFile, State, cut
from ebbtide.simulator.plan import READY_BLOCKS

NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}


class OutputFile:
    """A checkpoint file to which any thread writes aligned blocks. It bypasses the page cache if the filesystem allows.

    `make_durable` removes the padding of the last block and returns once the bytes are on disk.
    """

    def __init__(self, path: Path, size_bytes: int, files: Files, *, direct: bool = True) -> None:
        self._path = path
        self._size = size_bytes
        self._files = files
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._buffered: int | None = None
        self._try_direct = direct and hasattr(os, "O_DIRECT")

    def write(self, data: memoryview, offset: int) -> None:
        """Write a block to a checkpoint's file. ``data`` and ``offset`` must be aligned for direct I/O.

        ``data`` may extend past the file's final length.
        """
        descriptor = self._open_direct()
        if descriptor is not None:
            try:
                written = self._files.pwrite(descriptor, data, offset)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise self._explain(error) from error
                written = 0
            data, offset = data[written:], offset + written
        # The whole block if the file system does not support O_DIRECT. Otherwise the rest of a short write, which may
        # be unaligned.
        if len(data):
            try:
                self._files.write_all(self._open_buffered(), data, offset)
            except OSError as error:
                raise self._explain(error) from error

    def make_durable(self) -> None:
        """Set the final length of this checkpoint file, and wait until its bytes are on disk."""
        try:
            descriptor = self._open_buffered()
            self._files.truncate(descriptor, self._size)
            self._files.fsync(descriptor)
            self.close()
        except OSError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        with self._lock:
            held, self._direct, self._buffered = (self._direct, self._buffered), None, None
        for descriptor in held:
            if descriptor is not None:
                self._files.close(descriptor)

    def _open_direct(self) -> int | None:
        with self._lock:
            if self._direct is None and self._try_direct:
                try:
                    self._direct = self._files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in NO_DIRECT:
                        raise self._explain(error) from error
                    self._try_direct = False
            return self._direct

    def _open_buffered(self) -> int:
        with self._lock:
            if self._buffered is None:
                self._buffered = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
            return self._buffered

    def _explain(self, error: OSError) -> Exception:
        return CheckpointError(
            f"writing {self._path} failed: {error.strerror or error} "
            f"({errno.errorcode.get(error.errno or 0, error.errno)}). This checkpoint is abandoned, "
            "earlier ones are intact"
        )


class Pace:
    """A limit, in bytes per second, on the rate at which all writer threads of checkpoints together write.

    A rate of None means no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, size_bytes: int, hurry: Callable[[], bool]) -> None:
        """Wait until the limit on the rate of checkpoint writes allows a write of ``size_bytes``.

        Args:
            hurry: Function that returns whether to end the wait early, because an update waits for the
                bytes or the checkpoint has failed.
        """
        if self._bytes_per_s is None:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_s)
            self._free_s = start + size_bytes / self._bytes_per_s
        while not hurry():
            left = start - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))


_LAST = 1 << 30  # key of blocks without live bytes, which are written last


class BlockWriter:
    """The writer of one checkpoint's blocks.

    Writer threads take blocks in the order of the next optimizer updates. An update calls `release` before it
    overwrites a subgroup's state. `release` copies the subgroup's unwritten blocks to reserved buffers. `release` waits
    only if no buffer is free, or if a writer thread is reading a block.

    One condition variable guards the state of all blocks. No thread holds its lock while it copies, hashes or writes a
    block, so that no other thread waits for the lock meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        planned: Sequence[PlannedFile],
        files: Files,
        budget: Slots,
        bounce: Slots,
        pace: Pace,
        *,
        writers: int,
        progress_deadline_s: float,
        turns: Sequence[int] = (),
        direct: bool = True,
    ) -> None:
        """Prepare threads for ``writers`` concurrent writes and, beyond these, for `READY_BLOCKS` filled buffers.

        The subgroups of ``turns`` are written first, in the order of their next updates, which would overwrite them.
        """
        self._planned = planned
        self._files = files
        self._budget = budget
        self._bounce = bounce
        self._pace = pace
        self._deadline_s = progress_deadline_s
        self._condition = threading.Condition()
        self._block_bytes = budget.slot_bytes
        self._blocks = cut(planned, self._block_bytes)
        self._queues = self._queue({subgroup: turn for turn, subgroup in enumerate(turns)})
        self._urgent: dict[int, int] = {}  # subgroup -> number of updates that wait for it
        self._left = len(self._blocks)
        self._failure: BaseException | None = None
        self._progress_s = time.monotonic()
        self._outputs = [OutputFile(folder / p.path, p.layout.size_bytes, files, direct=direct) for p in planned]
        self._at_disk = threading.Semaphore(writers)
        self._threads = [
            threading.Thread(target=self._work, name=f"ebbtide-writer-{i}", daemon=True)
            for i in range(writers + READY_BLOCKS)
        ]
        self.copied_bytes = 0  # bytes copied because an update came before the write
        self.waited_s = 0.0  # time that updates waited for copies and for the disk

    def _queue(self, turns: dict[int, int]) -> dict[int, deque[FileBlock]]:
        queues: dict[int, deque[FileBlock]] = {}
        for block in self._blocks:
            for subgroup in block.subgroups or (_LAST,):
                queues.setdefault(subgroup, deque()).append(block)

        def turn(subgroup: int) -> tuple[int, int]:
            # Bytes that any update may overwrite are due before the first update.
            return turns.get(subgroup, -1 if subgroup < 0 else len(turns)), subgroup

        return {subgroup: queues[subgroup] for subgroup in sorted(queues, key=turn)}

    @property
    def progress_s(self) -> float:
        """Return when the deadline for the next block's write began, in seconds of the monotonic clock."""
        # Two events start the deadline again: a block was written, or an update began to wait for a block.
        return self._progress_s

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        """Stop the checkpoint's writer threads. Each one first finishes the block that it is writing."""
        self._fail(Cancelled("this checkpoint was cancelled for a newer one"))

    # -- the update's side

    def release(self, subgroup: int) -> None:
        """Wait until the checkpoint no longer needs a subgroup's old optimizer state, so that an update may overwrite
        the state.

        The old state is no longer needed once it is written to the checkpoint's files or copied to reserved host
        memory.
        """
        with self._condition:
            queued = list(self._queues.get(subgroup, ()))
        blocks = [b for b in queued if not self._free_of(b)]
        if not blocks:
            return
        begin = time.monotonic()
        # First copy the blocks that no thread is writing. Meanwhile the writers finish their present blocks.
        for patient in (False, True):
            for block in blocks:
                self._release_block(block, subgroup, patient=patient)
        with self._condition:
            self.waited_s += time.monotonic() - begin

    @staticmethod
    def _free_of(block: FileBlock) -> bool:
        return block.state is State.DONE or (block.slot is not None and block.state is not State.COPYING)

    def _release_block(self, block: FileBlock, subgroup: int, *, patient: bool) -> None:
        slot = self._claim(block, subgroup, patient=patient)
        if slot is None:
            return
        try:
            block.gather(slot)
        except BaseException as error:
            self._put_back(block)
            self._budget.give(slot)
            self._fail(error)
            raise
        with self._condition:
            block.state = State.PENDING
            if self._failure is None:
                block.slot = slot
            else:  # nobody writes it any more
                self._budget.give(slot)
            self.copied_bytes += block.size_bytes
            self._condition.notify_all()
        self._files.point("copied_on_update")

    def _claim(self, block: FileBlock, subgroup: int, *, patient: bool) -> int | None:
        with self._condition:
            self._urgent[subgroup] = self._urgent.get(subgroup, 0) + 1
            self._progress_s = time.monotonic()
            try:
                while not self._free_of(block):
                    unread = block.state in (State.PENDING, State.READY)
                    if self._failure is not None and unread:
                        # The checkpoint is abandoned, and its bytes are not needed. `on_step` reports the error.
                        return None
                    slot = self._budget.take() if unread else None
                    if slot is not None:
                        block.state = State.COPYING
                        return slot
                    if not patient:
                        return None
                    self._wait_for_progress()
                return None
            finally:
                self._urgent[subgroup] -= 1
                if not self._urgent[subgroup]:
                    del self._urgent[subgroup]

    def _wait_for_progress(self) -> None:
        self._condition.wait(timeout=min(1.0, self._deadline_s / 4))
        waited = time.monotonic() - self._progress_s
        self._notice_dead_writers()
        if waited > self._deadline_s:
            raise CheckpointError(
                f"the drive wrote no block of the checkpoint for {waited:.1f} s (limit: checkpoint.deadline_s, "
                f"{self._deadline_s:g} s), while an optimizer update waited to overwrite state that was not yet "
                "written. Check the drive. If the drive is only slow, raise checkpoint.copy_budget_bytes: more "
                "unwritten state is then copied to host memory, so that updates wait less"
            )

    # -- the writers' side

    def _work(self) -> None:
        while True:
            block = self._next()
            if block is None:
                return
            try:
                self._write(block)
            except BaseException as error:  # the training thread raises it
                self._put_back(block)  # so that an update that waits for this block continues
                self._fail(error)
                return

    def _put_back(self, block: FileBlock) -> None:
        with self._condition:
            block.state = State.PENDING
            self._condition.notify_all()

    def _next(self) -> FileBlock | None:
        with self._condition:
            while self._failure is None:
                for subgroup in [*self._urgent, *self._queues]:
                    block = self._pop(self._queues.get(subgroup))
                    if block is not None:
                        block.state = State.WRITING
                        return block
                if not any(b.state is State.COPYING for b in self._blocks):
                    return None
                self._condition.wait(timeout=1.0)
            return None

    @staticmethod
    def _pop(queue: deque[FileBlock] | None) -> FileBlock | None:
        while queue:
            block = queue[0]
            if block.state is State.PENDING:
                return block
            if block.state is State.DONE:
                queue.popleft()
                continue
            return next((b for b in queue if b.state is State.PENDING), None)
        return None

    def _write(self, block: FileBlock) -> None:
        self._pace.wait(block.size_bytes, lambda: bool(self._urgent) or self._failure is not None)
        address, bounce = block.direct_address, None
        if address is None:
            bounce = self._bounce.take()
            assert bounce is not None  # one per writer thread
            block.gather(bounce)
            address = bounce
        try:
            data = view_at(address, block.padded_bytes)
            block.hash = block_hash(data[: block.size_bytes])
            self._in_turn(block, data)
        finally:
            if bounce is not None:
                self._bounce.give(bounce)

    def _in_turn(self, block: FileBlock, data: memoryview) -> None:
        if not self._at_disk.acquire(blocking=False) and not self._waited_for_the_disk(block):
            return
        try:
            self._outputs[block.file].write(data, block.offset)
            self._finish(block)
        finally:
            self._at_disk.release()

    def _waited_for_the_disk(self, block: FileBlock) -> bool:
        with self._condition:
            block.state, slot = State.READY, block.slot
            self._condition.notify_all()
        self._at_disk.acquire()
        with self._condition:
            # If the block was copied meanwhile, another thread may already write it from its slot.
            mine = block.state is State.READY and block.slot == slot
            if mine:
                block.state = State.WRITING if self._failure is None else State.PENDING
                mine = block.state is State.WRITING
        if not mine:
            self._at_disk.release()
        return mine

    def _finish(self, block: FileBlock) -> None:
        with self._condition:
            block.state = State.DONE
            slot, block.slot = block.slot, None
            if slot is not None:
                self._budget.give(slot)
            block.pieces = ()  # releases the tensors
            self._left -= 1
            left, self._progress_s = self._left, time.monotonic()
            self._condition.notify_all()
        self._announce(left)

    def _announce(self, left: int) -> None:
        total = len(self._blocks)
        for name, at in (("first_block", total - 1), ("half_written", total // 2)):
            if left == at:
                self._files.point(name)

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            if self._failure is None:
                self._failure = error
            self._condition.notify_all()

    # -- the coordinator's side

    def finish(self) -> list[FileRecord]:
        """Wait until all blocks of the checkpoint are written and durable.

        Returns:
            The manifest's entry for each file of the checkpoint: the path, the size and the hashes of the blocks.

        Raises:
            BaseException: The error of a writer thread, or `Cancelled`.
        """
        try:
            self._join()
            self._files.point("last_block")
            for output in self._outputs:
                output.make_durable()
        finally:
            self._stop()
        self._files.point("payload_fsynced")
        return [self._record(number) for number in range(len(self._planned))]

    def _join(self) -> None:
        with self._condition:
            while self._left and self._failure is None:
                self._condition.wait(timeout=1.0)
                self._notice_dead_writers()
            if self._failure is not None:
                raise self._failure

    def _notice_dead_writers(self) -> None:
        if self._left and self._failure is None and not any(t.is_alive() for t in self._threads):
            self._failure = CheckpointError("every writer thread of the checkpoint died")

    def _stop(self) -> None:
        self._fail(CheckpointError("the save of this checkpoint has ended"))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=self._deadline_s)
        if any(thread.is_alive() for thread in self._threads):
            return  # a thread is stuck in the kernel, so the buffers that it may still use stay as they are
        for output in self._outputs:
            with contextlib.suppress(OSError):  # the file is already synced, or abandoned
                output.close()
        with self._condition:
            for block in self._blocks:
                if block.slot is not None and block.state is not State.COPYING:
                    self._budget.give(block.slot)
                    block.slot = None

    def _record(self, number: int) -> FileRecord:
        planned = self._planned[number]
        return FileRecord(
            path=planned.path.as_posix(),
            size_bytes=planned.layout.size_bytes,
            block_bytes=self._block_bytes,
            hashes=[b.hash for b in self._blocks if b.file == number],
        )
