"""Tests of `CudaDevice`, the runtime's GPU device, on a fake CUDA with threads as streams: its waits
suffice, and the tests fail if a wait is left out.
"""

import dataclasses
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ebbtide.runtime
import ebbtide.runtime.execution.session
import pytest
import torch
from ebbtide.profiler.watcher import PlainTimer
from ebbtide.runtime import session_of
from ebbtide.runtime.devices import cuda
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.execution.gradients import GradientOps
from ebbtide.runtime.replan.observed import observed_workload
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.simulator.estimates.rank import ONE_RANK
from ebbtide.simulator.schedule import Lane, OpKind

from studies.bench.bits import state_of
from studies.bench.byte_gpt import ByteGPT, ByteGPTConfig
from tests.runtime import fake_cuda
from tests.runtime.contract.test_bits import LOCATIONS, MIX, engine_for, stock
from tests.runtime.contract.training import assert_same, outcome, plan_for, same, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="uses a fake CUDA"),
]


AHEAD = {"speculate": 2, "speculate_visits": 2, "device_sums": 2}  # early updates, and sums that stay on the GPU


def a_minute_later(monkeypatch):
    """Return a hook that makes a minute pass on the GPU."""
    return lambda *_: monkeypatch.setattr(fake_cuda.DEFAULT, "age_s", fake_cuda.DEFAULT.age_s + 60.0)


def attached(engine, pattern, **fields):
    return ebbtide.runtime.attach(engine, plan_for(engine, pattern, **fields), device=CudaDevice())


# The other cases are tested below, with late streams of DeepSpeed too.
@pytest.mark.parametrize(
    "case", ["no_clipping", "fp32_accumulation", "no_persistent_parameters", "offloaded_and_frozen"]
)
def test_stocks_bits(fake, case):
    ours = attached(engine_for(case), MIX, locations=LOCATIONS if "offloaded" in case else None, **AHEAD)
    assert_same(outcome(ours), stock(case))
    assert sum(stream.ran for stream in fake.streams) > 50
    assert not fake.runtime.locked, "every page-locked range must be released"


def test_autograds_thread_runs_on_the_core_that_updates_leave_free(late_deepspeed, monkeypatch):
    free, everywhere, seen = [max(os.sched_getaffinity(0))], os.sched_getaffinity(0), []
    monkeypatch.setattr(cuda, "spared_cores", lambda *_, **__: free)
    ours = attached(engine_for("clipping"), MIX)
    weight = ours.module.head.weight
    late = weight.register_post_accumulate_grad_hook(lambda _: seen.append(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(1) as autograd, monkeypatch.context() as patch:
        backward = torch.Tensor.backward
        patch.setattr(torch.Tensor, "backward", lambda *a, **k: autograd.submit(backward, *a, **k).result())
        trained = outcome(ours)
        assert seen[1:]
        assert all(where == set(free) for where in seen[1:])
        assert os.sched_getaffinity(0) == everywhere
        assert autograd.submit(os.sched_getaffinity, 0).result() == everywhere, "the engine has been destroyed"
    late.remove()
    assert_same(trained, stock("clipping"))


def test_backward_on_the_thread_that_calls_it_is_not_bound(late_deepspeed, monkeypatch):
    everywhere, seen = os.sched_getaffinity(0), []
    monkeypatch.setattr(cuda, "spared_cores", lambda *_, **__: [max(everywhere)])
    ours = attached(engine_for("clipping"), MIX)
    train(ours, 2, each=lambda *_: seen.append(os.sched_getaffinity(0)))
    assert seen == [everywhere] * 2
    ours.destroy()


def test_deepspeed_itself_is_sound_on_late_streams(late_deepspeed):
    # Stock DeepSpeed has correct results on late streams, so that the fake CUDA adds no errors.
    assert_same(outcome(engine_for("small_buckets")), stock("small_buckets"))
    assert sum(stream.ran for stream in late_deepspeed.streams) > 50


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        *((case, 3) for case in ("clipping", "accumulation", "small_buckets", "offloaded_parameters")),
        *((case, 2) for case in ("clipping", "accumulation", "small_buckets", "no_overlap", "large_parameters")),
        ("clipping", 1),
    ],
)  # buckets are small, so the gradients of larger parameters are reduced where autograd left them
def test_stocks_bits_where_deepspeeds_streams_are_late_too(late_deepspeed, case, stage):
    locations = LOCATIONS if "offloaded" in case else None
    ours = attached(engine_for(case, stage), MIX, locations=locations, **AHEAD)
    assert_same(outcome(ours), stock(case, stage))


