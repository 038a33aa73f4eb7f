"""Copies committed checkpoints from the fast tier to the durable one, in the background.

The durable tier gets the same bytes under the same protocol: a hidden folder, every block read,
compared with its manifest and written, fsync, one rename, then `latest`. A kill at any moment
leaves the fast tier untouched and the durable one with or without the whole checkpoint.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import (
    GLOBAL_NAME,
    FileRecord,
    GlobalManifest,
    RankManifest,
    block_hash,
    parse,
)
from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, Slots, memory_at
from ebbtide.runtime.checkpoint.format.output import OutputFile, Pace
from ebbtide.runtime.checkpoint.protocol.commit import OWNER_NAME, remove_leftovers
from ebbtide.runtime.checkpoint.protocol.publishing import PARTIAL, publish_folder
from ebbtide.runtime.checkpoint.protocol.retention import Committed, being_read, committed, prune

logger = logging.getLogger("ebbtide.checkpoint")


class DamagedSourceError(CheckpointError):
    """The fast tier's copy does not match its manifest; nothing of it became visible elsewhere."""


@dataclass(frozen=True)
class Tiers:
    """Where checkpoints are committed first, and where they are drained to.

    Attributes:
        keep: checkpoints left in ``durable``, newest first; 0: all.
    """

    fast: Path
    durable: Path
    keep: int = 0

    def __post_init__(self) -> None:
        one, other = self.fast.resolve(), self.durable.resolve()
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise CheckpointError(
                "checkpoint.dir and checkpoint.drain_dir must be two folders, none inside the "
                f"other, but got {self.fast} and {self.durable}"
            )

    def holds(self, folder: str | Path) -> bool:
        return Path(folder).resolve() in (self.fast.resolve(), self.durable.resolve())


def next_to_drain(tiers: Tiers) -> Committed | None:
    """Return the newest checkpoint of the fast tier, where the durable one has none as new."""
    newest = next(iter(committed(tiers.fast)), None)
    held = next(iter(committed(tiers.durable)), None)
    if newest is None or (held and held.manifest.sequence >= newest.manifest.sequence):
        return None
    return newest


