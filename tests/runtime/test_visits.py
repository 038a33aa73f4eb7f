"""Slots are taken as they are given back, by whoever comes; who comes is the step's own affair."""

from types import SimpleNamespace

import pytest
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.subgroup_state import StagingSlot
from ebbtide.runtime.execution.visits import Visits


def visits(slots=2, order=(0, 1, 2, 3), guessed=(3, 2), prefetch=1):
    return Visits([StagingSlot(()) for _ in range(slots)], order, guessed, prefetch)


def come(some, subgroup):
    (wait,) = some.come(SimpleNamespace(index=subgroup, state=(), elements=1))[1]
    return wait


def leave(some, subgroup):
    end = Completion(f"home {subgroup}")
    some.leaves(subgroup, end)
    return end


def test_a_slot_is_free_behind_the_way_home_of_who_was_there():
    some = visits()
    assert come(some, 0).ended
    assert come(some, 1).ended
    first, second = leave(some, 1), leave(some, 0)
    assert come(some, 2) is first
    assert come(some, 3) is second


def test_who_comes_again_waits_for_its_own_way_home_if_that_is_the_later_one():
    """A wrong guess comes twice in a step: its slot may be another one, free for long."""
    some = visits()
    come(some, 0)
    come(some, 1)
    leave(some, 1)
    own = leave(some, 0)
    assert come(some, 0) is own
    other = leave(some, 0)
    assert come(some, 1) is own, "its slot is free behind that; its own way home was before it"
    assert come(some, 2) is other


@pytest.mark.parametrize(("guesses", "coming"), [(True, [3, 2, 0]), (False, [0])])
def test_guesses_come_first_and_what_is_prefetched_behind_them(guesses, coming):
    some, came = visits(slots=1, prefetch=1), []
    assert some.next() is None, "backward has not begun"
    some.begin(guesses=guesses)
    while (subgroup := some.next()) is not None:
        came.append(subgroup)
        come(some, subgroup)
        if subgroup != coming[-1]:
            assert some.next() is None, "there is one slot"
            leave(some, subgroup)
    assert came == coming
    some.end()
    leave(some, coming[-1])
    assert some.next() is None, "the step goes on behind the norm"


def test_who_is_there_since_a_step_that_was_skipped_does_not_come_again():
    some = visits(slots=2)
    come(some, 3)
    some.begin(guesses=True)
    assert some.next() == 2


def test_nor_behind_its_own_way_home():
    """There was no slot for anybody before; a second visit would bring the old state for the next
    step.
    """
    some = visits(slots=1)
    come(some, 3)
    some.begin(guesses=True)
    assert some.next() is None
    leave(some, 3)
    assert some.next() == 2
