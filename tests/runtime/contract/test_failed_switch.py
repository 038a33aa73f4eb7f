"""Tests of a switch to another plan that fails: training goes on under the plan before, with stock DeepSpeed's results,
or says clearly that it cannot go on.
"""

import functools
import gc
import math
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.execution.allocated import LostPlanError, SwitchError, threads_of

from studies.bench.byte_gpt import SIZES, Batches, train_step
from tests.runtime.contract.test_peaks import Apart
from tests.runtime.contract.training import (
    DEVICES,
    SUBGROUP,
    all_state,
    assert_same,
    device_of,
    outcome,
    plan_for,
    start,
)

pytestmark = pytest.mark.usefixtures("only_rank")
RUNTIME = Path(ebbtide.runtime.__file__).parent
SWITCHING = ("execution", "zero", "devices")  # folders with the code that a switch runs
ACCUMULATION = 2
DEADLINE_S = 60.0  # limit for a step and for the end of an engine, which take milliseconds


class Planted(torch.OutOfMemoryError):
    """An error that a test raises in the runtime."""


class Failing:
    """A profiler of the calling thread that raises an error at one of the calls that ebbtide's runtime makes.

    A call has the names of the caller, its line and the function called. The error is raised at the beginning of the
    function.

    Args:
        at: Name of the call, and its number among the calls of this name. None raises nothing.
        kind: Type of the error.
    """

    def __init__(self, at=None, kind=Planted):
        self._at, self._kind, self.calls = at, kind, Counter()
        self.fired = False

    def __call__(self, frame, event, called):
        caller = frame.f_back if event == "call" else frame
        if event not in ("call", "c_call") or caller is None or not _switches(caller.f_code.co_filename):
            return
        name = frame.f_code.co_qualname if event == "call" else getattr(called, "__qualname__", "")
        if name.endswith("__exit__"):  # releasing a lock cannot fail
            return
        key = caller.f_code.co_qualname, caller.f_lineno, name
        if self._at == (key, self.calls[key]):
            self.fired = True
            raise self._kind(f"planted at {self._at}")
        self.calls[key] += 1

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


@functools.cache  # cached, because it is called for every call in a switch
def _switches(file):
    path = Path(file)
    return path.is_relative_to(RUNTIME) and path.relative_to(RUNTIME).parts[0] in SWITCHING


MIX = ["host", "device", "resident", "stored"]
OTHER = ["resident", "stored", "host", "device"]
EARLY = {"speculate": 99, "speculate_visits": 99, "host_slots": 9}
LAYOUTS = {
    "stage 3": {"stage": 3},
    "parts of subgroups": {"stage": 3, "subgroup_size": 4 * SUBGROUP},
    "stage 2": {"stage": 2},
}
DEVICE = list(DEVICES)[-1]


def begun(layout, device=None, back=False):
    """Return an engine under the first of two plans, the plan's session, and the second plan."""
    engine = start(clipping=0.5, accumulation=ACCUMULATION, **LAYOUTS[layout])
    if layout == "parts of subgroups":
        mix, other = MIX[:3], ["resident", "host", "device"]
        plans = [plan_for(engine, mix, pieces=True, **EARLY)]
        plans.append(plan_for(engine, other, pieces=True, locations=["host", "device"]))
    else:
        locations = {} if layout == "stage 2" else {"locations": ["host", "device"]}
        plans = [plan_for(engine, MIX, **({} if layout == "stage 2" else EARLY))]
        folder = {"storage_dir": plans[0].storage_dir} if plans[0].count("stored") else {}
        plans.append(plan_for(engine, OTHER, **locations, **folder))
    first, second = plans[::-1] if back else plans
    ebbtide.runtime.attach(engine, first, device=device or device_of(DEVICE))
    return engine, session_of(engine), second


def micro_batch(engine, number):
    return train_step(engine, Batches(2, SIZES["tiny"].sequence).at(number, engine.device))


def result_of(engine, losses):
    state = all_state(engine)
    engine.destroy()
    return state, torch.stack(losses), None


