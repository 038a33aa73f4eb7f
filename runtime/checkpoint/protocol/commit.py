"""The two-phase commit of a checkpoint by all ranks, through a shared filesystem.

All files are written to a hidden folder, ``.TAG.NONCE.partial``. When a rank's files are on disk, it writes a manifest
there, which is its vote. Rank 0 collects the votes, writes the global manifest, and renames the folder to ``TAG``. This
one rename is the commit. Rank 0 then writes `latest`. The commit makes no collective call of torch, and every wait has
a deadline. An uncommitted checkpoint never has the name of a checkpoint.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.errors import Cancelled, CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import (
    GLOBAL_NAME,
    RANKS_FOLDER,
    FileRecord,
    GlobalManifest,
    RankManifest,
    RankSeal,
    block_hash,
    dump,
    parse,
    rank_manifest_name,
)
from ebbtide.runtime.checkpoint.protocol.folders import (
    PARTIAL,
    REPLACED,
    committed,
    lives,
    named_latest,
    owner,
    publish_folder,
    recover_replaced,
)
from ebbtide.runtime.checkpoint.protocol.rotation import Note

GRACE_S = 20.0  # torchrun, SLURM and Kubernetes kill a process 30 s after SIGTERM by default

sigterm_came = threading.Event()
_came_s = 0.0


def tell() -> None:
    """Record that the process has received SIGTERM, and when, so that waits for other ranks become shorter.

    Later calls change nothing.
    """
    global _came_s
    if not sigterm_came.is_set():
        _came_s = time.monotonic()
        sigterm_came.set()


def limit_s(begin_s: float, end_s: float, extra_s: float = 0.0) -> float:
    """Return the monotonic time in seconds at which a checkpoint's wait for other ranks must end."""
    # After SIGTERM the wait is shorter, because the awaited rank may be dead, and the launcher soon kills this process.
    if not sigterm_came.is_set():
        return end_s
    return min(end_s, max(begin_s, _came_s) + GRACE_S + extra_s)


OWNER_NAME = "owner.json"
OUTCOME_GRACE_S = 10.0  # rank 0 gives up first, so that no other rank decides before it
LATEST_GRACE_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """An attempt to save a checkpoint: its folder, tag, step and identifier. All ranks have the same values
    except ``rank``.
    """

    save_dir: Path
    tag: str
    nonce: str
    step: int
    rank: int
    world_size: int
    save_latest: bool = True
    plan: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def staging(self) -> Path:
        """Return the hidden folder that holds the checkpoint's files until they are committed."""
        return self.save_dir / f".{self.tag}.{self.nonce}{PARTIAL}"

    @property
    def target(self) -> Path:
        return self.save_dir / self.tag

    def abort_note(self, rank: int) -> Path:
        return self.staging / f"abort_{rank:05d}.json"


