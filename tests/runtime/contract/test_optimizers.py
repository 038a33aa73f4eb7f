"""Tests of plans with the optimizers Lion and Adagrad: the results equal stock DeepSpeed's, bit for bit."""

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.base import Device

from tests.runtime.contract.test_bits import MIX, Switching
from tests.runtime.contract.test_builds import Odd
from tests.runtime.contract.training import DEVICES, all_state, assert_same, attached, outcome, start, train
from tests.runtime.stock_builds import HERE, runs_here, use_build

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
OPTIMIZERS = {
    "lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.3}),
    "lion_without_decay": ("Lion", {"lr": 1e-3}),
    "adagrad": ("Adagrad", {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad_without_decay": ("Adagrad", {"lr": 1e-2, "eps": 1e-8}),
}


def engine_for(name, stage, **settings):
    kind, params = OPTIMIZERS[name]
    settings = {"clipping": 0.01, "subgroup_size": 3_000} | settings
    extra = {"optimizer": {"type": kind, "params": params}}
    return start(model=Odd(), stage=stage, extra=extra, **settings)


def stock(name, stage, steps=4):
    engine = engine_for(name, stage)
    losses, norms = train(engine, steps)
    return outcome_of(engine, losses, norms)


def outcome_of(engine, losses, norms):
    state = all_state(engine)
    engine.destroy()
    return state, torch.stack(losses), norms


@pytest.mark.parametrize("name", ["lion", "adagrad"])
@pytest.mark.parametrize(("stage", "build"), [(1, HERE), (2, HERE), (3, HERE), (3, "avx2")])
def test_whole_engine(name, stage, build, monkeypatch):
    if not runs_here(build):
        pytest.skip(f"this CPU has no {build}")
    use_build(monkeypatch, build)
    expected = stock(name, stage)
    assert any("exp_avg_sq" in key for key in expected[0])
    ours = attached(engine_for(name, stage), MIX, DEVICE, None, subgroup=3_000)
    mix = set(MIX) if stage == 3 else {*MIX} - {"stored"}
    assert {s.placement for s in session_of(ours).executor.states} == mix
    assert_same(outcome(ours, 4), expected)


def test_the_device_kernel_is_made_ready_by_attach(monkeypatch):
    use_build(monkeypatch, HERE)
    calls = []
    monkeypatch.setattr(Device, "prepare", lambda self, *arguments: calls.append(arguments))
    for pattern in (["host"], MIX):
        attached(engine_for("lion", 3), pattern, DEVICE, None).destroy()
    ((steps, tensors, gradient, wire),) = calls
    assert [(step.kernel, step.variant) for step in steps] == [("lion", 0), ("lion", 1)]
    assert (tensors, gradient, wire) == (2, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("name", ["lion_without_decay", "adagrad_without_decay"])
def test_without_decay_on_the_host_alone(name, monkeypatch):
    use_build(monkeypatch, HERE)
    expected = stock(name, 3)
    ours = attached(engine_for(name, 3), ["host"], next(iter(DEVICES)), None)
    assert_same(outcome(ours, 4), expected)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["lion", "adagrad"])
def test_save_and_resume_in_another_placement(name, stage, monkeypatch, tmp_path):
    use_build(monkeypatch, HERE)
    expected = stock(name, stage, 5)
    saving = attached(engine_for(name, stage), MIX, DEVICE, None, subgroup=3_000)
    first = train(saving, 3)
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=3)
    saving.destroy()
    other = ["resident", "host"]
    resumed = attached(engine_for(name, stage), other, DEVICE, None, subgroup=3_000)
    path, _ = resumed.load_checkpoint(str(tmp_path))
    assert path is not None
    last = train(resumed, 2, first=3)
    losses, norms = (a + b for a, b in zip(first, last, strict=True))
    assert_same(outcome_of(resumed, losses, norms), expected)


def test_stock_goes_on_from_a_checkpoint_of_a_plan(monkeypatch, tmp_path):
    use_build(monkeypatch, HERE)
    expected = stock("lion", 3, 5)
    saving = attached(engine_for("lion", 3), MIX[:3], DEVICE, None)
    first = train(saving, 3)
    saving.save_checkpoint(str(tmp_path))
    saving.destroy()
    resumed = engine_for("lion", 3)
    resumed.load_checkpoint(str(tmp_path))
    last = train(resumed, 2, first=3)
    losses, norms = (a + b for a, b in zip(first, last, strict=True))
    assert_same(outcome_of(resumed, losses, norms), expected)


@pytest.mark.parametrize(
    ("name", "stage", "device"),
    [
        *(("adagrad", stage, DEVICE) for stage in (1, 2, 3)),
        ("adagrad", 3, next(iter(DEVICES))),
        ("adagrad_without_decay", 3, DEVICE),
    ],
)
def test_unused_parameters_under_a_rule_that_spends_its_gradient(name, stage, device):
    # DeepSpeed's Adagrad updates the elements after the last whole vector in a scalar loop, which overwrites their
    # gradient with the update. If the next step brings no new gradient, the overwritten values are used as the
    # gradient.
    def new():
        kind, params = OPTIMIZERS[name]
        extra = {"optimizer": {"type": kind, "params": params}}
        return start(model=Switching(), stage=stage, extra=extra, subgroup_size=9_003)

    def shown(engine):
        train(engine, 9)
        grads = [safe_get_full_grad(param) for param in engine.module.parameters()]
        return outcome(engine, 9), grads

    from deepspeed.utils import safe_get_full_grad

    expected, wanted = shown(new())
    switching = attached(new(), MIX, device, subgroup=5_003)
    found, grads = shown(switching)
    assert_same(found, expected)
    for grad, want in zip(grads, wanted, strict=True):
        assert torch.equal(grad, want)
