"""Fixtures and helpers for small stores of optimizer state with three subgroups of uneven sizes."""

import uuid

import pytest
import torch
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.view import page_aligned

ELEMENTS = {0: 5_000, 1: 1_024, 2: 3}
SIZES = {subgroup: (4 * elements,) * 3 for subgroup, elements in ELEMENTS.items()}
BLOCK = 4096


def state(subgroup, version):
    """Return three random tensors as the state of a subgroup. The subgroup and ``version``, a number that the test
    chooses, set the random seed, so that each version has other values.
    """
    generator = torch.Generator().manual_seed(1_000 * version + subgroup)
    return tuple(torch.randn(ELEMENTS[subgroup], generator=generator) for _ in range(3))


def aligned(tensors):
    return tuple(page_aligned(t.numel()).copy_(t) for t in tensors)


def empty(subgroup):
    return tuple(torch.full((ELEMENTS[subgroup],), torch.nan) for _ in range(3))


def read(store, subgroup):
    into = empty(subgroup)
    store.read(subgroup, into)
    return into


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def write_all(store, version, number=None):
    """Write the optimizer state of every subgroup to a store on a drive, as a given version."""
    for subgroup in ELEMENTS:
        store.write(subgroup, state(subgroup, version if number is None else number), version)


def begun(store):
    """Begin the next version of the optimizer state in a store, and protect it until its commit. Return its number."""
    store.tick()
    return store.announce()


def step(store, number):
    """Write the optimizer state of all subgroups to a store on a drive as one step, and commit the step under
    the given number.
    """
    version = begun(store)
    write_all(store, version, number)
    commit(store, version, number, f"data of {number}")


def commit(store, version, number, data=""):
    """Commit one version of the optimizer state in a store, as the step ``number``."""
    # The version (the state of all subgroups) must have been announced, which protects it from being overwritten until
    # the commit.
    name = uuid.uuid4().hex
    store.prepare(version, number, name, data)
    store.settle(name, committed=True)


class Stores:
    """A helper that opens stores of optimizer state in one folder and closes all of them at the end of the test."""

    def __init__(self, place):
        self.place, self.opened = place, []

    def drives(self, weights=(1.0,)):
        return [Drive(self.place / f"drive{n}", w) for n, w in enumerate(weights)]

    def open(self, weights=(1.0,), sizes=SIZES, **options):
        options = {"depth": 2, "block_bytes": BLOCK, "deadline_s": 20.0} | options
        store = ExtentStore(self.drives(weights), sizes, **options)
        self.opened.append(store)
        return store

    def reopen(self, *args, **options):
        self.close()
        return self.open(*args, **options)

    def close(self):
        for store in self.opened:
            store.close()
        self.opened = []


@pytest.fixture
def stores(tmp_path):
    made = Stores(tmp_path)
    yield made
    made.close()
