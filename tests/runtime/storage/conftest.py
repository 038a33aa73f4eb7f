"""Small stores with three subgroups of uneven sizes."""

import pytest
import torch
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.view import page_aligned

ELEMENTS = {0: 5_000, 1: 1_024, 2: 3}
SIZES = {subgroup: (4 * elements,) * 3 for subgroup, elements in ELEMENTS.items()}
BLOCK = 4096


def state(subgroup, version):
    """Return a subgroup's state tensors, which differ for each version."""
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
    """Write the state of every subgroup under a version. By default it is the state of the same number."""
    for subgroup in ELEMENTS:
        store.write(subgroup, state(subgroup, version if number is None else number), version)


def step(store, number):
    """Update all subgroups once, and commit them under the given number."""
    store.announce(number)
    write_all(store, number)
    store.commit(number, number, f"data of {number}")


class Stores:
    """An opener of stores in one folder, which also closes them."""

    def __init__(self, place):
        self.place, self.opened = place, []

    def drives(self, weights=(1.0,)):
        return [Drive(self.place / f"drive{n}", w) for n, w in enumerate(weights)]

    def open(self, weights=(1.0,), sizes=SIZES, **options):
        options = {"depth": 2, "block_bytes": BLOCK, "deadline_s": 20.0} | options
        store = ExtentStore.open(self.drives(weights), sizes, **options)
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
