"""Tests that DeepSpeed page-locks no host memory for buffers that a plan replaces."""

import copy

import deepspeed
import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.zero.attach import switch_plan

from studies.bench.byte_gpt import ds_config
from tests.machines import node
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.training import SUBGROUP, plan_for, start

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture
def locked(monkeypatch):
    """Record each tensor that DeepSpeed page-locks. Return the list of sizes in bytes, to which each page lock
    appends one.
    """
    accelerator, sizes = get_accelerator(), []

    def pin(tensor, *_, **__):
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(accelerator, "pin_memory", pin)
    return sizes


def config_of(stage, folder, **offload):
    offload = {"device": "cpu", **offload}
    if offload["device"] == "nvme":
        offload["nvme_path"] = str(folder)
    return ds_config(2, SUBGROUP, stage=stage, offload_optimizer=offload)


def locked_bytes(locked, config, plan=None):
    """Build an engine, train one step and destroy the engine. Return the total bytes of host memory that
    DeepSpeed page-locked.
    """
    model = SmallModel()
    make = deepspeed.initialize if plan is None else ebbtide.runtime.initialize
    options = {} if plan is None else {"plan": plan}
    engine = make(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config), **options)[0]
    tokens = torch.zeros(2, 32, dtype=torch.long)
    engine.backward(engine(tokens, tokens))
    engine.step()
    engine.destroy()
    return sum(locked)


@pytest.mark.parametrize("stage", [2, 3])
def test_stock_locks_what_is_counted_here(locked, stage, tmp_path):
    # Stock DeepSpeed page-locks memory here, so that tests that find no page lock prove something.
    assert locked_bytes(locked, config_of(stage, tmp_path)) > 4 * 10**4


@pytest.mark.parametrize("pin", [{}, {"pin_memory": True}])
@pytest.mark.parametrize(
    ("stage", "device", "automatic"),
    [(2, "cpu", True), (3, "cpu", True), (3, "nvme", True), (2, "cpu", False), (3, "cpu", False)],
)
def test_a_plan_has_deepspeed_lock_nothing(locked, stage, device, automatic, pin, tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_machine", lambda drives: node())
    plan = "auto"
    if not automatic:
        engine = start(stage=stage)
        plan = plan_for(engine, ["host"])
        engine.destroy()
        locked.clear()
    assert locked_bytes(locked, config_of(stage, tmp_path, device=device, **pin), plan) == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_compiles_the_devices_kernels_at_attach(stage, tmp_path, monkeypatch):
    # Attaching "auto" compiles the GPU's kernels. Otherwise the fifth step would wait for them.
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_machine", lambda drives: node())
    prepared = []
    monkeypatch.setattr(EmulatedDevice, "prepare", lambda _, *forms: prepared.append(forms))
    model = SmallModel()
    engine = ebbtide.runtime.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config_of(stage, tmp_path),
        plan="auto",
        device="emulated",
    )[0]
    assert len(prepared) == 1
    plan = session_of(engine).plan
    switch_plan(engine, plan.placed(["device"] * plan.subgroup_count, staging_slots=1, prefetch=0))
    assert prepared[1:] == prepared[:1], "the plan must use the kernel that was compiled"
    engine.destroy()
