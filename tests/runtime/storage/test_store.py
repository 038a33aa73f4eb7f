"""Tests of the store for optimizer state on drives: written state is read back from one or more drives, by
version and by step, and a write does not overwrite the state of a kept step.
"""

import os
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.memory import padded
from ebbtide.runtime.storage import waiting
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.storage.layout import Layout
from ebbtide.runtime.storage.pages import CommittedStep
from ebbtide.runtime.storage.versions import Retention
from ebbtide.runtime.storage.waiting import DriveProgress, Telling

from tests.runtime.storage.conftest import (
    ELEMENTS,
    SIZES,
    aligned,
    begun,
    commit,
    empty,
    equal,
    read,
    state,
    step,
    write_all,
)

WEIGHTS = [(1.0,), (1.0, 1.0), (5.0, 2.0, 0.5)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_extents_and_drives_parts_lie_apart_and_fill_the_files(weights):
    layout = Layout(SIZES, weights, 4096, extents=3)
    used = [[] for _ in weights]
    for subgroup, sizes in SIZES.items():
        blocks = list(layout.blocks(subgroup))
        assert sum(b.size_bytes for b in blocks) == sum(sizes)
        for extent in range(3):
            for b in blocks:
                begin = layout.start(b.drive, subgroup, extent) + b.offset
                assert begin % 4096 == 0
                used[b.drive].append((begin, begin + padded(b.size_bytes)))
    for drive, ranges in enumerate(used):
        edges = sorted(ranges)
        assert edges[0][0] == 0
        assert edges[-1][1] == layout.file_bytes[drive]
        assert all(end == begin for (_, end), (begin, _) in pairwise(edges))
    row = sum(padded(s) for sizes in SIZES.values() for s in sizes)
    assert sum(layout.file_bytes) == 3 * row


def test_a_large_subgroup_is_shared_by_weight():
    layout = Layout({0: (40 * 2**20,)}, (3.0, 1.0), 2**20, extents=1)
    assert layout.file_bytes == (30 * 2**20, 10 * 2**20)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", [tuple, aligned])
def test_what_is_written_is_read(stores, weights, kind):
    store = stores.open(weights, verify_reads=True)
    for version in (1, 2, 3):
        for subgroup in ELEMENTS:
            store.write(subgroup, kind(state(subgroup, version)), version)
            into = kind(empty(subgroup))
            store.read(subgroup, into)
            assert equal(into, state(subgroup, version))
    row = sum(padded(s) for sizes in SIZES.values() for s in sizes)
    assert store.written_bytes == store.read_bytes == 3 * row


def test_the_space_is_set_aside_at_once(stores):
    stores.open((2.0, 1.0), keep=2)
    for drive, size in zip(stores.drives((2.0, 1.0)), Layout(SIZES, (2, 1), 4096, extents=3).file_bytes, strict=True):
        held = (drive.directory / "rank_00000.extents").stat()
        assert held.st_size == size
        assert held.st_blocks * 512 >= size


def test_without_space_nothing_is_begun(stores, monkeypatch):
    full = os.statvfs(stores.place)
    lying = os.statvfs_result([*full[:4], 1, *full[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: lying)
    with pytest.raises(StorageError, match=r"bytes free .* but has 4096"):
        stores.open()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_kept_steps_stay_while_others_are_written(stores, keep):
    store = stores.open(keep=keep)
    for number in (1, 2, 3, 4):
        step(store, number)
    write_all(store, 5)  # this state is never committed
    store = stores.reopen(keep=keep)
    assert [s.step for s in store.steps] == [4, 3, 2, 1][:keep]
    for record in store.steps:
        assert record.data == f"data of {record.step}"
        store.restore(record.name)
        for subgroup in ELEMENTS:
            assert equal(read(store, subgroup), state(subgroup, record.step))


@pytest.mark.parametrize(
    ("gone", "protected", "left"),
    [((), (), [5, 4]), ((4,), (), [5, 3]), ((), (2,), [5, 2]), ((4, 5), (3, 2), [5, 3]), ((1, 2, 3, 4), (3,), [5, 3])],
)
def test_deleted_checkpoints_go_first_and_protected_ones_last(gone, protected, left):
    steps = [CommittedStep(step=n, name=str(n), extents=[]) for n in (5, 4, 3, 2)]
    found = Retention(2, lambda s: s.step not in gone, lambda s: s.step in protected).of(steps)
    assert [s.step for s in found] == left
    assert Retention(4, lambda _: False, lambda _: False).of(steps) == steps


def test_a_resumed_run_goes_on_and_forgets_what_it_passed_over(stores):
    store = stores.open(keep=2)
    for number in (1, 2):
        step(store, number)
    store = stores.reopen(keep=2)
    oldest = store.steps[-1].name
    assert store.restore(oldest).step == 1
    write_all(store, 1)  # the state of step 2 again
    store.restore(oldest)
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))
    step(store, 2)
    assert [s.step for s in store.steps] == [2, 1]
    store = stores.reopen(keep=2)
    assert [s.step for s in store.steps] == [2, 1]
    with pytest.raises(StorageError, match=r"one of \[2, 1\], which"):
        store.restore("another")


def test_an_announced_version_is_not_recycled_until_its_commit(stores):
    store = stores.open()
    step(store, 1)
    assert begun(store) == 2
    write_all(store, 2)
    late = threading.Thread(target=write_all, args=(store, 3))
    late.start()
    late.join(0.2)
    assert late.is_alive()  # one extent belongs to step 1, and the other one to version 2
    assert equal(read(store, 0), state(0, 2))
    commit(store, 2, 2)
    late.join(20)
    assert not late.is_alive()
    store = stores.reopen()
    store.restore()
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 2))


