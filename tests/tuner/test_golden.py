"""The recorded plans take the recorded time, memory and bound; some are planned again."""

import pytest

from simulator.analysis.bound import bound
from simulator.engines.compiled import simulate_fast
from simulator.schedules.strategies import build_strategy
from tests.tuner.golden import CASES, case, planned, recorded
from tuner.memory import Limits

ROWS = recorded()
PLANNED_AGAIN = (0, 17, 34)


def test_the_record_is_whole():
    assert len(ROWS) == CASES


@pytest.mark.parametrize("number", range(CASES))
def test_a_recorded_plan_takes_what_was_recorded(number):
    row = ROWS[number]
    workload, machine = case(number)
    schedule = build_strategy("ebbtide", workload, plan=row.plan(workload))
    found = simulate_fast(schedule, machine)
    assert found.iteration_s == pytest.approx(row.iteration_s, rel=1e-9)
    assert (found.device_peak_bytes, found.host_peak_bytes) == (row.device_bytes, row.host_bytes)
    limit = Limits.of(workload, machine).device_bytes
    assert bound(workload, machine, limit).iteration_s == pytest.approx(row.bound_s, rel=1e-9)


@pytest.mark.parametrize("number", PLANNED_AGAIN)
def test_planning_again_is_no_slower(number):
    assert planned(number).iteration_s <= ROWS[number].iteration_s * (1 + 1e-6)
