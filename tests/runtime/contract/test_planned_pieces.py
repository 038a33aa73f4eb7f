"""Tests of training under plan files that cut DeepSpeed's subgroups into parts.

The plan file names DeepSpeed's subgroup size and the plan's own, and training uses both.
"""

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.runtime.zero.host_memory import needed_bytes
from ebbtide.simulator import Plan, PlanError
from ebbtide.simulator.workload import Layer, Workload

from studies.bench.byte_gpt import ds_config
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.test_bits import two_groups
from tests.runtime.contract.training import DEVICES, SUBGROUP, assert_same, device_of, outcome, plan_for, start

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
LARGE = 40_000
MIX = ["host", "device", "resident"]
EARLY = {"speculate": 99, "speculate_visits": 99}


def known(engine):
    """Return the workload of an engine as `tune profile` records it, with DeepSpeed's own subgroups."""
    places, key = engine.optimizer.grad_position, engine.optimizer.get_param_id
    whole = [[places[key(p)][2] for p in group] for group in engine.optimizer.fp16_groups]
    of, groups = engine.optimizer.sub_group_to_group_id, {}
    for number, sizes in enumerate(whole):
        groups.setdefault(of[number], []).extend(sizes)
    sizes = tuple(map(sum, whole))
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    size = engine.optimizer.sub_group_size
    return Workload(name="w", layers=layers, subgroups=sizes, subgroup_size=size, parameters=tuple(groups.values()))


@pytest.mark.parametrize("parameters", [None, two_groups])
@pytest.mark.parametrize("size", [1_000, SUBGROUP, 30_000, LARGE, 10**9])
def test_what_is_planned_is_what_training_cuts(parameters, size):
    engine = start(subgroup_size=LARGE, parameters=parameters)
    work = known(engine)
    assert work.recut(LARGE).subgroups == work.subgroups
    assert work.in_pieces(size).subgroups == subgroups_of(engine.optimizer, size)
    assert work.in_pieces(size).recut(LARGE) == work, "a recut must restore the workload"
    engine.destroy()


def planned(tmp_path, pattern=MIX, **fields):
    """Save a plan file for the tests' model, and return its path.

    The plan divides DeepSpeed's subgroups into smaller ones. DeepSpeed's ``sub_group_size`` is `LARGE` elements.
    """
    engine = start(subgroup_size=LARGE)
    work = known(engine).in_pieces(SUBGROUP)
    assert len(work.subgroups) > len(engine.optimizer.fp16_groups)
    named = {"deepspeed_subgroup_size": work.deepspeed_subgroup_size, "subgroups": work.subgroups}
    made = plan_for(engine, pattern, pieces=True, **named, **EARLY, **fields)
    engine.destroy()
    made.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def initialized(plan):
    """Return the engine that `ebbtide.runtime.initialize` builds from a user's own config and a plan file."""
    torch.manual_seed(0)  # as `start` does
    model = SmallModel()
    config = ds_config(micro_batch=2, subgroup_size=LARGE, learning_rate=1e-3)
    return ebbtide.runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config, plan=plan, device=device_of(DEVICE)
    )[0]


def test_a_plan_file_of_pieces_has_the_bits_of_the_users_own_size(tmp_path):
    engine = initialized(planned(tmp_path))
    assert engine.optimizer.sub_group_size == LARGE
    assert len(engine.optimizer.sizes()) > len(engine.optimizer.fp16_groups)
    assert DEVICE == "unified" or any(session_of(engine).plan.updated_early)
    assert_same(outcome(engine), outcome(start(subgroup_size=LARGE)))


@pytest.mark.parametrize("size", [SUBGROUP, LARGE + 1, 10**9])
def test_another_size_in_the_config_is_refused_before_an_engine_is_built(size, tmp_path, monkeypatch):
    plan = planned(tmp_path)
    monkeypatch.setattr("deepspeed.initialize", lambda *_, **__: pytest.fail("an engine is built"))
    model = SmallModel()
    config = ds_config(micro_batch=2, subgroup_size=size, learning_rate=1e-3)
    with pytest.raises(PlanError, match=f"sub_group_size in the DeepSpeed config must equal .*, but got {size}"):
        ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=config, plan=plan)
    del config["zero_optimization"]["sub_group_size"]
    with pytest.raises(PlanError, match="but got 1000000000"):
        ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=config, plan=plan)


def test_another_size_of_a_live_engine_is_refused_and_training_goes_on(tmp_path):
    plan, engine = planned(tmp_path), start()
    with pytest.raises(PlanError, match="`tune plan --subgroup-size pieces`"):
        ebbtide.runtime.attach(engine, plan, device=device_of(DEVICE))
    assert_same(outcome(engine), outcome(start()))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (["host"], "because ebbtide has no kernel for the optimizer"),
        (["host", "stored"], "because the plan keeps optimizer state on a drive"),
    ],
)
def test_an_optimizer_with_its_own_step_and_stored_state_are_refused(pattern, reason, tmp_path):
    own = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    plan = planned(tmp_path, pattern)
    engine = start(subgroup_size=LARGE, extra={} if "stored" in pattern else own)
    with pytest.raises(PlanError, match=reason):
        ebbtide.runtime.attach(engine, plan, device=device_of(DEVICE))
    engine.destroy()


@pytest.mark.parametrize("pattern", [["host"], MIX, ["resident"]])
def test_the_memory_that_is_asked_for_before_an_engine_is_built(pattern, tmp_path):
    engine = initialized(planned(tmp_path, pattern))
    if DEVICE != "unified":
        named = session_of(engine).plan.model_copy(update={"subgroups": engine.optimizer.sizes()})
        assert needed_bytes(named, 2) == session_of(engine).host_bytes()
    engine.destroy()


@pytest.mark.parametrize("size", [LARGE, SUBGROUP - 1])
def test_a_file_says_both_sizes(size, tmp_path):
    rows = [{"count": 3, "placement": "host"}]
    fields = {"subgroup_size": SUBGROUP, "deepspeed_subgroup_size": size, "ways": rows}
    if size < SUBGROUP:
        with pytest.raises(PlanError, match="deepspeed_subgroup_size"):
            Plan.from_fields(fields)
        return
    Plan.from_fields(fields).save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert (read.subgroup_size, read.deepspeed_subgroup_size, read.config_subgroup_size) == (SUBGROUP, LARGE, LARGE)
    plain = Plan.from_fields({"subgroup_size": SUBGROUP, "ways": rows})
    assert plain.config_subgroup_size == SUBGROUP
    assert "deepspeed_subgroup_size" not in plain.model_dump()
