"""Tests of the store of optimizer state on drives that fail, are full, end reads or writes early, or stall."""

import contextlib
import errno
import os
import re
import signal
import threading

import pytest
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.storage.errors import StorageError

from tests import prepared
from tests.runtime.checkpoint.conftest import FaultyFiles
from tests.runtime.storage.conftest import ELEMENTS, begun, commit, equal, read, state, step, write_all

TWO = (2.0, 1.0)
NAMED = ("pwrite", "preadv", "fdatasync", "fsync", "allocate", "rename", "open", "truncate")


class Failing(FaultyFiles):
    """A stand-in for the store's file operations that makes a call chosen by the test fail. If the call is a
    `close`, the file is closed before the error is raised.
    """

    def call(self, name, function, *args):
        if name == "close":
            os.close(args[0])
            function = bool
        return super().call(name, function, *args)


def run(stores, files, done):
    """Commit step 1 to a store of optimizer state, resume from this step and commit step 2. Append the number
    of each committed step to ``done``.
    """
    options = {"files": files, "block_bytes": 16_384}
    step(stores.open(TWO, **options), 1)
    done.append(1)
    store = stores.reopen(TWO, **options)
    store.restore()
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))
    step(store, 2)
    done.append(2)


def whole(stores, done):
    """Check the steps in the store of optimizer state after some of its file operations were made to fail.

    The store must contain the last step that was committed, or a later one. For each step in the store, the state must
    equal the state that was written, bit for bit.

    Args:
        done: Numbers of the committed steps.
    """
    stores.close()
    store = stores.open(TWO, block_bytes=16_384)
    assert max((record.step for record in store.steps), default=0) >= max(done, default=0)
    for record in store.steps:
        store.restore(record.name)
        for subgroup in ELEMENTS:
            assert equal(read(store, subgroup), state(subgroup, record.step))


FULL = ("pwrite", "allocate", "open", "mkdir", "rename")


@pytest.mark.parametrize(("error", "names"), [(errno.EIO, NAMED), (errno.ENOSPC, FULL)])
def test_any_system_call_may_fail(tmp_path, stores, error, names):
    counting = Failing()
    run(stores, counting, [])
    calls = list(counting.calls)
    assert set(names) <= set(calls)
    tried = [n for n, name in enumerate(calls) if error == errno.EIO or name in FULL]
    fired = 0
    for at in tried:
        stores.place = tmp_path / f"at{at}"
        files, done = Failing(at, error, lasting=at % 2 == 0), []
        raised = None
        try:
            run(stores, files, done)
        except StorageError as caught:
            raised = caught
        fired += bool(files.fired)
        if raised is None and files.fired:
            assert files.calls[at] == "close"
            assert done == [1, 2]
        files.armed = False
        whole(stores, done)
    assert fired > 0.95 * len(tried)  # threads open files in an order of their own


def test_after_a_failed_write_nothing_is_committed_any_more(stores):
    store = stores.open(files=(files := FaultyFiles()))
    step(store, 1)
    begun(store)
    files.at = len(files.calls)
    with pytest.raises(StorageError, match="EIO"):
        store.write(0, state(0, 2), 2)
    assert files.fired == 1
    with pytest.raises(StorageError, match=r"cannot be used .*EIO"):
        commit(store, 2, 2)
    with pytest.raises(StorageError, match="cannot be used"):
        store.write(0, state(0, 2), 2)
    store = stores.reopen()
    assert [s.step for s in store.steps] == [1]


class Short(Files):
    """File operations whose reads and writes end early, after a given number of bytes, as the kernel may end them."""

    def __init__(self, size_bytes):
        self.size_bytes, self.fired = size_bytes, 0

    def call(self, name, function, *args):
        if name == "pwrite" and len(args[1]) > self.size_bytes:
            self.fired += 1
            return os.pwrite(args[0], bytes(args[1][: self.size_bytes]), args[2])
        if name == "preadv" and len(args[1][0]) > self.size_bytes:
            self.fired += 1
            return os.preadv(args[0], [args[1][0][: self.size_bytes]], args[2])
        return function(*args)