class Commit:
    """The commit protocol of one attempt to save a checkpoint, on one rank."""

    def __init__(self, attempt: Attempt, files: Files, deadline_s: float) -> None:
        self._attempt = attempt
        self._files = files
        self._deadline_s = deadline_s
        self._publishing = False
        self.note = Note(attempt.save_dir, attempt.tag, attempt.nonce, files, save_latest=attempt.save_latest)
        self._grown: list[Path] = []  # folders in which a new folder was created

    def begin(self) -> None:
        """Make the hidden folder for the checkpoint's files, without waiting for the disk.

        A note about the save is written before the folder is made, because a run that is killed in between would
        otherwise leave a folder that no later run can explain. Ranks may call this in any order, and the first one
        makes the folder.
        """
        a = self._attempt
        self._grown = [p.parent for p in (a.staging, *a.staging.parents) if not p.exists()]
        if a.rank == 0:
            self.note.write()
        else:
            self.note.make_folder()
        self._files.mkdir(a.staging / RANKS_FOLDER)
        if a.rank == 0:
            page = {**owner(), "nonce": a.nonce}
            self._files.write_briefly(a.staging / OWNER_NAME, json.dumps(page).encode())
        self._files.point("staging_made")

    def tidy(self) -> None:
        """Remove the hidden folders that crashed saves left in the folder of checkpoints. Only rank 0 does this."""
        a = self._attempt
        if a.rank == 0:
            remove_leftovers(a.save_dir, self._files, keep=a.staging)

    def vote(self, files: list[FileRecord]) -> None:
        """Make the checkpoint files that this rank wrote durable, and write its vote for the commit (its manifest).

        This is phase one of the two-phase commit.
        """
        a = self._attempt
        own = {(a.staging / f.path).parent for f in files} | {a.staging}
        for folder in [*sorted(own), *self._grown]:
            self._files.fsync_folder(folder)
        self._files.point("staging_fsynced")
        manifest = RankManifest(
            rank=a.rank,
            world_size=a.world_size,
            nonce=a.nonce,
            tag=a.tag,
            step=a.step,
            plan=a.plan,
            versions=dict(a.versions),
            files=files,
        )
        path = a.staging / rank_manifest_name(a.rank)
        try:
            self._files.write_durably(path, dump(manifest), "vote")
        except FileNotFoundError:
            # A vote counts as soon as the file has its name. The commit may meanwhile have moved it, because it first
            # makes the names in this folder durable. `conclude` reports the outcome.
            if a.rank == 0:
                raise
        self._files.point("voted")

    def conclude(self) -> None:
        """Commit the checkpoint on rank 0, and wait for it on other ranks: phase two of the two-phase commit.

        Raises:
            CheckpointError: Another rank failed, or did not vote in time. The checkpoint did not become visible.
        """
        if self._attempt.rank == 0:
            self._seal(self._collect_votes())
            self._publish()
        else:
            self._await_outcome()
        self._files.point("committed")

    def make_durable(self, files: list[FileRecord], real: Files) -> None:
        """Call the fsyncs that were left out while a checkpoint was written, and wait until it is on disk on all ranks.

        The checkpoint already has its final name. If a process is killed before this method returns, nothing is lost,
        because the kernel has the bytes. If the machine stops, bytes may be lost.

        Args:
            files: Files of this rank, as the manifest lists them.
            real: File functions that do call fsync.
        """
        a = self._attempt
        for record in files:
            real.fsync_file(a.target / record.path)
        for folder in sorted({(a.target / f.path).parent for f in files} | {a.target, *self._grown}):
            real.fsync_folder(folder)
        if a.rank != 0:
            real.write_durably(a.target / synced_name(a.rank), b"")
            return
        for rank in range(1, a.world_size):
            for _ in self._polls(lambda rank=rank: f"rank {rank} did not report its files as synced"):  # type: ignore[misc]
                if (a.target / synced_name(rank)).exists():
                    break
        for name in (*(rank_manifest_name(r) for r in range(a.world_size)), GLOBAL_NAME):
            real.fsync_file(a.target / name)
        real.fsync_folder(a.target / RANKS_FOLDER)
        if a.save_latest:
            real.fsync_file(a.save_dir / "latest")
        real.fsync_folder(a.save_dir)

    def close(self, *, committed: bool) -> None:
        """End an attempt to save a checkpoint on rank 0.

        Older checkpoints that were deleted during the save are removed for good if the new one was
        committed, and restored if not.
        """
        if self._attempt.rank != 0:
            return
        for rank in range(1, self._attempt.world_size):
            with contextlib.suppress(OSError):
                self._files.unlink(self._attempt.target / synced_name(rank))
        with contextlib.suppress(OSError):  # the next resume resolves leftovers
            self.note.close(committed=committed)

    def abort(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks, so that all ranks give up the checkpoint.

        If only one rank trains, its uncommitted files are removed (the hidden folder `Attempt.staging`). This
        method raises no error itself.
        """
        a, reason = self._attempt, f"{type(error).__name__}: {error}"
        page = {"rank": a.rank, "reason": reason[:2000], "cancelled": isinstance(error, Cancelled)}
        note = json.dumps(page).encode()
        with contextlib.suppress(OSError):
            self._files.write_durably(a.abort_note(a.rank), note)
        # While names are swapped, the hidden folder may hold the earlier checkpoint.
        if a.world_size == 1 and not self._publishing:
            with contextlib.suppress(OSError):
                self._files.remove_tree(a.staging)
        # A checkpoint with its final name that is not synced is not committed, so the checkpoints that were deleted for
        # it are restored.
        synced = self._publishing and not isinstance(self._files, Deferred)
        self.close(committed=synced and self.is_committed())

    # -- rank 0

    def _collect_votes(self) -> dict[int, bytes]:
        a, votes = self._attempt, dict[int, bytes]()

        def missing() -> list[int]:
            return sorted(set(range(a.world_size)) - set(votes))

        for _ in self._polls(lambda: f"ranks {missing()} did not report their files as written"):
            for rank in missing():
                with contextlib.suppress(FileNotFoundError):
                    votes[rank] = self._files.read(a.staging / rank_manifest_name(rank))
            if len(votes) == a.world_size:
                break
            self._raise_aborts()
        self._files.point("votes_seen")
        return votes

    def _seal(self, votes: Mapping[int, bytes]) -> None:
        a = self._attempt
        manifests = [parse(votes[r], RankManifest, rank_manifest_name(r)) for r in sorted(votes)]
        for manifest in manifests:
            self._agree(manifest)
        earlier = committed(a.save_dir)
        page = GlobalManifest(
            nonce=a.nonce,
            tag=a.tag,
            step=a.step,
            world_size=a.world_size,
            plan=a.plan,
            sequence=1 + max((c.manifest.sequence for c in earlier), default=0),
            committed_unix_s=time.time(),
            versions=dict(a.versions),
            payload_bytes=sum(f.size_bytes for m in manifests for f in m.files),
            ranks=[
                RankSeal(path=rank_manifest_name(r), size_bytes=len(v), hash=block_hash(v))
                for r, v in sorted(votes.items())
            ],
        )
        self._files.fsync_folder(a.staging / RANKS_FOLDER)
        self._files.write_durably(a.staging / GLOBAL_NAME, dump(page), "manifest")
        self._files.point("sealed")

    def _agree(self, manifest: RankManifest) -> None:
        a = self._attempt
        voted = (manifest.nonce, manifest.tag, manifest.step, manifest.world_size)
        expected = (a.nonce, a.tag, a.step, a.world_size)
        if voted != expected:
            theirs, ours = (
                f"step {step} as {tag!r} on {n} ranks (save {nonce})" for nonce, tag, step, n in (voted, expected)
            )
            raise CheckpointError(
                f"all ranks must save the same step under the same tag, but rank {manifest.rank} saves {theirs} and "
                f"rank 0 saves {ours}. Call save_checkpoint with the same tag on every rank, at the same step"
            )

    def _publish(self) -> None:
        a = self._attempt
        self._publishing = True
        self._files.unlink(a.staging / OWNER_NAME)
        # The replaced checkpoint is kept until the new one is durable.
        deferred = isinstance(self._files, Deferred)
        aside = (lambda folder: self.note.adopt(folder, a.target)) if deferred else None
        publish_folder(a.staging, a.target, self._files, aside)
        if a.save_latest:
            self._files.write_durably(a.save_dir / "latest", a.tag.encode(), "latest")

    # -- the other ranks

    def _await_outcome(self) -> None:
        a = self._attempt
        for _ in self._polls(lambda: "rank 0 did not commit the checkpoint", extra_s=OUTCOME_GRACE_S):
            if self.is_committed():
                self._await_latest()
                return
            self._raise_aborts()
            if not a.staging.exists() and not self.is_committed():
                raise CheckpointError(
                    f"checkpoint {a.tag!r} was not committed: its temporary folder {a.staging} was removed, most often "
                    "because rank 0 gave up the save. See the error of rank 0. Checkpoints that were committed before "
                    "are intact"
                )

    def _await_latest(self) -> None:
        a, begin_s = self._attempt, time.monotonic()
        while a.save_latest and named_latest(a.save_dir) != a.tag:
            if time.monotonic() > limit_s(begin_s, begin_s + LATEST_GRACE_S):
                return
            time.sleep(0.005)

    def is_committed(self) -> bool:
        """Return whether the checkpoint under the final name is the one that this save has written. The final name may
        also belong to an earlier checkpoint.
        """
        try:
            data = self._files.read(self._attempt.target / GLOBAL_NAME)
            return parse(data, GlobalManifest, GLOBAL_NAME).nonce == self._attempt.nonce
        except (OSError, ManifestError):
            return False

    # -- all

    def _polls(self, what: Callable[[], str], extra_s: float = 0.0) -> Iterator[None]:
        deadline_s, pause_s = self._deadline_s + extra_s, 0.002
        begin = time.monotonic()
        while time.monotonic() < limit_s(begin, begin + deadline_s, extra_s):
            yield
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.3)
        raise CheckpointError(
            f"checkpoint {self._attempt.tag!r} failed: {what()} within {deadline_s:g} s (limit: "
            f"checkpoint.deadline_s, or {GRACE_S:g} s after a SIGTERM). "
            "A rank died, hangs or is slow. This rank committed nothing"
        )

    def _raise_aborts(self) -> None:
        a = self._attempt
        for rank in range(a.world_size):
            with contextlib.suppress(FileNotFoundError):
                page = json.loads(self._files.read(a.abort_note(rank)))
                # A rank that was ready may have waited for a rank that was cancelled. That is not an error either.
                kind = Cancelled if page["cancelled"] else CheckpointError
                raise kind(f"checkpoint {a.tag!r} was abandoned: rank {rank} reports {page['reason']}")


class Deferred(Files):
    """File functions that leave out every fsync, for checkpoints that are made durable after their commit.

    See `Commit.make_durable`.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return None if name == "fsync" else self._files.call(name, function, *args)

    def point(self, name: str) -> None:
        self._files.point(name)


def synced_name(rank: int) -> str:
    return f"{RANKS_FOLDER}/synced_{rank:05d}"


def remove_leftovers(save_dir: Path, files: Files, keep: Path | None = None) -> None:
    """Remove the hidden folders of earlier saves, except those of processes that still run.

    A process on another host counts as ended 24 hours after the folder's last change. Other ranks may already write to
    ``keep``, the folder of the save that begins now.
    """
    recover_replaced(save_dir, files)
    for pattern in (f".*{PARTIAL}", f".*{REPLACED}", ".*.trash"):
        for folder in save_dir.glob(pattern):
            if folder != keep and not _owner_lives(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _owner_lives(folder: Path) -> bool:
    path = folder / OWNER_NAME
    try:
        page = json.loads(path.read_bytes())
        host, pid = str(page["host"]), int(page["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return time.time() - folder.stat().st_mtime < 24 * 3600
    return pid != os.getpid() and lives(page, path)