class Drain:
    """One checkpoint's way to the durable tier; used by one thread, holds one block of memory."""

    def __init__(self, tiers: Tiers, files: Files, pace: Pace, check: Callable[[], None] = lambda: None) -> None:
        self._tiers = tiers
        self._files = files
        self._pace = pace
        self._check = check  # called for every block; raises to give up

    def run(self, found: Committed) -> None:
        """Return once the checkpoint is committed in the durable tier, and old ones are pruned.

        Raises:
            DamagedSourceError: a byte in the fast tier differs from its manifest.
            CheckpointError, OSError: the durable tier cannot be written.
        """
        durable = self._tiers.durable
        staging = durable / f".{found.folder.name}.{found.manifest.nonce}{PARTIAL}"
        with being_read(found.folder):
            self._begin(staging)
            try:
                self._copy(found.folder, staging)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.remove_tree(staging)
                raise
            self._publish(staging, durable / found.folder.name)
        if self._tiers.keep:
            prune(durable, self._tiers.keep, self._files)
        self._files.point("drain_done")

    def _begin(self, staging: Path) -> None:
        grown = [p.parent for p in (staging, *staging.parents) if not p.exists()]
        remove_leftovers(self._tiers.durable, self._files)
        self._files.mkdir(staging)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        self._files.write_briefly(staging / OWNER_NAME, json.dumps(owner).encode())
        for folder in grown:
            self._files.fsync_folder(folder)
        self._files.point("drain_begun")

    def _copy(self, source: Path, staging: Path) -> None:
        pages, records = _manifests(source)
        left = sum(len(r.hashes) for r in records)
        half = left // 2
        for record in records:
            self._files.mkdir((staging / record.path).parent)
            left = self._copy_file(source, staging, record, left, half)
        self._files.point("drain_payload_fsynced")
        for path, data in pages.items():  # the global manifest is the last of them
            self._files.mkdir((staging / path).parent)
            self._files.write_durably(staging / path, data)
        for folder in sorted({p.parent for p in staging.rglob("*")}):
            self._files.fsync_folder(folder)
        self._files.point("drain_sealed")

    def _copy_file(self, source: Path, staging: Path, record: FileRecord, left: int, half: int) -> int:
        buffer = Slots(1, -(-record.block_bytes // ALIGNMENT) * ALIGNMENT, pinned=False)
        address = buffer.take()
        assert address is not None
        output = OutputFile(staging / record.path, record.size_bytes, self._files)
        descriptor = self._files.open(source / record.path, os.O_RDONLY)
        try:
            for number, expected in enumerate(record.hashes):
                self._copy_block(descriptor, output, record, number, expected, address)
                left -= 1
                if left == half:
                    self._files.point("drain_half")
            output.make_durable()
        finally:
            self._files.close(descriptor)
            with contextlib.suppress(OSError):
                output.close()
            buffer.give(address)
            buffer.close()
        return left

    def _copy_block(
        self, descriptor: int, output: OutputFile, record: FileRecord, number: int, expected: str, address: int
    ) -> None:
        self._check()
        offset = number * record.block_bytes
        size = min(record.block_bytes, record.size_bytes - offset)
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        self._pace.wait(size, lambda: False)
        block = memoryview(memory_at(address, padded)).cast("B")
        got = self._files.read_into(descriptor, block[:size], offset)
        if got != size or block_hash(block[:size]) != expected:
            raise DamagedSourceError(
                f"{record.path}: bytes {offset} to {offset + size} in {self._tiers.fast} must "
                "match their manifest, but were altered or cut off: this checkpoint is not drained"
            )
        block[size:] = bytes(padded - size)
        output.write(block, offset)

    def _publish(self, staging: Path, target: Path) -> None:
        self._files.unlink(staging / OWNER_NAME)
        publish_folder(staging, target, self._files)
        latest = self._tiers.durable / "latest"
        self._files.write_durably(latest, target.name.encode(), "drain_latest")


def _manifests(source: Path) -> tuple[dict[str, bytes], list[FileRecord]]:
    """Return the bytes of all manifests by path, the global one last, and the files they list."""
    pages, records = dict[str, bytes](), list[FileRecord]()
    try:
        sealed = (source / GLOBAL_NAME).read_bytes()
        page = parse(sealed, GlobalManifest, GLOBAL_NAME)
        for seal in page.ranks:
            data = (source / seal.path).read_bytes()
            if block_hash(data) != seal.hash:
                raise ManifestError(f"{seal.path} does not match the global manifest")
            pages[seal.path] = data
            records.extend(parse(data, RankManifest, seal.path).files)
    except (ManifestError, FileNotFoundError) as error:
        raise DamagedSourceError(f"{source} cannot be drained: {error}") from error
    pages[GLOBAL_NAME] = sealed
    return pages, records


class Drainer:
    """Rank 0's thread that drains whatever is newest; `wake` and `reap` belong to the foreground.

    Checkpoints that a newer one overtook before their turn are not drained, so that a slow durable
    tier falls behind by one checkpoint and not by ever more.
    """

    def __init__(self, tiers: Tiers, files: Files, pace: Pace, deadline_s: float) -> None:
        self._tiers = tiers
        self._deadline_s = deadline_s
        self._drain = Drain(tiers, files, pace, self._progress)
        self._condition = threading.Condition()
        self._wanted = 0  # requests; the thread counts them off in `_served`
        self._served = 0
        self._failure: BaseException | None = None
        self._progress_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def wake(self, *, catching_up: bool = False) -> None:
        """There may be something new. ``catching_up``: left behind by an earlier run; damage of it
        is logged only, since restore passes over it too.
        """
        with self._condition:
            self._wanted += 1
            self._progress_s = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(catching_up,), name="ebbtide-drain", daemon=True
                )
                self._thread.start()

    def _run(self, catching_up: bool) -> None:
        while True:
            with self._condition:
                served = self._wanted
            failure = self._drain_newest(catching_up=catching_up)
            catching_up = False
            with self._condition:
                self._served = served
                self._failure = self._failure or failure
                if self._served == self._wanted:
                    self._thread = None
                    self._condition.notify_all()
                    return

    def _drain_newest(self, *, catching_up: bool) -> BaseException | None:
        newest = None
        try:
            newest = next_to_drain(self._tiers)
            if newest is not None:
                self._drain.run(newest)
        except BaseException as error:  # noqa: BLE001 - the foreground raises it at the next step
            if newest is not None and not newest.folder.exists():
                return None  # a newer one was committed, this one pruned: the newer one is next
            if isinstance(error, DamagedSourceError) and catching_up:
                logger.warning("not drained: %s", error)
                return None
            return error
        return None

    def _progress(self) -> None:
        with self._condition:
            self._progress_s = time.monotonic()

    def reap(self) -> None:
        """Raise what went wrong since the last call.

        Raises:
            CheckpointError: a checkpoint did not reach the durable tier; the cause is chained.
        """
        with self._condition:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"draining {self._tiers.fast} to {self._tiers.durable} (checkpoint.drain_dir) "
                f"failed: {failure}; both hold what they held, and the next checkpoint tries again"
            ) from failure

    def wait(self) -> None:
        """Until nothing is left to drain.

        Raises:
            CheckpointError: no block was drained for the deadline, or see `reap`.
        """
        with self._condition:
            while self._thread is not None:
                self._condition.wait(timeout=min(1.0, self._deadline_s / 4))
                stuck_s = time.monotonic() - self._progress_s
                if self._thread is not None and stuck_s > self._deadline_s:
                    raise CheckpointError(
                        f"the durable tier must take a block within {self._deadline_s:g} s "
                        f"(checkpoint.deadline_s), but {self._tiers.durable} made no progress for "
                        f"{stuck_s:.1f} s"
                    )
        self.reap()
