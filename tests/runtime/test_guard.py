"""Tests that the runtime refuses a config or model to which no plan can be applied, before training starts. The
error states the rule, the value that breaks it, and the key to change.
"""

import copy
import re

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.choice import choose_device
from ebbtide.runtime.execution.session import fitted
from ebbtide.runtime.zero.checks import private as deepspeed_private
from ebbtide.runtime.zero.checks.guard import ConfigError, check_config
from ebbtide.runtime.zero.checks.private import UnsupportedDeepSpeedError
from ebbtide.runtime.zero.host_memory import check_host_memory, needed_bytes
from ebbtide.simulator import CheckpointPlan, Plan, PlanError
from ebbtide.simulator.optimizer import OPTIMIZERS
from ebbtide.simulator.update.steps import Queue

from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config
from tests.runtime.contract.training import SUBGROUP, plan_for, start


def config(**zero):
    made = ds_config(1, 20_000)
    made["zero_optimization"] |= zero
    return made


def offload(**fields):
    return {"offload_optimizer": {"device": "cpu", "pin_memory": True, **fields}}


REFUSED = [
    (config(stage=0), "zero_optimization.stage must be 1, 2 or 3, but got 0"),
    (
        config(**offload(device="nvme")),
        "offload_optimizer.device must be 'cpu', or 'nvme' with an nvme_path .* got 'nvme'",
    ),
    (
        config(stage=2, **offload(device="nvme", nvme_path="/nvme")),
        "device must be 'cpu' under ZeRO-2, but got 'nvme': .* under ZeRO-3 only",
    ),
    ({**config(), "zero_optimization": {"stage": 3}}, "device must be 'cpu', .* but got 'none'"),
    ({**config(), "compile": {"deepcompile": True}}, "compile.deepcompile must be false"),
    ({**config(), "hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled must be false"),
    (config(offload_optimizer=None, cpu_offload=False), "device must be 'cpu', .* but got 'none'"),
    (config(zenflow={"topk_ratio": 0.1}), "zenflow must be absent"),
    (config(mics_shard_size=2), "mics_shard_size must be absent .* got 2"),
    ({**config(), "optimizer": {"type": "Muon"}}, "optimizer.type must be one that .*got 'Muon'"),
]


NO_OBJECTS = [
    (config(offload_optimizer="cpu"), "zero_optimization.offload_optimizer must be an object, but got 'cpu'"),
    (config(offload_param="cpu"), "zero_optimization.offload_param must be an object, but got 'cpu'"),
    ({**config(), "compile": True}, "compile must be an object, but got True"),
]


@pytest.mark.parametrize(("bad", "message"), NO_OBJECTS)
def test_a_section_that_is_no_object_is_refused_by_its_key(bad, message):
    for plan in ("auto", Plan(subgroup_size=1, placement=Plan.runs(["host"]))):
        with pytest.raises(ConfigError, match=f"in DeepSpeed's config, {message}"):
            ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=bad, plan=plan)


@pytest.mark.parametrize(("bad", "message"), REFUSED)
def test_configs_are_refused_before_the_model_is_touched(bad, message):
    model = ByteGPT(SIZES["tiny"])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        ebbtide.runtime.initialize(model=model, config=bad, plan=Plan(subgroup_size=1, placement=Plan.runs(["host"])))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_good_config_passes():
    check_config(config())


def test_the_key_of_old_is_taken(only_rank):
    made = config()
    del made["zero_optimization"]["offload_optimizer"]
    made["zero_optimization"]["cpu_offload"] = True
    plan = Plan(subgroup_size=10**9, placement=Plan.runs(["host"]))
    model = ByteGPT(SIZES["tiny"])
    engine, *_ = ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=made, plan=plan)
    assert session_of(engine).plan.placements == ("host",)
    engine.destroy()


KEYS_OF_DEEPSPEEDS_OWN = {
    "ratio": ({"ratio": 0.3}, r"ratio \(Twin-Flow, 0.3\) is replaced by the plan"),
    "super_offload": ({"super_offload": True}, "super_offload is replaced by the plan"),
    "automatic": ({"pin_memory": "auto", "ratio": "auto"}, None),
}


