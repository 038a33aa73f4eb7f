"""Tests of optimizers that run their own step on the host, such as torch's: training under a plan has
stock DeepSpeed's results, bit for bit.
"""

import copy
import re

import deepspeed
import ebbtide.runtime
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from ebbtide.runtime import session_of
from ebbtide.runtime.kernels.own_step import OwnStepRule
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.checks.guard import ConfigError
from ebbtide.runtime.zero.host_memory import check_host_memory
from ebbtide.simulator import Plan
from ebbtide.simulator.plan import PlanError

from tests.runtime.contract.training import assert_same, attached, outcome, plan_for, start, train
from tests.runtime.zoo.configs import as_trained
from tests.runtime.zoo.training import plannable, trained

pytestmark = pytest.mark.usefixtures("front_door")

PARAMS = {"lr": 1e-3, "weight_decay": 0.1}
STATES_16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **PARAMS}}}


def config(optimizer, stage, **changes):
    zero = {"stage": stage, "sub_group_size": 5_000, "offload_optimizer": {"device": "cpu"}}
    made = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **changes,
    }
    return as_trained({**made, **({"optimizer": optimizer} if optimizer else {})})


CONFIGS = {
    "torch_adam": config(TORCH_ADAM["optimizer"], 3, gradient_accumulation_steps=2),
    "adam_l2": config({"type": "Adam", "params": {**TORCH_ADAM["optimizer"]["params"], "adam_w_mode": False}}, 2),
    "sgd": config({"type": "SGD", "params": {"momentum": 0.9, **PARAMS}}, 2),
    "rmsprop": config({"type": "RMSprop", "params": {"centered": True, **PARAMS}}, 3),
    "nadam": config({"type": "NAdam", "params": PARAMS}, 1),
    "client": config(
        None, 3, zero_force_ds_cpu_optimizer=False, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    ),
    "masters_16": config(
        {"type": "AdamW", "params": PARAMS},
        3,
        gradient_accumulation_steps=2,
        bf16={"enabled": True, "bf16_master_weights_and_grads": True},
    ),
    "states_16": config({"type": "Adam", "params": PARAMS}, 2, bf16=STATES_16),
    "fp16_masters": config(
        {"type": "AdamW", "params": PARAMS},
        1,
        bf16={"enabled": False},
        fp16={"enabled": True, "fp16_master_weights_and_grads": True},
    ),
    "overflow": config(
        None,
        1,
        zero_force_ds_cpu_optimizer=False,
        bf16={"enabled": False},
        fp16={"enabled": True, "initial_scale_power": 24},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_has_stocks_bits(name):
    if not plannable(CONFIGS[name]):
        pytest.skip("this DeepSpeed trains ZeRO-1 and 2 under no plan")
    stock = trained(CONFIGS[name], steps=3)
    for device in ("auto", "emulated"):
        ours = trained(CONFIGS[name], {"plan": "auto", "device": device}, steps=3)
        assert (stock.error, ours.error) == ("", "")
        assert ours.planned
        assert ours.same(stock)


def test_moments_that_follow_an_fp32_master_are_fp32_whatever_the_key_says():
    # DeepSpeed then gives the moments the dtype of the master parameters. The masters are fp32 in this test, so the
    # moments must be fp32 too.
    narrow = config({"type": "AdamW", "params": {**PARAMS, "fp32_optimizer_states": False}}, 3)
    ours = trained(narrow, {"plan": "auto", "device": "emulated"}, mixed=True)
    assert ours.error == ""
    assert ours.same(trained(narrow))


@pytest.mark.parametrize(
    ("stage", "extra"), [(1, TORCH_ADAM), (3, TORCH_ADAM), (2, {"bf16": STATES_16}), (3, {"bf16": STATES_16})]
)
@pytest.mark.parametrize("back", [False, True], ids=["to_plan", "to_stock"])
def test_save_and_resume_both_ways(stage, extra, back, tmp_path):
    def engine(plan):
        made = start(stage=stage, extra=extra)
        # Under ZeRO-1 and 2, the optimizer's step takes a whole partition.
        size = {} if stage == 3 else {"subgroup": 10**9}
        return attached(made, ["host"], "unified", **size) if plan else made

    expected = outcome(engine(False), 5)
    saving = engine(plan=back)
    first = train(saving, 3)
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=3)  # while the checkpoint is being written
    saving.destroy()
    resumed = engine(plan=not back)
    resumed.load_checkpoint(str(tmp_path))
    state, losses, norms = outcome(resumed, 2, first=3)
    assert_same((state, torch.cat([torch.stack(first[0]), losses]), first[1] + norms), expected)


def test_other_placements_than_the_host_are_not_taken(caplog):
    engine = start(stage=3, extra=TORCH_ADAM)
    expected = outcome(start(stage=3, extra=TORCH_ADAM), 3)
    ebbtide.runtime.attach(engine, plan_for(engine, ["host", "device", "resident"]))
    assert set(session_of(engine).plan.placements) == {"host"}
    assert re.search("AdamW runs its own step\\(\\), .* the CPU updates every subgroup", caplog.text)
    assert_same(outcome(engine, 3), expected)


def test_a_plan_that_cuts_a_partition_is_refused():
    engine = start(stage=2, extra=TORCH_ADAM)
    with pytest.raises(ConfigError, match=r"plan\.subgroup_size must be at least \d+ for AdamW"):
        ebbtide.runtime.attach(engine, plan_for(engine, ["host"]))
    engine.destroy()


def test_a_step_has_the_settings_of_its_launch():
    ours, stock = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer = torch.optim.SGD([ours], lr=torch.tensor(0.5), momentum=0.9)
    expected = torch.optim.SGD([stock], lr=0.5, momentum=0.9)
    rule = OwnStepRule(optimizer)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"].fill_(rate)
        expected.param_groups[0]["lr"] = rate
        step = rule.next_step(optimizer, ours, 0)
        optimizer.param_groups[0]["lr"].fill_(100.0)
        gradient = torch.full((8,), 0.25, dtype=torch.bfloat16)
        rule.update(
            (ours.data,),
            [(0, 4, gradient[:4], 2.0), (4, 8, gradient[4:], 2.0)],
            torch.empty(8, dtype=torch.bfloat16),
            step,
            1,
        )
        stock.grad = torch.full((8,), 0.5)
        expected.step()
    assert torch.equal(ours, stock)
    assert torch.equal(optimizer.state[ours]["momentum_buffer"], expected.state[stock]["momentum_buffer"])


@pytest.mark.parametrize("location", ["device", "host"])
@pytest.mark.parametrize("extra", [TORCH_ADAM, {"bf16": STATES_16}, SGD], ids=["torch_adam", "states_16", "sgd"])
def test_all_of_its_memory_is_told(extra, location):
    # The number must be the same before anything is allocated, once the plan is attached, and after the first step,
    # which creates the moments.
    away = {"offload_param": {"device": "cpu"}} if location == "host" else {}
    engine = attached(start(extra=extra, **away), ["host"], "emulated", None)
    optimizer = engine.optimizer
    told = optimizer._ebbtide.host_bytes()
    train(engine, 1)
    optimizer.wait()
    states = optimizer._ebbtide.executor.states
    held = [t for s in states for t in (*optimizer.saved_state(s.index), s.gradient)]
    held += [s.wire for s in states if location == "host"]
    held += [*optimizer._ebbtide.executor.parameter_slots, optimizer._rule._gradient]
    assert sum(t.nbytes for t in held) == optimizer._ebbtide.host_bytes() == told
    plan = optimizer._ebbtide.plan.model_copy(update={"subgroups": tuple(s.elements for s in states)})
    config = {"bf16": {"enabled": True}, "optimizer": engine.config["optimizer"], **extra}
    check_host_memory(plan, config, told)
    with pytest.raises(ConfigError, match="host memory must hold"):
        check_host_memory(plan, config, told - 1)
    engine.destroy()


def test_a_running_plan_is_not_switched_to_other_placements():
    engine = attached(start(extra=TORCH_ADAM), ["host"], "unified", None)
    with pytest.raises(PlanError, match=r"plan\.ways must have placement 'host' for all subgroups"):
        switch_plan(engine, plan_for(engine, ["host", "resident"]))
    engine.destroy()


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in its parameter group, as FusedAdam does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0, "calls": 0})
        self.sign = -1.0  # copies of torch's optimizers lose this attribute

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                p += self.sign * group["calls"] * p.grad


