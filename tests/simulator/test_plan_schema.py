"""Plan files of older versions are read for ever, and what is ignored of them is said."""

import warnings

import pytest
from ebbtide.simulator import Plan, PlanError
from ebbtide.simulator.schedules.ebbtide import build_schedule

from tests.simulator.test_guessing import workload

OLD = {"subgroup_size": 64, "placement": [{"placement": "device", "count": 4}]}


def read(**fields):
    return Plan.from_fields({**OLD, **fields})


@pytest.mark.parametrize(("slots", "prefetch"), [(0, 2), (1, 3), (2, 1)])
def test_slots_that_grew_are_left_out_and_a_note_says_so(slots, prefetch):
    with pytest.warns(UserWarning, match=r"plan\.growing_slots: ignored.*Run `tune plan` again"):
        plan = read(schema_version=2, staging_slots=slots, growing_slots=[3, 2], prefetch=prefetch)
    assert plan == read(staging_slots=max(1, slots), prefetch=min(prefetch, max(1, slots)))
    assert build_schedule(workload(), plan).ops


def test_early_updates_of_stored_state_are_left_out():
    stored = {"placement": [{"placement": "stored", "count": 4}], "host_slots": 2}
    with pytest.warns(UserWarning, match=r"plan\.speculate_stored: ignored"):
        plan = read(schema_version=2, speculate_stored=2, **stored)
    assert plan == read(**stored)


def test_what_asked_for_nothing_is_read_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(schema_version=2, growing_slots=[], speculate_stored=0) == read()
        assert read(schema_version=1, prefetch_after_layer=3, split_master=False) == read()
        assert Plan.from_fields(read().model_dump()) == read()


def test_a_plan_that_no_runtime_ever_ran_is_refused():
    with pytest.raises(PlanError, match=r"split_master must be false.*plan again"):
        read(schema_version=1, split_master=True)