@pytest.mark.parametrize("case", ["clipping", "accumulation"])
def test_below_zero_3(fake, case):
    ours = attached(engine_for(case, stage=2), MIX, device_sums=2)
    assert_same(outcome(ours), stock(case, stage=2))
    assert not fake.runtime.locked


@pytest.mark.parametrize("stage", [3, 2])
def test_gradients_that_autograd_made_are_not_given_away_under_their_norm(late_deepspeed, stage):
    # Each gradient here is larger than a reduction bucket. It is reduced in place on another stream, and dropped.
    options = {"reduce_bucket_size": 5_000, "stage": stage, "overlap_comm": True}
    assert_same(outcome(attached(start(**options), MIX)), outcome(start(**options)))


@pytest.mark.parametrize("case", ["clipping", "small_buckets"])
def test_a_bucket_waits_for_all_streams_on_which_its_gradients_were_made(late_deepspeed, case):
    # As under torch.compile, whose gradients come from several streams. Here, every second one comes late, on another.
    ours = attached(engine_for(case, 2), MIX, **AHEAD)
    optimizer, side, made = ours.optimizer, late_deepspeed.cuda.Stream(), []
    reduce = optimizer.reduce_ready_partitions_and_remove_grads

    def on_two_streams(param, *group):
        made.append(param)
        if len(made) % 2:
            with late_deepspeed.on_stream(side):
                param.grad.record_stream(side)
                param.grad = param.grad.clone()
                reduce(param, *group)
        else:
            reduce(param, *group)

    optimizer.reduce_ready_partitions_and_remove_grads = on_two_streams
    assert_same(outcome(ours), stock(case, 2))
    assert side.ran > 20


def test_without_that_the_gradients_would_be_given_away(late_deepspeed, monkeypatch):
    # The test replaces `CudaDevice.let_go`, which makes this call, by a function that does nothing. It trains under
    # ZeRO-3. Below ZeRO-3, DeepSpeed 0.19.8 makes the call itself when it averages a gradient, so the error would not
    # occur.
    monkeypatch.setattr(CudaDevice, "let_go", no_wait)
    outcome(attached(start(reduce_bucket_size=5_000), ["device"]), 2)
    assert late_deepspeed.violations
    late_deepspeed.violations.clear()


def test_nothing_waits_for_the_whole_device_in_a_steady_step(late_deepspeed):
    engine = engine_for("clipping")
    timer = engine.tput_timer.config
    assert timer.synchronized, "DeepSpeed's timer must synchronize, or the test shows nothing"
    attached(engine, MIX)
    assert late_deepspeed.counts["compiled"] == 1, "attach must compile the kernel, so that no step waits for it"
    train(engine, 4)
    late_deepspeed.counts.clear()
    train(engine, 3, first=4)
    assert late_deepspeed.counts["compiled"] == 0
    assert late_deepspeed.counts["device"] == 0
    assert late_deepspeed.counts["pageable"] == 0
    # DeepSpeed's own waits: at the end of each backward, and where a module waits for its gather.
    gathering = [m for m in engine.module.modules() if list(m.parameters(recurse=False))]
    assert late_deepspeed.counts["held_up"] <= 3 * (1 + len(gathering)), len(gathering)
    engine.destroy()
    assert timer.synchronized


@pytest.mark.parametrize("pattern", [["host"], ["device"]])
def test_without_page_locks_copies_would_block(fake, monkeypatch, pattern):
    monkeypatch.setattr(CudaDevice, "host_adopt", lambda self, tensor: tensor)
    outcome(attached(engine_for("clipping"), pattern), 2)
    assert fake.counts["pageable"] > 0


def test_readers_ask_nothing_once_all_updates_have_ended(fake, monkeypatch):
    ours = attached(engine_for("clipping"), MIX)
    train(ours, 2)
    executor = session_of(ours).executor
    executor.wait_all()
    assert not executor.busy

    def asked(*args):
        raise AssertionError("the device was queried again")

    with monkeypatch.context() as patch:
        patch.setattr(Completion, "wait_on", asked)
        patch.setattr(Completion, "ended", property(asked))
        executor.wait_parameters(range(len(executor.states)))
    ours.destroy()


def test_the_timeline_has_the_devices_clock(fake):
    ours = attached(engine_for("accumulation"), MIX)
    train(ours, 3 * ours.gradient_accumulation_steps())
    spans = ours.optimizer.timeline().spans
    ours.destroy()
    gradients = {Lane.D2H_GRADIENTS, Lane.H2D_GRADIENTS}
    assert {span.lane for span in spans} >= {Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE} | gradients
    locations = [s for s in spans if s.kind == OpKind.GRADIENT_D2H and s.iteration == 2]
    (backward, *_) = [s for s in spans if s.kind == OpKind.BACKWARD and s.iteration == 2]
    assert locations
    assert all(s.start_s >= backward.start_s for s in locations)
    assert all(span.end_s >= span.start_s >= 0 for span in spans)