def stock_result(layout, count):
    state, losses, _ = outcome(start(clipping=0.5, accumulation=ACCUMULATION, **LAYOUTS[layout]), count)
    return state, losses, None


def calls_of(layout, back):
    """Return the calls that a switch makes, at each place in the code the first one and the last one."""
    engine, own, other = begun(layout, back=back)
    for number in range(ACCUMULATION + 1):
        micro_batch(engine, number)
    with Failing() as seen:
        own.switch(other)
    engine.destroy()
    return [(key, number) for key, count in seen.calls.items() for number in sorted({0, count - 1})]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # for generators that are closed
@pytest.mark.parametrize(("layout", "back"), [("stage 3", False), ("parts of subgroups", True), ("stage 2", False)])
def test_an_error_at_any_call_of_a_switch_leaves_the_plan_before(layout, back):
    # The plan is the old one, unless the switch can do without what has failed.
    calls = calls_of(layout, back)
    assert len(calls) > 200, "the runtime's calls must be seen"
    engine, own, other = begun(layout, back=back)
    losses = [micro_batch(engine, number) for number in range(ACCUMULATION)]
    raised = 0
    for call in calls[:: 1 if "EVERY_CALL" in os.environ else 7]:
        before = own.plan
        try:
            with Failing(call):
                own.switch(other)
        except (SwitchError, Planted):
            raised += 1
            assert own.plan.model_copy(update={"overlap_forward": before.overlap_forward}) == before, call
        else:
            own.switch(before)
        losses.append(micro_batch(engine, len(losses)))
    assert raised > len(losses) / 2
    assert_same(result_of(engine, losses), stock_result(layout, len(losses)))