@pytest.mark.parametrize("name", KEYS_OF_DEEPSPEEDS_OWN)
def test_a_plan_takes_the_place_of_other_ways_to_offload_and_says_so(name, only_rank, caplog):
    given, says = KEYS_OF_DEEPSPEEDS_OWN[name]
    model, made = ByteGPT(SIZES["tiny"]), config(**offload(**given))
    before = copy.deepcopy(made)
    plan = Plan(subgroup_size=10**9, placement=Plan.runs(["host"]))
    engine, *_ = ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=made, plan=plan)
    assert session_of(engine).plan.placements == ("host",)
    assert made == before
    assert (says is None) == ("is replaced by the plan" not in caplog.text)
    assert says is None or re.search(says, caplog.text)
    engine.destroy()


def test_an_engine_that_was_built_with_twin_flow_is_refused(only_rank):
    engine = start(
        extra={
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 20_000,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            }
        }
    )
    plan = Plan(subgroup_size=20_000, placement=Plan.runs(["host"]))
    with pytest.raises(
        ConfigError, match=r"built this engine with the key 'ratio'\. Remove the key from DeepSpeed's config"
    ):
        ebbtide.runtime.attach(engine, plan)
    engine.destroy()


def test_where_nothing_is_offloaded_deepspeed_is_left_alone(only_rank, caplog):
    made = config()
    made["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    # Otherwise DeepSpeed compiles FusedAdam, which takes a minute of CPU time.
    made["optimizer"]["params"]["torch_adam"] = True
    model = ByteGPT(SIZES["tiny"])
    engine, *_ = ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=made, plan="auto")
    assert not hasattr(engine.optimizer, "_ebbtide")
    assert caplog.text.count("this engine is left to DeepSpeed, without a plan") == 1
    engine.destroy()


def test_an_interval_without_a_folder_is_refused_or_said(only_rank, caplog):
    saving, refusal = CheckpointPlan(interval_steps=2), r"interval_steps 2, but no dir, .*\. Add dir,"
    with pytest.raises(ConfigError, match=refusal):
        ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=config(), plan="auto", checkpoint=saving)
    engine = start()
    plan = plan_for(engine, ["host"]).model_copy(update={"checkpoint": saving})
    with pytest.raises(ConfigError, match=refusal):
        ebbtide.runtime.attach(engine, plan, checkpoint=saving)
    ebbtide.runtime.attach(engine, plan)
    assert caplog.text.count("no checkpoint is written automatically") == 1
    assert "checkpoint.interval_steps 2 but no checkpoint.dir" in caplog.text
    engine.destroy()


def test_parameters_below_zero_3_stay_where_they_are_whatever_the_key(only_rank):
    check_config(config(stage=2, offload_param={"device": "cpu"}))


def test_a_file_with_comments_is_read_and_one_that_is_none_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  // as DeepSpeed takes it\n  "zero_optimization": {"stage": 0,},\n}')
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"]))
    with pytest.raises(ConfigError, match="stage must be 1, 2 or 3, but got 0"):
        ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=str(path), plan=plan)
    for comment in ("", "// not JSON\n"):
        path.write_text(comment + '{"zero_optimization": {"stage": 3, "stage": 2}}')
        with pytest.raises(ConfigError, match=rf"{path} failed: duplicate keys \['stage'\]: keep each key once"):
            ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=str(path), plan=plan)
    path.write_text("[]")
    with pytest.raises(ConfigError, match=str(path)):
        ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=str(path), plan=plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("nowhere.json", "plan must be a readable JSON file"),
        (7, "plan must be a Plan, a path or a dict, but got int"),
        ({"placement": [{"placement": "host", "count": 1}]}, "subgroup_size: must be given"),
        ({"subgroup_size": 1, "colour": "red", "placement": [{"placement": "host", "count": 1}]}, "colour"),
    ],
)
def test_what_is_no_plan_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        ebbtide.runtime.initialize(model=torch.nn.Linear(1, 1), config=config(), plan=plan)


def test_plans_for_something_else_are_refused_and_training_can_go_on(only_rank):
    from tests.runtime.contract.training import train

    engine = start()
    count = len(engine.optimizer.fp16_partitioned_groups_flat)
    sizes = [int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel]
    host = Plan.runs(["host"] * count)
    longer = Plan(subgroup_size=SUBGROUP, placement=Plan.runs(["host"] * (count + 2)))
    with pytest.raises(
        PlanError, match=f"placement of the engine's {count} subgroups, but sets the placement of {count + 2}"
    ):
        ebbtide.runtime.attach(engine, longer)
    other = Plan(subgroup_size=20_000, placement=host, subgroups=[n + 1 for n in sizes])
    with pytest.raises(PlanError, match=r"set zero_optimization\.sub_group_size to 20000"):
        ebbtide.runtime.attach(engine, other)
    less = Plan(subgroup_size=SUBGROUP, placement=host, subgroups=[n - 1 for n in sizes])
    with pytest.raises(PlanError, match="its trainable parameters or the number of ranks differ"):
        ebbtide.runtime.attach(engine, less)
    train(engine, 2)
    ebbtide.runtime.attach(engine, Plan(subgroup_size=SUBGROUP, placement=host))
    with pytest.raises(ConfigError, match="must be DeepSpeed's own ZeRO optimizer"):
        ebbtide.runtime.attach(engine, Plan(subgroup_size=SUBGROUP, placement=host))
    train(engine, 2)
    engine.destroy()


