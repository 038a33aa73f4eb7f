"""Tests of the values that the config key ``ebbtide`` may have, and of the errors for other values."""

import pytest
from ebbtide.runtime.frontdoor.request import RequestError, read_request
from ebbtide.simulator.plan import CheckpointPlan, Plan, PlanError

PLAN = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 2), staging_slots=0)


def test_a_plan_by_file_fields_and_name(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert read_request({"plan": str(tmp_path / "plan.json")}).plan == PLAN
    assert read_request({"plan": "plan.json"}, base=tmp_path).plan == PLAN
    assert read_request({"plan": PLAN.model_dump(mode="json")}).plan == PLAN
    assert read_request({"plan": "auto"}).plan == "auto"


def test_checkpoints_beside_a_plan_or_alone():
    both = read_request({"plan": "auto", "checkpoint": {"keep": 2}})
    assert both.checkpoint == CheckpointPlan(keep=2)
    alone = read_request({"checkpoint": {}, "device": "emulated"})
    assert (alone.plan, alone.checkpoint, alone.device) == (None, CheckpointPlan(), "emulated")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("auto", r"""must be an object such as .*but got 'auto'"""),
        ({"paln": "auto"}, r"plan, checkpoint and device, but got 'paln' \(did you mean 'plan'\?\)"),
        ({"plan": "auto", 1: 2}, "may have the keys plan, checkpoint and device, but got '1'"),
        ({"plan": "Atuomatic"}, r"\(did you mean 'automatic'\?\)"),
        ({}, 'must have "plan", "checkpoint" or both'),
        ({"plan": 3}, '"ebbtide.plan" .* must be "automatic", the path of a plan or its fields, but got 3'),
        ({"plan": "nowhere.json"}, '"ebbtide.plan" .*readable JSON file, but got nowhere.json'),
        ({"plan": {"subgroup_size": 0}}, '"ebbtide.plan" .*subgroup_size'),
        ({"checkpoint": {"kep": 1}}, '"ebbtide.checkpoint" .*kep'),
        ({"checkpoint": {"interval_steps": 2}}, '"ebbtide.checkpoint" .* interval_steps 2, but no "dir".*: add "dir"'),
        ({"plan": "auto", "checkpoint": {"interval_steps": 2, "dir": ""}}, 'but no "dir"'),
        ({"checkpoint": "here"}, "\"ebbtide.checkpoint\" in DeepSpeed's config must be an object, but got 'here'"),
        ({"plan": ""}, """must be "automatic", the path of a plan or its fields, but got ''"""),
        ({"plan": "auto", "device": "tpu"}, '"ebbtide.device" .* one of auto, emulated, but got'),
    ],
)
def test_what_is_wrong_is_named(value, message):
    with pytest.raises(RequestError, match=message) as raised:
        read_request(value)
    assert isinstance(raised.value, PlanError)
