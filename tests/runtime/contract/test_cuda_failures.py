"""Tests of the runtime on a fake CUDA if steps are skipped or CUDA refuses to page-lock memory."""

import gc

import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ebbtide.runtime import session_of
from ebbtide.runtime.checkpoint.format import memory
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.hardware import pages
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.simulator.schedule import OpKind

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.test_bits import MIX, engine_for, stock
from tests.runtime.contract.training import assert_same, outcome, plan_for, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="uses a fake CUDA"),
]
OVERFLOWS = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}


@pytest.mark.parametrize(("pattern", "early"), [(["device"], 0), (["host"], 0), (["device"], 99)])
def test_a_skipped_step_leaves_no_copy_behind_that_a_switch_runs_into(fake, monkeypatch, pattern, early):
    # The first fp16 step overflows, so its updates are skipped. These updates would have waited for the step's copies
    # of optimizer state to the GPU and of gradients to the host. The change of the plan must wait for these copies
    # instead.
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = start(precision="fp16", clipping=0.0, extra={"fp16": OVERFLOWS})
    plan = plan_for(engine, pattern, speculate=early, speculate_visits=early)
    ebbtide.runtime.attach(engine, plan, device=CudaDevice())
    fake.latest_s = 1e6  # no op runs before some code waits for it
    engine.backward(engine(*Batches(2, SIZES["tiny"].sequence).at(0, engine.device)))
    begun = session_of(engine).executor._issued
    assert any(op.kind is OpKind.STATE_D2H for op, _ in begun) == bool(early)
    for _, completion in begun:
        completion.wait_issued()
    engine.step()
    assert engine.skipped_steps == 1
    switch_plan(engine, plan_for(engine, ["host", "resident"] if pattern == ["device"] else MIX))
    for stream in fake.streams:
        stream.drain()
    fake.latest_s = 0.01
    engine.destroy()


def test_a_failed_update_does_not_unlock_what_the_gpu_still_copies(fake):
    def fail(op):
        if op.kind is OpKind.UPDATE_HOST_EARLY:
            raise ValueError("planted")

    engine = start(clipping=0.0)
    plan = plan_for(engine, ["device", "device", "host"], speculate=99, speculate_visits=99)
    ebbtide.runtime.attach(engine, plan, device=CudaDevice())
    executor = session_of(engine).executor
    executor.gradients.before_op = fail
    fake.latest_s = 1e6  # no op runs before some code waits for it
    engine.backward(engine(*Batches(2, SIZES["tiny"].sequence).at(0, engine.device)))
    for _, completion in executor._issued:
        completion.issued.wait()
    with pytest.raises(BackgroundError):
        engine.destroy()


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("granted", [0, 4, 9])
def test_a_refused_page_lock_leaves_stock(fake, stage, granted):
    engine = engine_for("clipping", stage=stage)
    fake.runtime.refuses_after = granted
    with pytest.raises(MemoryError, match=r"CUDA error 2\. Free host memory"):
        ebbtide.runtime.attach(engine, plan_for(engine, ["resident", "device"]), device=CudaDevice())
    assert not fake.runtime.locked
    assert_same(outcome(engine), stock("clipping", stage=stage))


def test_a_device_that_is_dropped_unlocks_its_pages(fake):
    # Pages must be unlocked before their memory is freed. Otherwise CUDA would treat other memory that later gets the
    # same address as locked.
    device = CudaDevice()
    buffer = device.host_empty(4096, torch.float32).fill_(1.0)
    assert fake.runtime.locked
    del device
    gc.collect()
    assert not fake.runtime.locked
    assert torch.equal(buffer, torch.ones(4096)), "the buffer must stay valid"


def test_a_refused_lock_shows_in_no_later_kernel(fake, monkeypatch):
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    fake.runtime.refuses_after = 0
    slots = memory.Slots(1, 4096)
    assert fake.runtime.last_error == 0
    slots.close()
    assert pages.lock(0, 4096) == 2


def test_the_state_after_a_failed_attach_is_stocks(fake):
    engine = engine_for("clipping")
    losses, norms = train(engine, 3)
    fake.runtime.refuses_after = 10
    with pytest.raises(MemoryError):
        ebbtide.runtime.attach(engine, plan_for(engine, MIX), device=CudaDevice())
    more, more_norms = train(engine, 1, first=3)
    result = state_of(engine), torch.stack(losses + more), norms + more_norms
    engine.destroy()
    assert_same(result, stock("clipping"))