def test_a_commit_waits_for_its_versions_writes(stores):
    store = stores.open()
    assert begun(store) == 1
    done = threading.Event()
    late = threading.Thread(target=lambda: (commit(store, 1, 1), done.set()))
    late.start()
    for subgroup in (0, 1):
        store.write(subgroup, state(subgroup, 1), 1)
    assert not done.wait(0.1)
    store.write(2, state(2, 1), 1)
    late.join(20)
    assert done.is_set()


def test_what_is_never_written_fails_the_commit_in_time(stores):
    store = stores.open()
    store._progress._deadline_s = 0.2  # the store's limit, not the drive's
    assert begun(store) == 1
    store.write(0, state(0, 1), 1)
    with pytest.raises(StorageError, match=r"version 1 must .* 0.2 s, but .*\[1, 2\]"):
        commit(store, 1, 1)


def test_a_commit_that_never_comes_fails_the_write_in_time(stores):
    store = stores.open()
    store._progress._deadline_s = 0.2  # the store's limit, not the drive's
    step(store, 1)
    assert begun(store) == 2
    write_all(store, 2)
    with pytest.raises(StorageError, match=r"free space within 0.2 s, but versions \[2\]"):
        write_all(store, 3)
    store.abandon(2)
    write_all(store, 3)
    with pytest.raises(StorageError, match="must be announced"):
        commit(store, 3, 3)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_view_shows_what_was_written_last_where_it_is(stores, weights):
    store = stores.open(weights)
    view = store.adopt(0, state(0, 0))
    address = view[1].data_ptr()
    assert equal(view, state(0, 0))
    for version in (1, 2, 3):
        store.write(0, aligned(state(0, version)), version)
        assert equal(view, state(0, version))
    assert store.view(0)[1].data_ptr() == address


def test_what_is_written_to_a_view_reaches_no_extent_but_by_a_write(stores):
    store = stores.open(keep=1)
    step(store, 1)
    view = store.view(0)
    view[0].copy_(state(0, 9)[0])
    assert equal(read(store, 0), state(0, 1))
    store.write(0, view, 2)
    assert torch.equal(read(store, 0)[0], state(0, 9)[0])
    assert torch.equal(view[0], state(0, 9)[0])
    view[0].copy_(state(0, 8)[0])  # the live extent is overwritten with a view of itself
    store.write(0, view, 3)
    assert torch.equal(read(store, 0)[0], state(0, 8)[0])
    store.restore()
    assert equal(view, state(0, 1))
    assert equal(read(store, 0), state(0, 1))


def test_tensors_of_other_sizes_are_refused(stores):
    store = stores.open()
    with pytest.raises(StorageError, match="subgroup 1 must have"):
        store.write(1, state(0, 1))
    with pytest.raises(StorageError, match="must have been written"):
        store.read(0, empty(0))


def test_a_flipped_bit_is_found_at_the_first_read_and_the_step_before_is_there(stores):
    store = stores.open(keep=2)
    step(store, 1)
    step(store, 2)
    second = state(0, 2)[1].numpy().tobytes()
    stores.close()
    path = stores.drives()[0].directory / "rank_00000.extents"
    content = bytearray(path.read_bytes())
    content[content.index(second) + 4_321] ^= 1
    path.write_bytes(content)
    store = stores.open(keep=2)
    store.restore()
    with pytest.raises(DamagedError, match=r"subgroup 0 .* is damaged: its hash"):
        read(store, 0)
    store.restore(store.steps[-1].name)
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))
    step(store, 2)
    assert equal(read(store, 0), state(0, 2))


def test_every_read_is_checked_where_it_is_asked_for(stores):
    store = stores.open(verify_reads=True)
    write_all(store, 1)
    with (stores.drives()[0].directory / "rank_00000.extents").open("r+b") as file:
        content = file.read()
        file.seek(content.index(state(1, 1)[2].numpy().tobytes()))
        file.write(b"\1\2\3\4")
    with pytest.raises(DamagedError, match="subgroup 1"):
        read(store, 1)
    assert equal(read(store, 0), state(0, 1))


class Paused(Files):
    """File operations of a store that stop the first commit before it writes its manifest, until a test releases it."""

    def __init__(self):
        self.there, self.go, self.synced = threading.Event(), threading.Event(), 0

    def point(self, name):
        self.synced += name == "extents_synced"
        if name == "extents_synced" and self.synced == 1:
            self.there.set()
            self.go.wait(20)


def test_commits_come_one_after_the_other(stores):
    # Commits run one after the other, since an older manifest written last would undo the newer step.
    files = Paused()
    store, threads = stores.open((1.0,), keep=2, files=files), []
    for number in (1, 2):
        assert begun(store) == number
        write_all(store, number)
        threads.append(threading.Thread(target=commit, args=(store, number, number)))
        threads[-1].start()
        assert files.there.wait(20)
    threads[1].join(0.3)  # time in which the other thread could overtake
    files.go.set()
    for thread in threads:
        thread.join(20)
    assert [record.step for record in store.steps] == [2, 1]
    store.close()
    assert [record.step for record in stores.open((1.0,), keep=2).steps] == [2, 1]


def test_progress_begins_a_deadline_again(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(waiting, "time", clock)
    progress, telling = DriveProgress(deadline_s=0.02), Telling("a write", deadline_s=0.02)
    with progress.condition:
        for _ in range(3):
            clock.now_s += 0.015
            progress.wait(telling, "a write must end", "it did not")
            progress.made()
        clock.now_s += 0.03
        with pytest.raises(StorageError, match=r"a write must end within 0.02 s, but it did not"):
            progress.wait(telling, "a write must end", "it did not")
