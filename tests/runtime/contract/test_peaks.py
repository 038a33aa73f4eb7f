"""Tests that at most one subgroup's state is in memory twice at any time, while a plan is attached to an engine,
changed, or resumed from a checkpoint.
"""

import contextlib
import gc
from itertools import permutations
from pathlib import Path

import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from ebbtide.runtime import session_of
from ebbtide.runtime.zero.attach import switch_plan
from torch.multiprocessing.reductions import StorageWeakRef

from studies.bench.byte_gpt import ByteGPT, ByteGPTConfig
from tests.runtime.contract.training import DEVICES, all_state, assert_same, device_of, outcome, plan_for, start, train
from tests.runtime.held_bytes import HeldBytes
from tests.runtime.measured_memory import Counting
from tests.runtime.page_locking import DEVICE_BYTES_PER_PARAM, PageLocking

pytestmark = pytest.mark.usefixtures("only_rank")
MODEL = ByteGPTConfig(layers=10, hidden=64, heads=2, sequence=32)  # no tensor has more than 3% of the parameters
MOST_BYTES_PER_PARAM = 16
GIVEN_BYTES = 14  # master, moments, 16-bit gradient


@contextlib.contextmanager
def held(engine, peaks, name):
    gc.collect()
    with HeldBytes() as counted:
        yield
    gc.collect()
    peaks[name] = counted.peak - counted.now() + session_of(engine).host_bytes()