def test_the_timeline_is_as_sharp_after_two_days(fake, monkeypatch):
    # CUDA's event times since the start of the process have steps of 16 ms by then.
    ours = attached(engine_for("clipping"), MIX)
    monkeypatch.setattr(fake_cuda.DEFAULT, "age_s", 48 * 3600.0)
    train(ours, 1)  # two days pass between this step and the start
    session_of(ours).executor.history.clear()
    train(ours, 2, first=1)
    lanes = {Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE, Lane.H2D_PARAMETERS}
    spans = [s for s in ours.optimizer.timeline().spans if s.lane in lanes]
    ours.destroy()
    assert len(spans) > 10
    assert all(span.end_s > span.start_s for span in spans)


def test_forward_takes_as_long_as_on_the_device(fake, monkeypatch):
    # The training thread only issues the work, so the clock of that thread does not show the duration.
    ours = attached(engine_for("clipping"), MIX)
    train(ours, 1)

    hook = ours.module.head.register_forward_hook(a_minute_later(monkeypatch))
    recorder = session_of(ours).recorder
    recorder.watch()
    train(ours, 3, first=1)
    hook.remove()
    workload = observed_workload(ours.optimizer, recorder.passes())
    ours.destroy()
    assert sum(layer.forward_s for layer in workload.layers) == pytest.approx(60.0, abs=5.0)
    assert sum(layer.backward_s for layer in workload.layers) < 5.0


def test_a_plain_step_of_a_profile_is_timed_by_the_gpu(fake, monkeypatch):
    # The profiler's timer without hooks in the model reads phases from CUDA events: a forward that takes a minute of
    # the GPU's time takes a minute, although the CPU does not wait for it.
    stock = engine_for("clipping")
    train(stock, 1)

    hook = stock.module.head.register_forward_hook(a_minute_later(monkeypatch))
    monkeypatch.setattr(fake.cuda, "is_available", lambda: True, raising=False)
    monkeypatch.setattr("ebbtide.profiler.watcher.torch", fake)
    timer = PlainTimer(stock)
    timer.begin()
    train(stock, 1, first=1)
    trace = timer.end()
    timer.remove()
    hook.remove()
    stock.destroy()
    assert trace.phases["forward"] == pytest.approx(60.0, abs=5.0)
    assert 0 < trace.computed_s <= trace.phases["backward"] < 5.0


def test_the_time_to_start_the_updates_is_measured_without_waits_for_the_gpu(fake, monkeypatch):
    ours = attached(engine_for("clipping"), MIX)
    train(ours, 1)
    recorder, optimizer, clock = session_of(ours).recorder, ours.optimizer, [0.0]
    times = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("ebbtide.runtime.execution.session.time", times)
    monkeypatch.setattr("ebbtide.runtime.zero.planned.time", times)

    def after(seconds, work):
        def longer(*args, **kwargs):
            clock[0] += seconds
            return work(*args, **kwargs)

        return longer

    class Norm(torch.Tensor):
        is_cuda = True  # the fake keeps its tensors in host memory
        cpu = after(60.0, torch.Tensor.cpu)

    norms_to_host = optimizer._norms_to_host

    def with_norms_on_the_gpu():
        norms = optimizer.norm_for_param_grads
        optimizer.norm_for_param_grads = {key: norm.as_subclass(Norm) for key, norm in norms.items()}
        norms_to_host()
        norms = optimizer.norm_for_param_grads
        optimizer.norm_for_param_grads = {key: norm.as_subclass(torch.Tensor) for key, norm in norms.items()}

    monkeypatch.setattr(optimizer, "_norms_to_host", with_norms_on_the_gpu)
    monkeypatch.setattr(optimizer, "_partition_all_parameters", after(20.0, optimizer._partition_all_parameters))
    recorder._issued.clear()
    train(ours, 2, first=1)
    assert clock[0] == 160.0
    assert list(recorder._issued) == [20.0, 20.0]
    workload = observed_workload(optimizer, recorder.passes(), recorder.step_issue_s)
    ours.destroy()
    assert workload.planned.step_issue_s == 20.0
    assert workload.step_issue_s == pytest.approx(20.0 / ONE_RANK["planned_"].step)