def ended_within(call):
    """Call a function in another thread, and return its error, or None. Fail if it does not end within seconds."""
    found = []

    def run():
        try:
            call()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert found, "this call hangs"
    return found[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("broken", ["place", "Executor"])
def test_a_plan_that_cannot_be_restored_ends_training_clearly(layout, broken, monkeypatch, tmp_path):
    before = {*threading.enumerate()}
    engine, own, other = begun(layout)
    micro_batch(engine, 0)

    def fail(*_, **__):
        raise Planted("planted")

    for module in ("session", "allocated"):
        monkeypatch.setattr(f"ebbtide.runtime.execution.{module}.{broken}", fail, raising=False)
    with pytest.raises(LostPlanError, match=r"Planted: planted\. .* Planted: planted\. .*resume from the newest"):
        own.switch(other)
    for use in (
        lambda: micro_batch(engine, 1),
        engine.step,
        lambda: engine.save_checkpoint(str(tmp_path)),
        lambda: own.switch(other),
    ):
        assert isinstance(ended_within(use), LostPlanError)
    assert ended_within(engine.destroy) is None
    left = [thread for thread in threading.enumerate() if thread not in before]
    left = [thread for thread in left if thread.name != "ebbtide-sigterm"]  # a process keeps this thread
    for thread in left:
        thread.join(5)  # a thread that was told to end may not have run since
    assert not [thread.name for thread in left if thread.is_alive()]


class Short(Apart):
    """An emulated GPU with a limit of memory, which tests set.

    Attributes:
        limit_bytes: Bytes of GPU memory that there are. None sets no limit.
    """

    limit_bytes = None

    def device_empty(self, elements, dtype):
        if self.limit_bytes is not None and self.bytes() + elements * dtype.itemsize > self.limit_bytes:
            raise torch.OutOfMemoryError("no GPU memory is left")
        return super().device_empty(elements, dtype)


def switched(own, plan):
    """Switch to a plan, and return the error, or None."""
    try:
        own.switch(plan)
    except (SwitchError, LostPlanError) as error:
        return error
    return None


def test_a_switch_that_runs_out_of_device_memory_gives_back_what_it_took():
    # Parameters in host memory leave GPU memory through buffers, without which the plan cannot run.
    engine, device, failed = start(clipping=0.5, accumulation=ACCUMULATION), Short(), 0
    first = plan_for(engine, ["host"], locations=["host"])
    other = plan_for(engine, ["resident", "host"], locations=["host"])
    ebbtide.runtime.attach(engine, first, device=device)
    own, losses = session_of(engine), []
    own.switch(other)
    gc.collect()
    needed_bytes = device.bytes()
    for percent in range(0, 125, 4):
        own.switch(first)
        losses.append(micro_batch(engine, len(losses)))
        gc.collect()
        before, held_bytes = own.plan, device.bytes()
        device.limit_bytes = held_bytes + needed_bytes * percent // 100
        error = switched(own, other)
        device.limit_bytes = None
        if error is not None:
            gc.collect()
            failed += 1
            assert (own.plan, device.bytes()) == (before, held_bytes), "the error itself must keep nothing either"
            assert type(error) is SwitchError
            assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert own.plan.ways == other.ways
    assert failed > 3
    assert_same(result_of(engine, losses), stock_result("stage 3", len(losses)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses a fake CUDA")
def test_a_refused_page_lock_leaves_no_other_lock_behind(fake):
    engine = start(clipping=0.5, accumulation=ACCUMULATION)
    first, other = plan_for(engine, ["resident", "device"]), plan_for(engine, ["host"], **EARLY)
    ebbtide.runtime.attach(engine, first, device=CudaDevice())
    own, losses, failed = session_of(engine), [], 0
    own.switch(other)
    needed_bytes = sum(fake.runtime.locked.values())
    for percent in range(0, 105, 5):
        own.switch(first)
        losses.append(micro_batch(engine, len(losses)))
        before = sorted(fake.runtime.locked.values())
        fake.runtime.limit_bytes = sum(before) + (needed_bytes - sum(before)) * percent / 100
        error = switched(own, other)
        fake.runtime.limit_bytes = math.inf
        if error is not None:
            failed += 1
            assert type(error) is SwitchError, error
            assert own.plan.ways == first.ways
            assert sorted(fake.runtime.locked.values()) == before
    assert own.plan.ways == other.ways
    assert failed > 5
    assert_same(result_of(engine, losses), stock_result("stage 3", len(losses)))


@pytest.mark.parametrize("stage", [3, 2])
def test_states_that_could_not_be_offloaded_are_not_set_aside(stage, monkeypatch):
    engine = start(clipping=0.5, accumulation=ACCUMULATION, stage=stage)
    ebbtide.runtime.attach(engine, plan_for(engine, ["resident", "host"]), device=device_of(DEVICE))
    own, losses = session_of(engine), [micro_batch(engine, 0)]
    before = own.plan
    monkeypatch.setattr("ebbtide.runtime.execution.session.threads_of", planted_once())
    with pytest.raises(SwitchError):
        engine.optimizer.offload_states()
    assert own.set_aside is None
    assert own.plan == before
    engine.optimizer.reload_states()
    losses += [micro_batch(engine, number) for number in (1, 2, 3)]
    assert_same(result_of(engine, losses), stock_result(f"stage {stage}", len(losses)))


def test_the_plan_before_overlaps_forward_as_the_new_plan_says(monkeypatch):
    # A failed switch leaves the new plan's overlap, since other ranks may have switched.
    engine = start()
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=device_of(DEVICE))
    own, before = session_of(engine), session_of(engine).plan
    assert before.overlap_forward
    monkeypatch.setattr("ebbtide.runtime.execution.session.threads_of", planted_once())
    with pytest.raises(SwitchError):
        own.switch(plan_for(engine, ["resident"], overlap_forward=False))
    assert own.plan == before.model_copy(update={"overlap_forward": False})
    engine.destroy()


def planted_once():
    """Return a stand-in for `threads_of` that fails at its first call."""
    calls = []

    def once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise Planted
        return threads_of(*args)

    return once


def test_half_way_what_is_on_a_drive_already_is_checked_when_it_is_read():
    engine = start()
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=device_of(list(DEVICES)[-1]))
    session = session_of(engine)
    assert session.stored.subgroups() == frozenset()
    session.executor.states[1].placement = "stored"  # the state that `Movement` leaves
    assert session.stored.subgroups() == {1}
    session.executor.states[1].placement = "host"
    engine.destroy()