@pytest.mark.parametrize("stage", [3, 2])
def test_no_more_than_one_subgroup_is_there_twice(stage, tmp_path):
    engine, peaks = start(ByteGPT(MODEL), stage=stage), {}
    host, mix = plan_for(engine, ["host"]), plan_for(engine, ["host", "device", "resident"])
    device = PageLocking(DEVICE_BYTES_PER_PARAM * MODEL.params)
    with held(engine, peaks, "attach"):
        ebbtide.runtime.attach(engine, host, device=device)
    train(engine, 1)
    engine.optimizer.wait()
    with held(engine, peaks, "replan"):
        switch_plan(engine, mix)
    assert device.used_bytes > MODEL.params, "the mixed plan must put state on the device"
    with held(engine, peaks, "replan back"):
        switch_plan(engine, host)
    engine.save_checkpoint(tmp_path)
    engine.checkpoint_engine.wait()
    with held(engine, peaks, "resume"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()
    per_param = {name: peak / MODEL.params for name, peak in peaks.items()}
    assert all(GIVEN_BYTES <= p <= MOST_BYTES_PER_PARAM for p in per_param.values()), per_param


class Apart(Counting):
    """An emulated GPU that records the largest number of bytes in use at one time.

    A GPU tensor that moves to host memory is copied, as with a real GPU.
    """

    def host_adopt(self, tensor):
        here = tensor.untyped_storage()._cdata
        return tensor.clone() if any(ref.cdata == here for ref, _ in self.alive) else tensor


@pytest.mark.parametrize("back", [False, True])
def test_what_leaves_the_device_leaves_before_what_comes_in(back):
    # One plan keeps parameters on the GPU, the other one keeps optimizer state there. If a switch needed memory for
    # both, ebbtide would refuse the new plan on a GPU with room for only one of them, and use a slower plan.
    engine, device = start(ByteGPT(MODEL)), Apart()
    here = plan_for(engine, ["host"], locations=["device"])
    some = here.subgroup_count // 7
    hosts, resident = ["host"] * (here.subgroup_count - some), ["resident"] * some
    away = plan_for(engine, resident + hosts if back else hosts + resident, locations=["host"])
    plans = [away, here, away] if back else [away, here]
    ebbtide.runtime.attach(engine, plans[0], device=device)
    for plan in plans[1:]:
        gc.collect()
        before, device.peak_bytes = device.bytes(), 0
        switch_plan(engine, plan)
    gc.collect()
    now, own = session_of(engine).plan, session_of(engine)
    assert (now.placements, now.parameter_locations) == (plans[-1].placements, plans[-1].parameter_locations)
    once = GIVEN_BYTES * max(own.engine.sizes())
    assert min(before, device.bytes()) > 2 * once
    assert device.peak_bytes <= max(before, device.bytes()) + once
    engine.destroy()


def test_state_and_gradients_leave_the_device_before_others_come_in():
    engine, device = start(ByteGPT(MODEL)), Apart()
    count = plan_for(engine, ["host"]).subgroup_count
    many = {"resident": count // 7, "device": count - count // 7}

    def part(placement, first):
        some, others = [placement] * many[placement], ["host"] * (count - many[placement])
        return plan_for(engine, some + others if first else others + some, staging_slots=1)

    plans = [part(placement, first) for first in (True, False) for placement in many]
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=device)
    own, over = session_of(engine), {}
    for (old, before), (new, after) in permutations(enumerate(plans), 2):
        switch_plan(engine, before)
        gc.collect()
        held_bytes, device.peak_bytes = device.bytes(), 0
        switch_plan(engine, after)
        gc.collect()
        assert own.plan.placements == after.placements
        over[old, new] = device.peak_bytes - max(held_bytes, device.bytes())
    once = GIVEN_BYTES * max(own.engine.sizes())
    assert max(over.values()) <= once, over
    engine.destroy()


def on_device(engine, device):
    """Return the total bytes of GPU memory that optimizer state, parameters, gradients and staging buffers of
    an engine take.
    """
    executor, memory = session_of(engine).executor, device._memory
    held = [t for s in executor.states for t in (*s.state, s.wire, s.gradient)]
    held += [part for slot in executor.slots for part in slot.parts]
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    return sum(t.nbytes for t in held if begin <= t.data_ptr() < end)


def parameter_storages(engine):
    """Return weak references to the storages of DeepSpeed's flat 16-bit parameters below ZeRO-3."""
    return [StorageWeakRef(f.untyped_storage()) for f in engine.optimizer.bit16_groups_flat]


def alive(storages):
    gc.collect()
    return [storage for storage in storages if not storage.expired()]


def are_at(engine, storages):
    """Return whether the storages of the model's parameters and of the tensors that updates write to are exactly the
    given ones.
    """
    there = {storage.cdata for storage in storages}
    held = [*engine.module.parameters()]
    held += [state.wire for state in session_of(engine).executor.states]
    return {tensor.untyped_storage()._cdata for tensor in held} == there


@pytest.mark.parametrize("stage", [3, 2])
def test_offloaded_states_give_the_device_back_and_no_bit_differs(stage, monkeypatch):
    expected = outcome(start(stage=stage), 6)
    engine = start(stage=stage)
    device = PageLocking(2**26)
    plan = plan_for(engine, ["resident", "device", "host"])
    ebbtide.runtime.attach(engine, plan, device=device)
    losses, norms = train(engine, 2)
    before = on_device(engine, device)
    assert before
    parameters = parameter_storages(engine) if stage == 2 else []
    emptied = []
    monkeypatch.setattr(
        get_accelerator(),
        "empty_cache",
        lambda: emptied.append(on_device(engine, device) == 0 and not alive(parameters)),
    )
    engine.offload_states(include=None if stage == 3 else [OffloadStateTypeEnum.lp_params])
    assert emptied[-1], "the cache must be emptied after all memory is released"
    engine.offload_states()  # has no effect the second time
    assert stage == 3 or are_at(engine, parameter_storages(engine))
    assert on_device(engine, device) == 0
    gone = {state.parameter_location for state in session_of(engine).executor.states}
    assert gone == {"host" if stage == 3 else "device"}
    more, more_norms = train(engine, 2, first=2)
    losses, norms = losses + more, norms + more_norms
    engine.reload_states()
    engine.reload_states()
    assert stage == 3 or are_at(engine, parameter_storages(engine))
    now = session_of(engine).plan
    assert (now.placements, now.parameter_locations) == (plan.placements, plan.parameter_locations)
    assert on_device(engine, device) >= before  # parameters are now in ebbtide's own memory too
    more, more_norms = train(engine, 2, first=4)
    ours = all_state(engine), torch.stack(losses + more), norms + more_norms
    engine.destroy()
    assert_same(ours, expected)


def mapped_bytes():
    """Return the total bytes of this process's memory mappings that were made by `mmap.mmap(-1, ...)`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "/dev/zero" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def held_after(attach, folder):
    """Return the bytes of host memory that tensors and mappings still hold after two engines are destroyed.

    The engine objects stay alive, because DeepSpeed never releases them.
    """
    gc.collect()
    before, mapped, engines = HeldBytes().now(), mapped_bytes(), []
    for number in range(2):
        engine = start()
        attach(engine)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=str(number))
        train(engine, 1)
        engine.destroy()
        engines.append(engine)
        del engine
    gc.collect()
    return HeldBytes().now() - before, mapped_bytes() - mapped


def test_engines_that_are_destroyed_hold_no_more_than_stocks(tmp_path):
    def under_a_plan(engine):
        plan = plan_for(engine, ["host", "device", "resident"])
        ebbtide.runtime.attach(engine, plan, device=device_of(list(DEVICES)[-1]))

    stock, _ = held_after(lambda _: None, tmp_path / "stock")
    tensors, mapped = held_after(under_a_plan, tmp_path / "ours")
    assert tensors <= stock
    assert mapped <= 0, "the copy budgets and write buffers must be unmapped"
