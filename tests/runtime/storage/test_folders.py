"""Tests of directories with stored optimizer state that are moved, mixed up, shared, cut or made by another run."""

import pytest
import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.storage.errors import StorageError

from tests.runtime.storage.conftest import ELEMENTS, SIZES, commit, equal, read, state, step

TWO = (1.0, 1.0)


def test_two_runs_in_one_directory_are_refused(stores):
    store = stores.open()
    with pytest.raises(StorageError, match=r"one run at a time, .*\"pid\""):
        stores.open()
    step(store, 1)
    assert stores.reopen().steps


def test_ranks_share_a_directory(stores):
    one, other = stores.open(rank=0, world_size=2), stores.open(rank=1, world_size=2)
    step(one, 1)
    step(other, 1)
    assert equal(read(one, 0), read(other, 0))


def test_directories_may_move(stores):
    step(stores.open(TWO), 1)
    stores.close()
    stores.place = stores.place.rename(stores.place.with_name("elsewhere"))
    store = stores.open(TWO)
    store.restore()
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"world_size": 2}, "world_size = 1 and this run wants 2"),
        ({"keep": 2}, "state of 1 checkpoints, but checkpoint.keep asks for 2"),
        ({"weights": (2.0, 1.0)}, "weights"),
        ({"sizes": SIZES | {2: (4, 4, 4)}}, "sizes"),
        ({"rank": 1, "world_size": 2}, "world_size = 1 and this run wants 2"),
    ],
)
def test_another_layout_or_world_size_is_refused_and_nothing_lost(stores, options, what):
    step(stores.open(TWO), 1)
    stores.close()
    with pytest.raises(StorageError, match=what):
        stores.open(**({"weights": TWO} | options))
    store = stores.open(TWO)
    store.restore()
    assert equal(read(store, 0), state(0, 1))


def test_a_store_grows_behind_what_it_holds(stores):
    # If the store is then opened for the old subgroups only, their state must be unchanged, and the state of an added
    # subgroup can still be read.
    more = {7: (4_000, 8), 8: (12,)}
    step(stores.open(TWO), 1)
    store = stores.reopen(TWO, SIZES | {7: more[7]})
    store.restore()
    store.write(7, (torch.ones(1_000), torch.zeros(2)))
    store.grow(more)
    store.write(8, (torch.full((3,), 5.0),))
    commit(store, store.announce(), 2)
    store = stores.reopen(TWO)
    store.restore()
    for subgroup in ELEMENTS:
        assert equal(read(store, subgroup), state(subgroup, 1))
    into = (torch.empty(1_000), torch.empty(2))
    store.read(7, into)
    assert equal(into, (torch.ones(1_000), torch.zeros(2)))


def test_a_store_that_cannot_grow_is_as_it_was(stores, monkeypatch):
    store = stores.open(TWO)
    step(store, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    for call in ("allocate", "write_durably"):
        with monkeypatch.context() as without_room:
            without_room.setattr(Files, call, full)
            with pytest.raises(StorageError, match="No space left"):
                store.grow({7: (4_000,)})
        step(store, store.steps[0].step + 1)
    last = store.steps[0].step
    store = stores.reopen(TWO)
    store.restore()
    assert equal(read(store, 0), state(0, last))


def test_without_a_step_there_is_nothing_to_lose(stores):
    stores.open(TWO)
    stores.close()
    stores.open((1.0, 2.0), keep=2)


def test_directories_in_another_order_are_refused(stores):
    step(stores.open(TWO), 1)
    stores.close()
    one, other = (drive.directory for drive in stores.drives(TWO))
    one.rename(stores.place / "aside")
    other.rename(one)
    (stores.place / "aside").rename(other)
    with pytest.raises(StorageError, match=r"the order .* was number 2, .* was number 1\."):
        stores.open(TWO)


def test_an_empty_directory_in_place_of_the_first_is_refused(stores):
    step(stores.open(TWO), 1)
    stores.close()
    first = stores.drives()[0].directory
    first.rename(stores.place / "aside")
    with pytest.raises(StorageError, match=r"the order .* is empty, .* was number 2\."):
        stores.open(TWO)


@pytest.mark.parametrize("kind", ["extents", "store.json", "steps.json"])
def test_a_file_cut_short_is_told(stores, kind):
    step(stores.open(), 1)
    stores.close()
    path = stores.drives()[0].directory / f"rank_00000.{kind}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match=rf"rank_00000\.{kind}"):
        stores.open()