def test_a_plan_of_other_parameter_groups_is_fitted():
    """Each subgroup is updated as the plan's at its place, and in the plan's order."""
    placement = [*Plan.runs(["host"] * 2), *Plan.runs(["device"] * 2)]
    order = {"host": "arrival", "device": [[3, 2]]}
    plan = Plan(
        subgroup_size=100, placement=placement, subgroups=[100, 100, 100, 20], order=order, workload_fingerprint="it"
    )
    same = fitted(plan, (100, 100, 100, 20), 100, 3)
    assert same is plan
    # Two groups, of 305 and 15 elements.
    made = fitted(plan, (100, 100, 100, 5, 15), 100, 3)
    assert made.subgroups == (100, 100, 100, 5, 15)
    assert made.placements == ("host", "host", "device", "device", "device")
    assert made.order.of(Queue.HOST, [0, 1]) == [1, 0]
    assert made.order.of(Queue.DEVICE, [2, 3, 4]) == [3, 4, 2]
    assert made.workload_fingerprint == ""
    for other in ((100, 100, 100), (100, 100, 100, 21), (50,) * 8):  # another model
        assert fitted(plan, other, 100, 3) is plan
    assert fitted(plan, (100, 100, 100, 5, 15), 50, 3) is plan
    large = Plan(subgroup_size=10**5, placement=Plan.runs(["host"] * 2), subgroups=[10**5, 9 * 10**4])
    assert fitted(large, (10**5, 8 * 10**4, 10**4 + 2), 10**5, 3) is large
    assert fitted(large, (10**5, 8 * 10**4, 10**4 + 2), 10**5, 2).subgroup_count == 3  # padded


def test_a_fitted_plan_trains_as_deepspeed(only_rank):
    from tests.runtime.contract.training import train

    def losses(under_plan):
        engine = start()
        if under_plan:
            sizes = [int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel]
            turned = Plan(subgroup_size=SUBGROUP, placement=Plan.runs(["host"] * len(sizes)), subgroups=sizes[::-1])
            assert sizes != sizes[::-1]
            ebbtide.runtime.attach(engine, turned)
            assert ebbtide.runtime.session_of(engine).plan.subgroups == tuple(sizes)
        found, norms = train(engine, 6)
        engine.destroy()
        return torch.stack([loss.detach().cpu() for loss in found]), norms

    (ours, norms), (stock, others) = losses(under_plan=True), losses(under_plan=False)
    assert torch.equal(ours, stock)
    assert norms == others


@pytest.mark.parametrize("version", ["0.18.5", "0.20.0", "1.0"])
def test_untested_deepspeeds_are_refused(version, monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(UnsupportedDeepSpeedError, match=f"but got {version}"):
        deepspeed_private.check_version()


def test_zero_2_on_an_older_deepspeed_is_refused(monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.19.6")
    with pytest.raises(UnsupportedDeepSpeedError, match=r"needs deepspeed >= 0\.19\.8, .*stage to 3"):
        deepspeed_private.check_members(object())


def test_a_deepspeed_without_a_member_is_refused():
    with pytest.raises(UnsupportedDeepSpeedError, match=r"lacks .*grad_position.*pip install"):
        deepspeed_private.check_members(object())


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match="device must be 'auto' or one of"):
        choose_device("abacus", on_cuda=False)
    with pytest.raises(ValueError, match="device 'cuda' needs a CUDA GPU"):
        choose_device("cuda", on_cuda=False)


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ValueError, match=r"built for ROCm 6\.2, .* train without a plan"):
        choose_device("auto", on_cuda=True)


