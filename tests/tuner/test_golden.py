"""Tests that recorded plans keep their recorded time and memory, fit into memory, and do not beat the lower bound.

Three of the jobs are planned again, and the new plans are no slower. After a change of the simulator that is meant to
change the record, write the record again (`tests.tuner.golden`).
"""

import pytest
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.limits import Limits

from tests.tuner.golden import CASES, case, planned, recorded, simulated

ROWS = recorded()
PLANNED_AGAIN = (0, 14, 26)


def test_the_record_is_whole():
    assert len(ROWS) == CASES


@pytest.mark.parametrize("number", range(CASES))
def test_a_recorded_plan_takes_what_was_recorded(number):
    row, found = ROWS[number], simulated(number, ROWS[number].plan)
    assert found.iteration_s == pytest.approx(row.iteration_s, rel=1e-9)
    assert (found.device_bytes, found.host_bytes) == (row.device_bytes, row.host_bytes)
    workload, machine = case(number)
    limits = Limits.of(workload, machine)
    assert limits.hold(found.device_bytes, found.host_bytes)
    floor_s = lower_bound(workload, machine, limits).iteration_s
    assert floor_s <= found.iteration_s * (1 + 1e-6)


@pytest.mark.parametrize("number", PLANNED_AGAIN)
def test_planning_again_is_no_slower(number):
    assert planned(number).iteration_s <= ROWS[number].iteration_s * (1 + 1e-6)
