"""Tests of the critical path of a simulated timeline: worked out by hand for five ops, and without gaps
over whole iterations.
"""

from itertools import pairwise

import pytest
from ebbtide.simulator import build_strategy
from ebbtide.simulator.engines.reference import simulate
from ebbtide.simulator.schedule import Lane, OpKind, Schedule, ScheduleBuilder
from ebbtide.simulator.timeline import critical_path
from ebbtide.tuner.answer.timeline_view import GROUPS, view

from tests.machines import machine, workload


def test_every_op_that_takes_time_is_drawn():
    assert set(OpKind) - set(GROUPS) == {OpKind.STEP_END}


def test_it_goes_back_along_what_ended_last():
    made = ScheduleBuilder()
    first = made.add(OpKind.FORWARD, Lane.COMPUTE, 1.0)
    copy = made.add(OpKind.STATE_H2D, Lane.H2D, 0.5)  # ends before the update begins
    update = made.add(OpKind.UPDATE_HOST, Lane.HOST, 3.0, after=[first, copy])
    made.add(OpKind.NORM, Lane.DEVICE_UPDATE, 1.0, after=[copy])
    made.add(OpKind.BACKWARD, Lane.COMPUTE, 2.0, after=[update])
    schedule = Schedule(tuple(made.ops))
    timeline = simulate(schedule, machine())
    path = critical_path(schedule, timeline, 0.0, timeline.makespan_s)
    assert [s.kind for s in path] == [OpKind.FORWARD, OpKind.UPDATE_HOST, OpKind.BACKWARD]
    assert [(s.start_s, s.end_s) for s in path] == [(0, 1), (1, 4), (4, 6)]
    assert critical_path(schedule, timeline, 0.0, 17.0) == ()


@pytest.mark.parametrize("name", ["zero3_offload", "deep_optimizer_states", "no_offload"])
def test_of_an_iteration_it_leaves_no_second_out(name):
    schedule = build_strategy(name, workload())
    shown = view(simulate(schedule, machine()), schedule)
    path = shown["critical"]
    assert path[0][0] == 0
    assert path[-1][1] == pytest.approx(shown["duration_s"])
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(path))
    for lane in shown["lanes"]:
        busy_s = sum(end - start for start, end, *_ in lane["spans"])
        assert lane["idle"] == pytest.approx(1 - busy_s / shown["duration_s"], abs=1e-3)
