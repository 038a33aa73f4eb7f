"""Tests of the ledger of a store for optimizer state. The ledger records which extent (byte range of a file)
holds which version of each subgroup's state.

No write may take an extent that is needed by a committed step, or by a version that is yet to be committed.
The tests use neither threads nor files.
"""

import random

import pytest
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.pages import CommittedStep
from ebbtide.runtime.storage.versions import Versions

SUBGROUPS = range(3)


def hashes(subgroup, version):
    return [f"{subgroup:016x}{version:016x}"]


def write(ledger, subgroup, version=None):
    """Choose a free extent (byte range of a file) for a subgroup's state, and record in a ledger that the state was
    written there. Return the state's version number, or None if no extent was free.
    """
    number, extent = ledger.begin(version), ledger.take_extent(subgroup)
    if extent is None:
        return None
    ledger.end_write(subgroup, extent, number, hashes(subgroup, number), unchecked=False)
    return number


def committed(ledger, version, keep):
    """Commit a version of the optimizer state in a ledger as the state of a step. Keep only the newest steps."""
    record = CommittedStep(step=version, name=str(version), extents=ledger.extents_of(version))
    ledger.steps = [record, *ledger.steps][:keep]
    ledger.announced.pop(version)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_no_write_takes_a_place_that_is_still_needed(keep):
    # Each write records hashes that are different for each subgroup and version. The extents of a version must have the
    # version's hashes when it is committed, and as long as the ledger keeps the version (it keeps the last ``keep``
    # ones).
    chance, full = random.Random(keep), 0
    ledger = Versions(SUBGROUPS, keep + 1, [], [])
    for subgroup in SUBGROUPS:
        write(ledger, subgroup, 0)
    for _ in range(300):
        if not ledger.announced and chance.random() < 0.6:
            ledger.tick()
            ledger.announce(())
        now = next(iter(ledger.announced), None)
        for subgroup in chance.sample(SUBGROUPS, 2):
            begun = now is not None and subgroup in ledger.missing(now)
            full += write(ledger, subgroup, now if begun else None) is None
        if now is not None and not ledger.missing(now):
            found = {one.subgroup: one.hashes for one in ledger.extents_of(now)}
            assert found == {s: hashes(s, now) for s in SUBGROUPS}
            committed(ledger, now, keep)
        for record in ledger.steps:
            assert all(
                ledger.subgroups[one.subgroup].hashes[one.extent] == one.hashes == hashes(one.subgroup, record.step)
                for one in record.extents
            )
    assert len(ledger.steps) == keep
    assert full


def test_the_state_of_an_announced_version_is_the_newest_up_to_it():
    ledger = Versions(SUBGROUPS, 2, [], [])
    for subgroup in SUBGROUPS:
        write(ledger, subgroup, 0)
    version = ledger.announce([0, 2])
    assert ledger.missing(version) == []
    assert write(ledger, 0) == 1  # only of that subgroup, after the announced version
    assert write(ledger, 0) is None or ledger.subgroups[0].versions.count(0) == 1
    assert [one.hashes for one in ledger.extents_of(version)] == [hashes(0, 0), hashes(2, 0)]
    with pytest.raises(StorageError, match="must be announced"):
        ledger.missing(7)


def test_a_restored_step_passes_over_newer_ones():
    ledger = Versions(SUBGROUPS, 3, [], [5])
    for _ in range(2):
        ledger.tick()
        version = ledger.announce(())
        for subgroup in SUBGROUPS:
            write(ledger, subgroup, version)
        committed(ledger, version, 2)
    ledger.restore(ledger.steps[1])
    assert [step.name for step in ledger.not_passed_over()] == ["1"]
    assert ledger.adopted == set(SUBGROUPS)
    assert ledger.unclaimed == []
    assert all(held.unchecked and held.hashes[held.live] == hashes(s, 1) for s, held in ledger.subgroups.items())
    assert ledger.missing(ledger.announce(())) == [], "a save right after the load must not wait for an update"
