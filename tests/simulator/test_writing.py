"""Tests of the order in which the simulator writes a checkpoint's bytes: cases worked out by hand, and
rules that hold for any order.
"""

import pytest
from ebbtide.simulator.schedules.write_order import REST, Due, Pace, Segment, order_writing
from hypothesis import given, settings
from hypothesis import strategies as st

PACE = Pace(write_bytes_per_s=1.0, urgent_bytes_per_s=2.0, copy_bytes_per_s=10.0)
AT_15 = [Due(0, 15.0), Due(1, 15.0), Due(2, 15.0)]


def test_an_update_waits_for_what_is_not_on_disk_and_nobody_copies():
    found = order_writing([10, 10, 10], AT_15, PACE, budget_bytes=0)
    assert found.segments == (
        Segment(0, "live", 10, 0, 10),
        Segment(1, "live", 5, 10, 15),
        Segment(1, "urgent", 5, 15, 17.5),  # twice as fast, because the cap does not apply
        Segment(2, "urgent", 10, 17.5, 22.5),
    )
    assert not found.copied


def test_copies_take_the_budget_and_are_written_when_nobody_waits():
    found = order_writing([10, 10, 10], AT_15, PACE, budget_bytes=5, rest_bytes=3)
    parts = [(s.subgroup, s.part, pytest.approx(s.size_bytes)) for s in found.segments]
    assert parts == [
        (0, "live", 10),
        (1, "live", 5),
        (2, "live", 0.5),  # while 5 bytes of subgroup 1 are copied
        (2, "urgent", 9.5),
        (1, "copied", 5),
        (REST, "live", 3),
    ]
    assert found.copied == {1: 5}


def test_a_written_copy_gives_its_room_to_the_next():
    due = [Due(0, 0.0), Due(1, 6.0)]
    found = order_writing([5, 5], due, Pace(1.0, 1.0, 1e9), budget_bytes=5)
    assert found.copied == {0: 5, 1: pytest.approx(4)}  # 5 s for subgroup 0, then 1 of subgroup 1
    assert found.bytes_of("urgent") == 0


def test_one_queue_does_not_hold_the_other_up():
    due = [Due(0, 0.0, "host"), Due(1, 5.0, "device")]
    found = order_writing([100, 10], due, Pace(1.0, 1.0, 10.0), budget_bytes=110)
    assert found.copied == {0: 100, 1: pytest.approx(5)}  # written from 0 to 5, while subgroup 0 was copied


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.floats(1, 1e9), min_size=1, max_size=12),
    waits=st.lists(st.tuples(st.floats(0, 10), st.sampled_from(["host", "device"])), min_size=12, max_size=12),
    rate=st.floats(1e6, 1e10),
    hurry=st.floats(1, 4),
    copy=st.floats(1e7, 1e11),
    budget=st.floats(0, 2e9),
    rest=st.floats(0, 1e9),
)
def test_every_byte_is_written_once_and_the_budget_holds(sizes, waits, rate, hurry, copy, budget, rest):
    due = [Due(i, at, queue) for i, (at, queue) in enumerate(waits[: len(sizes)])]
    found = order_writing(sizes, due, Pace(rate, rate * hurry, copy), budget, rest)
    for subgroup, size in [*enumerate(sizes), (REST, rest)]:
        written = sum(s.size_bytes for s in found.segments if s.subgroup == subgroup)
        assert written == pytest.approx(size, rel=1e-6, abs=1e-3)
        copied = sum(s.size_bytes for s in found.segments if s.subgroup == subgroup and s.part == "copied")
        assert copied == pytest.approx(found.copied.get(subgroup, 0.0), rel=1e-6, abs=1e-3)
    ends = [s.end_s for s in found.segments]
    assert ends == sorted(ends)
    if not budget:
        assert not found.copied
