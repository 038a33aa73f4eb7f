"""Every state that a crash can leave behind, after Pillai et al., "All File Systems Are Not Created
Equal" (ALICE, OSDI 2014).

The system calls of a save are recorded. For each prefix of them, what was synced is on disk; of the
rest, any part may be. Each such folder is built and opened.
"""

import os
import random
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import xxhash

from runtime.checkpoint.deepspeed.restore import newest_valid
from runtime.checkpoint.files import Files
from runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from runtime.checkpoint.trainers.bystanders import watch
from tests.runtime.checkpoint.conftest import Bench, some_state

RANDOM_SUBSETS = 4


@dataclass
class Op:
    """``touches``: the inode whose fsync makes it durable."""

    kind: str
    touches: int
    args: tuple = ()


@dataclass
class Disk:
    """Folders and files by inode; ``root`` is the folder above the one of the checkpoints."""

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
            (self.folders if folder else self.files).setdefault(
                inode, {} if folder else bytearray()
            )
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
                os.utime(path / name, (0, 0))  # the machine was down for a while

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
    """Does the real calls and writes down what they change, by inode."""

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
        self.open_files[descriptor] = (
            self.make(path, folder=False) if flags & 64 else self.find(path)
        )
        if flags & 512:  # O_TRUNC
            self.note("truncate", self.open_files[descriptor], 0)

    def on_pwrite(self, written, descriptor, data, offset):
        self.note("write", self.open_files[descriptor], offset, bytes(data[:written]))

    def on_truncate(self, _, descriptor, size):
        self.note("truncate", self.open_files[descriptor], size)

    def on_fsync(self, _, descriptor):
        self.ops.append(Op("fsync", self.open_files[descriptor]))

    def on_mkdir(self, _, path):
        for folder in reversed([path, *path.parents]):
            if folder.is_relative_to(self.root) and folder != self.root:
                self.make(folder, folder=True)

    def on_rename(self, _, source, target):
        assert source.parent == target.parent
        self.note("rename", self.find(source.parent), source.name, target.name, self.find(source))

    def on_exchange(self, _, one, other):
        self.note("exchange", self.find(one.parent), one.name, other.name)

    def on_unlink(self, _, path):
        self.note("unlink", self.find(path.parent), path.name)

    on_rmdir = on_unlink


def crash_states(ops, seed):
    """(disk, committed steps so far) for every prefix and many choices of what was not synced."""
    rng = random.Random(seed)
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
        commits = sum(op.kind == "point" and op.args[0] == "committed" for op in prefix)
        for chosen in choices:
            disk = Disk()
            # Folders exist as objects whether or not a name leads to them.
            for i in changing:
                if prefix[i].kind == "link" and prefix[i].args[2]:
                    disk.folders.setdefault(prefix[i].args[1], {})
            try:
                for i in changing:
                    if i in synced or i in chosen:
                        disk.apply(prefix[i])
            except KeyError:  # swapped a name that never reached the disk: no filesystem does this
                continue
            yield disk, commits


def check(folder: Path, commits: int):
    if not folder.exists():
        assert commits == 0, "the folder of the checkpoints itself is gone"
        return
    for entry in list_checkpoints(folder):
        assert entry.status == "committed"
        assert verify(folder, entry.tag) == []
    choice = newest_valid(folder)  # gives a swapped-out checkpoint its name back, too
    assert (choice.step or 0) >= commits, choice.summary
    tags = {e.tag for e in list_checkpoints(folder)}
    shown = {p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")}
    assert shown == tags, "a folder without a manifest is visible"
    latest = folder / "latest"
    if latest.exists():
        assert latest.read_text() in tags
    else:
        assert commits == 0


@pytest.fixture(autouse=True)
def readers_end_what_a_crash_left():
    """As in every process that has saved a checkpoint. An unreadable note makes nobody wait."""
    watch()


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is such a place: hundreds of folders come and go in it."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="ebbtide-replay-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("scenario", ["new tags", "same tag", "same tag, no exchange"])
def test_every_crash_state_opens(tmp_path, memory, scenario):
    files = RecordingFiles(tmp_path / "world")
    files.root.mkdir()
    files.exchanges = "no exchange" not in scenario
    bench = Bench(files.root / "ck", writers=1)
    for number in (1, 2):
        tag = "t" if "same" in scenario else f"t{number}"
        bench.save(some_state(number, elements=64), tag, files=files, keep=1)
    seen = set()
    for number, (disk, commits) in enumerate(crash_states(files.ops, seed=1)):
        key = (disk.digest(), commits)
        if key in seen:
            continue
        seen.add(key)
        folder = memory / f"state{number}"
        disk.build(folder)
        check(folder / "ck", commits)
        shutil.rmtree(folder)
    assert len(seen) > 100


def test_the_replay_finds_a_missing_fsync(tmp_path, memory):
    """The checker itself: without the payload's fsync, some crash state must fail."""

    class Careless(RecordingFiles):
        def on_fsync(self, _, descriptor):
            path_is_payload = any(
                op.kind == "write" and op.touches == self.open_files[descriptor]
                and len(op.args[1]) >= 4096 for op in self.ops
            )  # fmt: skip
            if not path_is_payload:
                super().on_fsync(_, descriptor)

    files = Careless(tmp_path / "world")
    files.root.mkdir()
    Bench(files.root / "ck", writers=1).save(some_state(1, elements=64), "t", files=files)
    failed = 0
    for number, (disk, commits) in enumerate(crash_states(files.ops, seed=1)):
        disk.build(memory / f"s{number}")
        try:
            check(memory / f"s{number}/ck", commits)
        except AssertionError:
            failed += 1
            break
        finally:
            shutil.rmtree(memory / f"s{number}")
    assert failed > 0