def test_a_wait_for_a_gradients_copy_is_no_time_of_the_gpu(fake, monkeypatch):
    # In this test each gradient copy to host memory takes a minute, and the backward pass has to wait for it.
    monkeypatch.setattr("ebbtide.runtime.execution.gradients.GRADIENTS_UNDER_WAY_BYTES", 0)
    monkeypatch.setattr(fake, "latest_s", 1e6)  # a copy runs when some code waits for it
    copy = CudaDevice.copy

    def pass_a_minute():
        monkeypatch.setattr(fake_cuda.DEFAULT, "age_s", fake_cuda.DEFAULT.age_s + 60.0)

    copies = []

    def takes_a_minute(self, to, source, lane, stream):
        copy(self, to, source, lane, stream)
        if lane is Lane.D2H_GRADIENTS:
            copies.append(lane)
            stream.enqueue(pass_a_minute)

    ours = attached(engine_for("clipping"), ["host"])
    train(ours, 1)
    monkeypatch.setattr(CudaDevice, "copy", takes_a_minute)
    recorder = session_of(ours).recorder
    recorder.watch()
    train(ours, 3, first=1)
    passes = [p for p in recorder.passes() if p.kind == OpKind.BACKWARD]
    ours.destroy()
    assert len(passes) == 3
    assert len(copies) >= 12, "several for each backward"
    assert all(p.end_s - p.start_s > 60.0 * (len(copies) / 3 - 2) for p in passes)
    assert all(p.computed_s < 130.0 for p in passes), "but for the last bucket's, which DeepSpeed waits for"


def test_a_switch_keeps_deepspeeds_flat_buffers_locked(fake):
    # A page lock is released by its address.
    ours = attached(engine_for("clipping", stage=2), MIX)
    losses, norms = train(ours, 3)
    switch_plan(ours, plan_for(ours, ["resident", "device"]))
    assert all(flat.is_pinned() for flats in ours.optimizer._flat._flats for flat in flats)
    fake.counts.clear()
    more, more_norms = train(ours, 1, first=3)
    assert fake.counts["pageable"] == 0
    result = state_of(ours), torch.stack(losses + more), norms + more_norms
    ours.destroy()
    assert_same(result, stock("clipping", stage=2))


def test_another_plan_in_the_middle(fake):
    ours = attached(engine_for("clipping"), ["host"])
    losses, norms = train(ours, 3)
    switch_plan(ours, plan_for(ours, MIX, locations=LOCATIONS))
    more, more_norms = train(ours, 1, first=3)
    result = state_of(ours), torch.stack(losses + more), norms + more_norms
    ours.destroy()
    assert_same(result, stock("clipping"))
    assert not fake.runtime.locked


def no_wait(*args, **kwargs):
    """Do nothing, in place of a wait of the runtime that the test leaves out."""


def no_updates(*_):
    return []


def without_waits(self, how, *args, submit=GradientOps._submit):
    return submit(self, dataclasses.replace(how, after=()), *args)


RACES = {
    "an update does not wait for its gradient": (GradientOps, "arrived", lambda *args: []),
    "forward does not wait for its parameters": (Completion, "wait_on", no_wait),
    "the next sum is fetched before it is on the host": (GradientOps, "_submit", without_waits),
    "offloaded parameters come in before their update": (Executor, "updates_of", no_updates),
}


@pytest.mark.parametrize("race", list(RACES))
def test_a_forgotten_wait_shows(fake, monkeypatch, race):
    # The fake CUDA delays the work on its streams, so that a missing wait has an effect. On a busy machine the training
    # thread may be late too, which hides the missing wait.
    cases = {"sum": "accumulation", "offloaded": "offloaded_parameters"}
    case = next((case for word, case in cases.items() if word in race), "clipping")
    expected = stock(case)
    owner, name, broken = RACES[race]
    monkeypatch.setattr(owner, name, broken)

    def hidden(latest_s):
        fake.latest_s = latest_s
        return same(outcome(attached(engine_for(case), ["host", "device"])), expected)

    assert not all(hidden(latest_s) for latest_s in (fake.latest_s, 0.1, 0.4))


@pytest.mark.parametrize("stage", [3, 2])
def test_page_locks_are_of_what_is_needed(fake, stage):
    model = ByteGPTConfig(layers=10, hidden=64, heads=2, sequence=32)
    engine = start(ByteGPT(model), stage=stage, subgroup_size=150_000)
    attached(engine, ["host"], subgroup=150_000)
    train(engine, 2)
    needed = session_of(engine).host_bytes()
    held = sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in fake.runtime.locked.values())
    assert 0.9 < held / needed <= 1.01, (held, needed)
    engine.destroy()
