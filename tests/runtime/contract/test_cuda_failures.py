"""What goes wrong beside a step, on the stand-in: steps skipped, page locks refused."""

import gc

import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ebbtide.runtime.checkpoint.format import memory
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.hardware import pages
from ebbtide.runtime.zero.attach import switch_plan

from studies.bench.bits import state_of
from tests.runtime.contract.test_bits import MIX, engine_for, stock
from tests.runtime.contract.training import assert_same, outcome, plan_for, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real streams are there"),
]
OVERFLOWS = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}


@pytest.mark.parametrize("pattern", [["device"], ["host"]])
def test_a_skipped_step_leaves_no_copy_behind_that_a_switch_runs_into(fake, monkeypatch, pattern):
    """fp16's first step overflows: what was prefetched for it, and the gradients on their way home,
    are waited for by no update.
    """
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = start(precision="fp16", extra={"fp16": OVERFLOWS})
    ebbtide.runtime.attach(engine, plan_for(engine, pattern), device=CudaDevice())
    fake.latest_s = 30.0  # nothing runs before something waits for it
    train(engine, 1)
    assert engine.skipped_steps == 1
    switch_plan(engine, plan_for(engine, ["host", "resident"] if pattern == ["device"] else MIX))
    for stream in fake.streams:
        stream.drain()
    fake.latest_s = 0.01
    engine.destroy()


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("granted", [0, 4, 9])
def test_a_refused_page_lock_leaves_stock(fake, stage, granted):
    """Every lock is given back, and the engine trains on as if there had been no plan."""
    engine = engine_for("clipping", stage=stage)
    fake.runtime.refuses_after = granted
    with pytest.raises(MemoryError, match=r"CUDA error 2\. Free host memory"):
        ebbtide.runtime.attach(engine, plan_for(engine, ["resident", "device"]), device=CudaDevice())
    assert not fake.runtime.locked
    assert_same(outcome(engine), stock("clipping", stage=stage))


def test_a_device_that_is_dropped_unlocks_its_pages(fake):
    """Pages that are unmapped while locked are, to CUDA, what is mapped there next."""
    device = CudaDevice()
    buffer = device.host_empty(4096, torch.float32).fill_(1.0)
    assert fake.runtime.locked
    del device
    gc.collect()
    assert not fake.runtime.locked
    assert torch.equal(buffer, torch.ones(4096)), "who still has the buffer keeps it"


def test_a_refused_lock_shows_in_no_later_kernel(fake, monkeypatch):
    """Checkpoint buffers that cannot be locked are slower, no more."""
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    fake.runtime.refuses_after = 0
    slots = memory.Slots(1, 4096)
    assert fake.runtime.last_error == 0
    slots.close()
    assert pages.lock(0, 4096) == 2


def test_the_state_after_a_failed_attach_is_stocks(fake):
    """After some steps, too: moments and masters that were on their way to the device are home."""
    engine = engine_for("clipping")
    losses, norms = train(engine, 3)
    fake.runtime.refuses_after = 10
    with pytest.raises(MemoryError):
        ebbtide.runtime.attach(engine, plan_for(engine, MIX), device=CudaDevice())
    more, more_norms = train(engine, 3, first=3)
    result = state_of(engine), torch.stack(losses + more), norms + more_norms
    engine.destroy()
    assert_same(result, stock("clipping"))