def test_a_plan_larger_than_free_memory_is_refused_with_numbers(monkeypatch):
    sizes = (3 * 10**9, 10**9, 10**9)
    plan = Plan(
        subgroup_size=3 * 10**9, subgroups=sizes, staging_slots=1, placement=Plan.runs(["host", "device", "resident"])
    )
    # 12 bytes of state for host and device subgroups, 2 of gradient for host ones, one buffer for parameters.
    needed = 12 * 4 * 10**9 + 2 * 3 * 10**9 + 2 * 3 * 10**9
    assert needed_bytes(plan, 2) == needed
    check_host_memory(plan, config(), needed)
    with pytest.raises(ConfigError, match=r"55.88 GiB for 1 rank.*46.57 GiB free \(9.31 GiB miss"):
        check_host_memory(plan, config(), 50 * 10**9)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    with pytest.raises(ConfigError, match=r"111.76 GiB for 2 rank"):
        check_host_memory(plan, config(), needed)


def test_the_state_of_a_script_s_own_optimizer_is_what_memory_must_hold():
    plan = Plan(subgroup_size=10**9, subgroups=(10**9,), placement=Plan.runs(["host"]))
    client = type("DeepSpeedCPULion", (), {})()
    needed = needed_bytes(plan, 2, optimizer=OPTIMIZERS["lion"])
    check_host_memory(plan, config(), needed, client)
    with pytest.raises(ConfigError, match="host memory must hold"):
        check_host_memory(plan, config(), needed - 1, client)


def test_a_plan_of_another_model_is_told_before_its_host_memory():
    plan = Plan(subgroup_size=10**9, subgroups=(10**9,) * 8, placement=Plan.runs(["host"] * 8), about="Llama 3 8B")
    with torch.device("meta"):
        own, other = torch.nn.Linear(10**5, 8 * 10**4), torch.nn.Linear(10, 10)
    with pytest.raises(PlanError, match=r"trains 110 parameters, but it was made for 8,000,000,000 .*\(Llama 3 8B\)"):
        check_host_memory(plan, config(), 10**9, model=other)
    with pytest.raises(ConfigError, match="host memory must hold"):
        check_host_memory(plan, config(), 10**9, model=own)


def test_initialize_asks_before_it_allocates(monkeypatch):
    plan = Plan(subgroup_size=10**13, subgroups=(10**13,), placement=Plan.runs(["host"]))
    model = ByteGPT(SIZES["tiny"])
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(PlanError, match="the plan must be made for this model"):
        ebbtide.runtime.initialize(model=model, config=config(), plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_accumulation_counts_against_free_memory(monkeypatch):
    plan = Plan(subgroup_size=10**9, subgroups=(10**9,) * 2, placement=Plan.runs(["host"] * 2))
    batch = {"gradient_accumulation_steps": 1}
    once = (12 + 2) * 2 * 10**9 + 2 * 2 * 10**9
    check_host_memory(plan, config() | batch, once)
    derived = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for more in ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": None} | derived):
        with pytest.raises(ConfigError, match=r"3.73 GiB missing"):
            check_host_memory(plan, config() | more, once)


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [("2", {}, 50_000_000), ("2", {"reduce_bucket_size": 7}, 7), ("4", {}, None)]
)
def test_gradients_set_out_early_where_the_config_leaves_it_open(monkeypatch, ranks, given, expected, automatic):
    # A sum over two ranks has the same bits with any bucket size. On four ranks the bits could change, so DeepSpeed's
    # default stays.
    import deepspeed

    configs = []

    def seen(*args, config, **kwargs):
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr(deepspeed, "initialize", seen)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    made = config()
    made["zero_optimization"].pop("reduce_bucket_size", None)
    made["zero_optimization"] |= given
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"]), staging_slots=0)
    with pytest.raises(InterruptedError):
        ebbtide.runtime.initialize(config=made, plan="auto" if automatic else plan)
    assert configs[0]["zero_optimization"].get("reduce_bucket_size") == expected


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("plan", ["auto", Plan(subgroup_size=10, placement=Plan.runs(["host"]), staging_slots=0)])
def test_mixtures_of_experts_are_refused_before_an_engine_is_built(monkeypatch, stage, plan):
    import deepspeed
    from deepspeed.moe.layer import MoE

    monkeypatch.setattr(deepspeed, "initialize", built)
    monkeypatch.setattr(MoE, "__init__", torch.nn.Module.__init__)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), MoE())
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    config["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    with pytest.raises(
        ConfigError, match="mixture-of-experts layers, which a plan does not support under ZeRO-1 and 2"
    ):
        ebbtide.runtime.initialize(model=model, config=config, plan=plan)


def built(model, config=None, **_):
    pytest.fail("an engine was built")
