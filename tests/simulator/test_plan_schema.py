"""Tests that plan files of older schemas can still be read, and that ignored fields cause a warning."""

import json
import warnings

import pytest
from ebbtide.simulator import Plan, PlanError, Way
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.way import of_codes, ways

from tests.simulator.recorded_schedules import CASES, PATH, case, digest
from tests.simulator.test_pausing import workload

OLD = {"subgroup_size": 64, "placement": [{"placement": "device", "count": 4}]}


def read(**fields):
    return Plan.from_fields({**OLD, **fields})


@pytest.mark.parametrize(("slots", "prefetch"), [(0, 2), (1, 3), (2, 1)])
def test_slots_that_grew_are_left_out_and_a_note_says_so(slots, prefetch):
    with pytest.warns(
        UserWarning, match=r"plan file sets plan\.growing_slots, which .* ignores.*Run `tune plan` again"
    ):
        plan = read(schema_version=2, staging_slots=slots, growing_slots=[3, 2], prefetch=prefetch)
    assert plan == read(staging_slots=max(1, slots), prefetch=min(prefetch, max(1, slots)))
    assert build_schedule(workload(), plan).ops


def test_early_updates_of_stored_state_are_left_out():
    stored = {"placement": [{"placement": "stored", "count": 4}], "host_slots": 2}
    with pytest.warns(UserWarning, match=r"sets plan\.speculate_stored, which .* ignores"):
        plan = read(schema_version=2, speculate_stored=2, **stored)
    assert plan == read(**stored)


def test_what_asked_for_nothing_is_read_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(schema_version=2, growing_slots=[], speculate_stored=0) == read()
        assert read(schema_version=1, prefetch_after_layer=3, split_master=False) == read()
        assert Plan.from_fields(read().model_dump()) == read()


def test_a_plan_that_no_runtime_ever_ran_is_refused():
    with pytest.raises(PlanError, match=r"split_master must be false.*Plan again"):
        read(schema_version=1, split_master=True)


def test_plans_of_schema_2_give_the_schedules_that_they_gave_then():
    recorded = json.loads(PATH.read_text())
    assert len(set(recorded)) == CASES
    assert [digest(number) for number in range(CASES)] == recorded


def test_a_plan_is_read_as_it_was_written():
    for number in range(CASES):
        plan = Plan.from_fields(case(number)[1])
        again = [Plan.model_validate_json(plan.model_dump_json()), Plan.from_fields(plan.model_dump())]
        assert [one.model_dump() for one in again] == [plan.model_dump()] * 2
        assert [one.ways for one in again] == [plan.ways] * 2
        assert not {"placement", "parameter_home", "speculate", "device_sums"} & set(plan.model_dump())


def test_rows_say_how_neighbours_are_updated_and_leave_out_what_is_usual():
    some = (Way("device"),) * 2 + (Way("host", early=True), Way("host", "host", sum_on_device=True))
    plan = Plan(subgroup_size=64, ways=some, staging_slots=1)
    rows = [
        {"count": 2, "placement": "device"},
        {"count": 1, "placement": "host", "early": True},
        {"count": 1, "placement": "host", "parameters": "host", "sum_on_device": True},
    ]
    assert plan.model_dump()["ways"] == rows
    assert Plan.from_fields({"subgroup_size": 64, "ways": rows, "staging_slots": 1}) == plan


@pytest.mark.parametrize(
    ("bit", "row"),
    [
        ("early", {"placement": "resident"}),
        ("early", {"placement": "stored"}),
        ("early", {"placement": "host", "parameters": "host"}),
        ("sum_on_device", {"placement": "device"}),
        ("sum_on_device", {"placement": "resident"}),
    ],
)
def test_a_bit_that_a_placement_does_not_allow_is_refused(bit, row):
    with pytest.raises(PlanError, match=rf"{bit} must be false for placement '{row['placement']}'.*but got true"):
        Plan.from_fields({"subgroup_size": 64, "ways": [{"count": 1, **row, bit: True}]})


def test_fields_of_schema_2_are_refused_in_schema_3():
    for name in ("placement", "speculate", "device_sums", "parameter_home"):
        with pytest.raises(PlanError, match=rf"{name}: must be a known field"):
            Plan.from_fields(
                {"schema_version": 3, "subgroup_size": 64, "ways": [{"count": 1, "placement": "host"}], name: 1}
            )


@pytest.mark.parametrize("locations", [[], [{"home": "host", "count": 3}]])
def test_counts_that_do_not_fit_are_refused(locations):
    runs = [{"placement": "host", "count": 4}]
    with pytest.raises(PlanError, match=r"must be absent or cover every subgroup once|must be greater than or equal"):
        Plan.from_fields(
            {"subgroup_size": 64, "placement": runs, "parameter_home": locations, "speculate": 1 - 2 * (not locations)}
        )


def test_no_other_field_is_copied_in():
    with pytest.raises(PlanError, match="fields that plans have, but got speculate"):
        read().model_copy(update={"speculate": 2})


def test_codes_are_those_of_their_ways():
    assert of_codes(way.code for way in ways()) == tuple(ways())