def after_three_steps(kind):
    """Update four zeros three times with gradients of one, as a plan does with an optimizer for which ebbtide has
    no kernel: it calls the optimizer's own ``step()``. Return the optimizer and the four resulting values.
    """
    ours = torch.nn.Parameter(torch.zeros(4))
    optimizer = kind([ours])
    rule, out = OwnStepRule(optimizer), torch.empty(4)
    for _ in range(3):
        step = rule.next_step(optimizer, ours, 0)
        rule.update((ours.data,), [(0, 4, torch.ones(4), 1.0)], out, step, 1)
    return optimizer, out


def test_what_an_optimizer_writes_to_its_group_stays():
    optimizer, out = after_three_steps(Counting)
    assert torch.equal(out, torch.full((4,), -6.0))
    assert optimizer.param_groups[0]["calls"] == 3
    assert copy.copy(optimizer).state_dict()["param_groups"][0]["calls"] == 3


class CountingInState(torch.optim.Optimizer):
    """An optimizer whose state has a number that belongs to no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.state["calls"] = 0

    def step(self):
        self.state["calls"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= self.state["calls"] * p.grad


@pytest.mark.parametrize(
    ("kind", "end", "kept"),
    [(CountingInState, -6.0, {"calls": 3}), (lambda parameters: torch.optim.SGD(parameters, lr=2.0), -6.0, {})],
)
def test_what_an_optimizer_keeps_in_its_state_is_kept_and_no_more(kind, end, kept):
    optimizer, out = after_three_steps(kind)
    assert torch.equal(out, torch.full((4,), end))
    assert dict(optimizer.state) == kept


def test_an_optimizer_without_state_has_none_under_a_plan():
    plain = {**SGD, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    engine = attached(start(stage=3, extra=plain), ["host"], "unified", None)
    train(engine, 1)
    engine.optimizer.wait()
    assert dict(engine.optimizer.optimizer.state) == {}
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_is_shown_the_groups_that_stock_shows_it(stage):
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        groups = [{"params": list(layer.parameters()), "lr": 1.0} for layer in model]
        made = config(None, stage, zero_force_ds_cpu_optimizer=False, bf16={"enabled": False})
        engine = deepspeed.initialize(model=model, optimizer=Counting(groups), config=made)[0]
        if plan:
            ebbtide.runtime.attach(engine, "auto", device="emulated")
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        masters = [safe_get_full_fp32_param(p) for p in model.parameters()]
        outcomes.append((masters, [group["calls"] for group in engine.optimizer.param_groups]))
        engine.destroy()
    assert outcomes[0][1] == outcomes[1][1]
    assert all(map(torch.equal, outcomes[0][0], outcomes[1][0]))


def test_its_tensors_are_registered_with_a_checkpoint(tmp_path):
    engine = start(stage=3, extra=TORCH_ADAM)
    attached(engine, ["host"], "unified")
    train(engine, 1)
    engine.optimizer.wait()
    held = engine.optimizer.saved_state(0)
    kept = engine.optimizer.optimizer.state[engine.optimizer.fp32_partitioned_groups_flat[0]]
    pointers = {t.data_ptr() for t in held}
    assert {kept["exp_avg"].data_ptr(), kept["exp_avg_sq"].data_ptr()} < pointers
    engine.destroy()


def test_a_plan_of_one_subgroup_serves_every_group(only_rank):
    plan = Plan(subgroup_size=10**9, placement=Plan.runs(["host"]))
    engine = start(stage=2, extra=TORCH_ADAM)
    ebbtide.runtime.attach(engine, plan)
    assert_same(outcome(engine, 2), outcome(start(stage=2, extra=TORCH_ADAM), 2))