@pytest.mark.parametrize("size_bytes", [512, 1000, 4096])
def test_short_reads_and_writes_are_ended(stores, size_bytes):
    files = Short(size_bytes)
    run_with = {"files": files, "block_bytes": 8192}
    step(stores.open(TWO, **run_with), 1)
    store = stores.reopen(TWO, **run_with)
    store.restore()
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))
    assert files.fired > 10


class NoDirect(Files):
    """A filesystem that refuses O_DIRECT, either when a file is opened or when it is read or written."""

    def __init__(self, at_open):
        self.at_open, self.fired, self.direct = at_open, 0, set()

    def call(self, name, function, *args):
        if name == "open" and args[1] & os.O_DIRECT:
            if self.at_open:
                self.fired += 1
                raise OSError(errno.EINVAL, "no O_DIRECT")
            self.direct.add(descriptor := function(*args))
            return descriptor
        if name == "close":
            self.direct.discard(args[0])
        if name in ("pwrite", "preadv") and args[0] in self.direct:
            self.fired += 1
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return function(*args)


@pytest.mark.parametrize("at_open", [True, False])
def test_without_direct_io_plain_calls_do(stores, at_open):
    files = NoDirect(at_open)
    run(stores, files, [])
    assert files.fired


class Stalls(Files):
    """File operations of which one kind, such as a write or a sync, blocks until the test releases it."""

    def __init__(self, name):
        self.name, self.armed = name, False
        self.stalled, self.go = threading.Event(), threading.Event()

    def call(self, name, function, *args):
        if self.armed and name == self.name:
            self.stalled.set()
            assert self.go.wait(30)
        return function(*args)


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_a_drive_that_stalls_is_waited_for(stores, name):
    store = stores.open(files=(files := Stalls(name)))
    step(store, 1)
    files.armed = True
    background = threading.Thread(target=step, args=(store, 2))
    background.start()
    assert files.stalled.wait(30)
    assert equal(read(store, 1), state(1, 1 if name == "pwrite" else 2))
    files.go.set()
    background.join(30)
    assert [s.step for s in store.steps] == [2]


def test_a_drive_that_hangs_is_an_error_in_time(stores):
    store = stores.open(files=(files := Stalls("pwrite")))
    step(store, 1)
    store._blocks._deadline_s = 0.3
    files.armed = True
    with pytest.raises(StorageError, match=r"no block of subgroup 0 .* \(limit: 0.3 s\): the drive hangs"):
        store.write(0, state(0, 2))
    with pytest.raises(StorageError, match="cannot be used"):
        commit(store, begun(store), 2)
    files.go.set()
    store = stores.reopen()
    store.restore()
    assert equal(read(store, 0), state(0, 1))


def test_versions_beside_a_failing_commit_stay(stores):
    store = stores.open(files=(files := FaultyFiles()))
    step(store, 1)
    begun(store)
    write_all(store, 2)
    files.at, files.lasting = len(files.calls) + 1, True  # the first of these calls is fdatasync
    with pytest.raises(StorageError):
        commit(store, 2, 2)
    with contextlib.suppress(StorageError):
        write_all(store, 3)
    files.armed = False
    store = stores.reopen()
    store.restore()
    number = store.steps[0].step
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, number))


CUT = """
import mmap, os, sys
from pathlib import Path
from tests.runtime.storage.conftest import Stores, write_all

stores = Stores(Path(sys.argv[1]))
store = stores.open()
write_all(store, 1)
shown = store.view(0)
assert shown[0][-1] != 0
(extents,) = stores.place.glob("**/*.extents")
if sys.argv[2] == "ours":
    os.truncate(extents, 0)
    shown[0].sum()
other = open(stores.place / "other", "w+b")
other.truncate(4096)
mapped = mmap.mmap(other.fileno(), 4096)
other.truncate(0)
mapped[0]
"""


@pytest.mark.parametrize("whose", ["ours", "somebody else's"])
def test_a_page_that_does_not_come_has_a_last_word(tmp_path, whose):
    done = prepared.run(["-c", CUT, tmp_path, whose], timeout=400)
    assert done.returncode == -signal.SIGBUS, done.stderr
    told = re.findall("ebbtide: state on storage could not be read from (.*?): ", done.stderr)
    assert told == ([str(next(tmp_path.glob("**/*.extents")))] if whose == "ours" else [])
