"""Tests of the simulator's max-min fair sharing of bandwidth between ops: cases worked out by hand, and
its defining property on random ones.
"""

import pytest
from ebbtide.simulator.engines.reference import max_min_speeds
from hypothesis import given
from hypothesis import strategies as st


def test_alone_an_op_runs_at_full_speed():
    assert max_min_speeds([{"link": 3.0}], {"link": 5.0}) == [1.0]


def test_two_that_want_more_than_there_is_share_equally():
    assert max_min_speeds([{"link": 4.0}, {"link": 4.0}], {"link": 4.0}) == [0.5, 0.5]


def test_equal_speeds_not_equal_amounts():
    # Both slow down by the same factor: 2x + 6x = 4 gives x = 1/2.
    assert max_min_speeds([{"dram": 2.0}, {"dram": 6.0}], {"dram": 4.0}) == [0.5, 0.5]


def test_who_is_held_up_elsewhere_leaves_the_rest_to_the_others():
    speeds = max_min_speeds([{"h2d": 4.0, "link": 4.0}, {"d2h": 4.0, "link": 4.0}], {"h2d": 1.0, "d2h": 9.0, "link": 6})
    assert speeds == [pytest.approx(0.25), 1.0]
    speeds = max_min_speeds([{"h2d": 4.0, "link": 4.0}, {"d2h": 4.0, "link": 4.0}], {"h2d": 1.0, "d2h": 9.0, "link": 4})
    assert speeds == [pytest.approx(0.25), pytest.approx(0.75)]


def test_what_nobody_limits_is_unlimited():
    assert max_min_speeds([{"rumour": 1e9}], {"link": 1.0}) == [1.0]
    assert max_min_speeds([], {"link": 1.0}) == []


demand = st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 10), max_size=3)


@given(
    demands=st.lists(demand, min_size=1, max_size=6),
    capacities=st.fixed_dictionaries({name: st.floats(0.01, 20) for name in "abc"}),
)
def test_no_capacity_is_exceeded_and_nobody_could_go_faster_for_free(demands, capacities):
    speeds = max_min_speeds(demands, capacities)
    used = {name: sum(s * d.get(name, 0.0) for s, d in zip(speeds, demands, strict=True)) for name in capacities}
    assert all(0 <= s <= 1 + 1e-9 for s in speeds)
    assert all(used[name] <= capacities[name] * (1 + 1e-9) for name in capacities)
    for speed, wants in zip(speeds, demands, strict=True):
        if speed < 1 - 1e-9:  # max-min: an op is slowed down only by a full capacity on which no other op is faster
            full = [n for n in wants if used[n] >= capacities[n] * (1 - 1e-6)]
            assert any(
                all(speed >= other - 1e-6 for other, d in zip(speeds, demands, strict=True) if name in d)
                for name in full
            )
