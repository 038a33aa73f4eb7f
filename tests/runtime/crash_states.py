"""Every state that a crash during a save can leave on disk, after Pillai et al., "All File Systems Are Not
Created Equal" (ALICE, OSDI 2014).

The system calls of a save are recorded. For each prefix of the calls, synced data is on disk, and any
part of the other data may be. A folder is built and opened for each such state.
"""

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import xxhash
from ebbtide.runtime.checkpoint.files import Files

RANDOM_SUBSETS = 4


@dataclass
class Op:
    """A recorded system call of a save.

    Attributes:
        touches: Inode that has to be synced to make the call durable.
    """

    kind: str
    touches: int
    args: tuple = ()


@dataclass
class Disk:
    """A simulated disk with folders and files by inode. ``root`` is the inode of the checkpoint folder's parent."""

    root: int = 0
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, op: Op) -> None:
        if op.kind == "write":
            offset, data = op.args
            content = self.files.setdefault(op.touches, bytearray())
            content.extend(b"\0" * (offset + len(data) - len(content)))
            content[offset : offset + len(data)] = data
        elif op.kind == "truncate":
            content = self.files.setdefault(op.touches, bytearray())
            size = op.args[0]
            del content[size:]
            content.extend(b"\0" * (size - len(content)))
        elif op.kind == "link":
            name, inode, folder = op.args
            self.folders[op.touches][name] = inode
            (self.folders if folder else self.files).setdefault(inode, {} if folder else bytearray())
        elif op.kind == "unlink":
            self.folders[op.touches].pop(op.args[0], None)
        elif op.kind == "rename":
            source, target, inode = op.args
            self.folders[op.touches].pop(source, None)
            self.folders[op.touches][target] = inode
        elif op.kind == "exchange":
            entries, (one, other) = self.folders[op.touches], op.args
            entries[one], entries[other] = entries[other], entries[one]

    def build(self, path: Path, inode: int | None = None) -> None:
        path.mkdir()
        for name, child in self.folders[self.root if inode is None else inode].items():
            if child in self.folders:
                self.build(path / name, child)
            else:
                (path / name).write_bytes(self.files.get(child, b""))
                os.utime(path / name, (0, 0))  # as if the machine had been down for a while

    def digest(self) -> str:
        hasher = xxhash.xxh3_128()

        def add(inode):
            for name, child in sorted(self.folders[inode].items()):
                hasher.update(f"{name}/{child in self.folders}".encode())
                if child in self.folders:
                    add(child)
                else:
                    hasher.update(self.files.get(child, b""))
            hasher.update(b"end")

        add(self.root)
        return hasher.hexdigest()


class RecordingFiles(Files):
    """File operations that make the real system calls and record each change of the filesystem with its inode."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.live = Disk()
        self.inodes = count(1)
        self.open_files: dict[int, int] = {}
        self.lock = threading.RLock()
        self.exchanges = True

    def find(self, path: Path) -> int:
        inode = self.live.root
        for part in path.relative_to(self.root).parts:
            inode = self.live.folders[inode][part]
        return inode

    def note(self, kind, touches, *args):
        op = Op(kind, touches, args)
        self.ops.append(op)
        self.live.apply(op)

    def make(self, path: Path, *, folder: bool) -> int:
        parent = self.find(path.parent)
        if path.name not in self.live.folders[parent]:
            self.note("link", parent, path.name, next(self.inodes), folder)
        return self.find(path)

    def call(self, name, function, *args):
        with self.lock:
            if name == "exchange" and not self.exchanges:
                raise OSError(38, "no exchange")
            result = function(*args)
            getattr(self, f"on_{name}", lambda *_: None)(result, *args)
            return result

    def point(self, name):
        with self.lock:
            self.ops.append(Op("point", -1, (name,)))

    def on_open(self, descriptor, path, flags, _mode):
        self.open_files[descriptor] = self.make(path, folder=False) if flags & 64 else self.find(path)
        if flags & 512:  # O_TRUNC
            self.note("truncate", self.open_files[descriptor], 0)

    def on_pwrite(self, written, descriptor, data, offset):
        self.note("write", self.open_files[descriptor], offset, bytes(data[:written]))

    def on_truncate(self, _, descriptor, size):
        self.note("truncate", self.open_files[descriptor], size)

    def on_allocate(self, _, descriptor, _begin, size):
        self.note("truncate", self.open_files[descriptor], size)

    def on_fsync(self, _, descriptor):
        self.ops.append(Op("fsync", self.open_files[descriptor]))

    def on_fdatasync(self, _, descriptor):
        self.on_fsync(_, descriptor)

    def on_mkdir(self, _, path):
        for folder in reversed([path, *path.parents]):
            if folder.is_relative_to(self.root) and folder != self.root:
                self.make(folder, folder=True)

    def on_rename(self, _, source, target):
        assert source.parent == target.parent
        self.note("rename", self.find(source.parent), source.name, target.name, self.find(source))

    def on_rename_folder(self, result, source, target, _flag):
        self.on_rename(result, source, target)

    def on_exchange(self, _, one, other, _flag):
        self.note("exchange", self.find(one.parent), one.name, other.name)

    def on_unlink(self, _, path):
        self.note("unlink", self.find(path.parent), path.name)

    on_rmdir = on_unlink


def crash_states(ops, seed, durable="committed"):
    """Yield (disk, number of saves so far that a crash may not undo) for each different state in which a crash may
    leave the disk.

    A crash may come after any of the recorded system calls. All earlier calls that were synced have reached the
    disk. Of the earlier calls that were not synced, many different subsets are tried as those that have reached it.

    Args:
        durable: Named point of a save at which a crash may not undo the save any more.
    """
    rng, seen = random.Random(seed), set()
    for end in range(len(ops) + 1):
        prefix = ops[:end]
        synced = set()
        last_sync: dict[int, int] = {}
        for at, op in enumerate(prefix):
            if op.kind == "fsync":
                last_sync[op.touches] = at
        changing = [i for i, op in enumerate(prefix) if op.kind not in ("fsync", "point")]
        synced = {i for i in changing if i < last_sync.get(prefix[i].touches, -1)}
        free = [i for i in changing if i not in synced]
        choices = [set(free), set()]
        choices += [set(free) - {i} for i in free] + [{i} for i in free]
        choices += [{i for i in free if rng.random() < 0.5} for _ in range(RANDOM_SUBSETS)]
        commits = sum(op.kind == "point" and op.args[0] == durable for op in prefix)
        for chosen in choices:
            disk = Disk()
            # A folder exists as an object even if no name leads to it.
            for i in changing:
                if prefix[i].kind == "link" and prefix[i].args[2]:
                    disk.folders.setdefault(prefix[i].args[1], {})
            try:
                for i in changing:
                    if i in synced or i in chosen:
                        disk.apply(prefix[i])
            except KeyError:  # the swapped name never reached the disk, which no file system allows
                continue
            key = (disk.digest(), commits)
            if key not in seen:
                seen.add(key)
                yield disk, commits


@contextmanager
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a temporary folder in memory (/dev/shm) if possible, because hundreds of folders are made in it."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="ebbtide-replay-") as folder:
        yield Path(folder)
