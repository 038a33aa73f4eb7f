"""Slots are taken as they are given back, by whoever comes; who comes is the step's own affair."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.subgroup_state import StagingSlot
from ebbtide.runtime.execution.visits import Growing, Visits


def visits(slots=2, order=(0, 1, 2, 3), guessed=(3, 2), prefetch=1, **growing):
    own = [StagingSlot(()) for _ in range(slots)]
    return Visits(own, order, guessed, prefetch, Growing(**growing) if growing else None)


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


def grown(short_of=99, slots=0):
    """With slots that grow behind subgroups 3, 1 and 1; memory is short of the last so many."""
    made = []

    def make():
        if len(made) >= short_of:
            raise torch.OutOfMemoryError
        made.append(StagingSlot(()))
        return made[-1]

    return visits(slots, wanted=Counter([3, 1, 1]), make=make, prefetch=4), made


def stepped(some, device):
    """A step in which all visit, and each goes home."""
    some.begin(guesses=False)
    for subgroup in (3, 2, 1, 0):
        some.grow(subgroup, device)
        some.grow(subgroup, device)  # another gradient for the same window
    some.end()
    some.grow_all(device)
    return [come(some, subgroup) and leave(some, subgroup) for subgroup in (0, 1, 2, 3)]


def left(some, subgroup):
    return [slot.free for slot in some.make_room(subgroup)]


def test_slots_grow_behind_their_subgroups_and_go_before_the_next_forward_reads_these():
    (some, made), device = grown(), Device()
    some.begin(guesses=True)
    assert some.next() is None
    some.grow(2, device)
    assert some.next() is None
    some.grow(3, device)
    assert (some.next(), len(made)) == (3, 1)
    some.grow(1, device)
    assert len(made) == 3
    some.begin(guesses=True)
    assert some.make_room(1) == [], "somebody reads it in backward"
    some.end()
    home = [come(some, s) and leave(some, s) for s in (0, 1, 2, 3)]
    assert some.make_room(0) == []
    assert left(some, 1) == home[1:3], "the last three leave three free slots: the first two"
    assert some.make_room(1) == [], "somebody reads it again"
    assert left(some, 3) == home[3:]


def test_a_slot_that_is_in_use_stays_and_none_grows_in_its_place():
    (some, made), device = grown(), Device()
    some.begin(guesses=True)
    some.grow(3, device)
    some.grow(1, device)
    some.end()
    come(some, 0)
    come(some, 1)
    assert (len(made), len(left(some, 1))) == (3, 1), "two grew behind it, one slot is free"
    some.begin(guesses=True)
    some.grow(1, device)
    assert len(made) == 4


def test_each_step_takes_as_many_as_the_last_one():
    (some, made), device = grown(), Device()
    for number in range(1, 4):
        home = stepped(some, device)
        assert len(made) == 3 * number
        assert left(some, 1) + left(some, 3) == home[1:]


@pytest.mark.parametrize("there", [1, 2])
def test_out_of_memory_training_goes_on_with_fewer_and_says_so_once(there, caplog):
    (some, made), device = grown(short_of=there), Device()
    for number in range(3):
        made.clear()
        stepped(some, device)
        assert len(made) == there
        assert len(some.make_room(1)) == there - 1
        assert len(some.make_room(3)) == 1
        del number
    (said,) = caplog.messages
    assert "plan.growing_slots" in said
    assert f"memory for {there - 1} of the plan's 2 " in said


def test_without_memory_for_any_slot_the_step_says_what_to_do():
    some, _ = grown(short_of=0)
    with pytest.raises(torch.OutOfMemoryError, match=r"plan\.growing_slots.*--gpu-memory"):
        stepped(some, Device())
