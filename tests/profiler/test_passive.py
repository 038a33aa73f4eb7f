"""Tests of `PassiveProfile`, which measures a DeepSpeed engine step by step while a script trains it.

After the profile, the engine must be as it was before.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from ebbtide.profiler import SampledProfile
from ebbtide.profiler.activations import AllocatorDeltas, SavedTensors
from ebbtide.profiler.engine import PassiveProfile
from ebbtide.profiler.progress import ProgressFile, read_progress
from ebbtide.profiler.script import ProfiledScript, ScriptError
from ebbtide.profiler.watcher import PlainTimer, ProfiledStep
from ebbtide.profiler.workload import WARMUP_STEPS, _backward_s, _base_bytes, workload_of
from ebbtide.simulator import Layer, MemoryPoint
from torch import nn

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, train_step
from tests.runtime.contract.training import start

BATCHES = Batches(2, 32)


@pytest.fixture
def engine(only_rank):
    live = start(ByteGPT(SIZES["tiny"]))
    yield live
    live.destroy()


def train(engine, steps, first=0):
    for step in range(first, first + steps):
        train_step(engine, BATCHES.at(step))


def test_each_step_is_filed_in_its_own_trace(engine):
    """Check that each step's measured time is in the profiler's trace of the same step."""
    profile = PassiveProfile(engine, 3)
    train(engine, profile.needed)
    assert [trace.phases["step"] > 0 for trace in profile._traces] == [True] * 6
    assert [trace.bare for trace in profile._traces] == [False] * 3 + [True] * 3
    assert profile.workload.phase_times["step"].n == 3
    whole = [trace.ended_s - trace.began_s for trace in profile._traces]
    for trace, iteration_s in zip(profile._traces, whole, strict=True):
        assert sum(trace.phases.values()) <= iteration_s


def test_memory_is_sampled_while_nothing_is_called(engine):
    """Check that a thread of the profiler samples memory between two calls of hooks."""
    profile = PassiveProfile(engine, 1)
    train(engine, WARMUP_STEPS)
    watcher = profile._watcher
    before = len(watcher.trace.memory)
    for _ in range(1000):
        if len(watcher.trace.memory) >= before + 3:
            break
        torch.rand(1000).sum()
        watcher._done.wait(0.01)
    assert len(watcher.trace.memory) >= before + 3
    profile.stop()
    assert not watcher._sampler.is_alive()


@pytest.mark.parametrize("iterations", [0, -3])
def test_no_iterations_are_refused(engine, iterations):
    with pytest.raises(ValueError, match=f"iterations must be >= 1, but got {iterations}"):
        PassiveProfile(engine, iterations)
    assert "step" not in vars(engine)


def test_the_engine_is_left_as_it_was(engine):
    hooks = len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)
    of_deepspeed = next(engine.module.parameters()).partition
    profile = PassiveProfile(engine, 1)
    train(engine, WARMUP_STEPS)
    assert {"step", "backward"} <= set(vars(engine))
    train(engine, 2)
    assert type(engine.optimizer).__name__ == "OneRankStage3", "the last measured step has begun"
    train(engine, 1)
    assert profile.workload is not None
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    assert next(engine.module.parameters()).partition is of_deepspeed
    for owner, name in ((engine, "step"), (engine, "backward"), (engine.optimizer, "partition_grads")):
        assert name not in vars(owner)
    assert (len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)) == hooks
    train(engine, 2)
    assert profile.steps == WARMUP_STEPS + 3


def test_steps_that_the_loss_scaler_skips_are_left_out(engine):
    profile = PassiveProfile(engine, 2)
    train(engine, WARMUP_STEPS)
    engine.skipped_steps += 1  # DeepSpeed counts an overflow in this way
    train(engine, 1)
    assert profile.steps == WARMUP_STEPS
    train(engine, 5)
    assert profile.workload.phase_times["step"].n == 2


@pytest.fixture
def waiting_hooks(monkeypatch):
    """Treat hooks in the model as if they lengthened each step, as they do on CUDA. Return the list of the clock's
    readings that wait for the GPU.
    """
    readings = []

    def now_s():
        readings.append(time.perf_counter())
        return readings[-1]

    monkeypatch.setattr("ebbtide.profiler.engine.hooks_lengthen_steps", lambda: True)
    monkeypatch.setattr("ebbtide.profiler.watcher._now_s", now_s)
    return readings


def test_phases_are_timed_in_steps_that_nothing_lengthens(engine, waiting_hooks):
    """Check that phases are timed only in every second step, without hooks and without waits for the GPU."""
    profile = PassiveProfile(engine, 2)
    train(engine, WARMUP_STEPS)
    waits = []
    for number in range(7):
        before = len(waiting_hooks)
        train(engine, 1, first=number)
        waits.append(len(waiting_hooks) - before)
    assert profile.steps == profile.needed == WARMUP_STEPS + 7
    # A plain step reads the clock only at its end. Then the record of the next step begins.
    assert [trace.plain for trace in profile._traces] == [False, True, False, True, True, True]
    assert [trace.bare for trace in profile._traces] == [False] * 4 + [True] * 2
    assert waits[1] == 2
    assert waits[3:] == [1, 0, 1, 1]
    assert min(waits[0], waits[2]) > 20
    plain, watched, bare = profile._traces[1:4:2], profile._traces[:4:2], profile._traces[4:]
    found = profile.workload
    for phase in ("forward", "backward", "step"):
        assert found.phase_times[phase].median == statistics.median(t.phases[phase] for t in plain)
    assert found.forward_s == pytest.approx(found.phase_times["forward"].median)
    assert found.step_issue_s == statistics.median(t.step_issue_s for t in plain)
    assert found.planned.step_issue_s == statistics.median(t.step_issue_s for t in bare)
    assert found.planned.forward_s == pytest.approx(statistics.median(t.phases["forward"] for t in bare))
    assert all(0 < t.step_issue_s < t.phases["step"] for t in plain + bare)
    assert not any(trace.units or trace.memory for trace in plain)
    seconds = {name: statistics.median(t.units[name] for t in watched) for name in watched[0].units}
    named = {layer.name: layer.forward_s for layer in found.layers}
    assert named["blocks.1"] / named["blocks.0"] == pytest.approx(seconds["blocks.1"] / seconds["blocks.0"])


def test_a_script_must_take_the_steps_of_both_kinds(tmp_path, waiting_hooks, only_rank):
    """Check that progress and errors of `tune profile --train-script` count further steps, timed without hooks."""
    (tmp_path / "train.py").write_text(
        "from tests.runtime.contract.training import start, train\nengine = start()\ntrain(engine, 8)\n"
    )
    progress = ProgressFile(tmp_path, 0)
    script = ProfiledScript(tmp_path / "work.json", 3, 0, progress, go_on=False)
    with pytest.raises(ScriptError, match=r"at least 14 optimizer steps .* but ended after 8"):
        script.run(tmp_path / "train.py", [])
    assert read_progress(tmp_path)[0].needed == 14


def test_single_steps_of_both_kinds_alternate(engine, waiting_hooks):
    profile = SampledProfile(engine)
    for number in range(3):
        profile.step(*BATCHES.at(number))
        assert "partition_grads" not in vars(engine.optimizer)
    assert [trace.plain for trace in profile._traces] == [False, True, False]
    assert profile.workload().phase_times["forward"].n == 1


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bucket", [5_000, 500_000_000])
def test_a_plain_step_tells_when_all_gradients_are_computed(only_rank, micro_batches, bucket):
    """Check that the time until all gradients are computed covers each micro-batch's backward, and that only the
    gradients that DeepSpeed moved before are part of this time. A large bucket is moved after backward.
    """
    engine = start(accumulation=micro_batches, reduce_bucket_size=bucket)
    timer = PlainTimer(engine)
    timer.begin()
    for number in range(micro_batches):
        engine.backward(engine(*BATCHES.at(number)))
        timer.timed("step", engine.step)
    trace = timer.end()
    assert len(timer._computed) == micro_batches
    assert (len(timer._paths) > 0, len(timer._late_paths) > 0) == (bucket == 5_000, True)
    timer.remove()
    assert "partition_grads" not in vars(engine.optimizer)
    engine.destroy()
    assert 0 <= trace.gradient_path_s < trace.computed_s < trace.phases["backward"]


@dataclass
class Stamp:
    """A point in a made-up CPU's and GPU's time, in seconds."""

    host_s: float
    device_s: float

    def seconds_to(self, later):
        return later.device_s - self.device_s


def pairs(*some):
    return [(Stamp(*begin), Stamp(*end)) for begin, end in some]


@pytest.mark.parametrize(
    ("computed", "path_s", "computed_s"),
    [
        (pairs(((0, 0), (10, 10))), 3.0, 10.0),  # the CPU is the bottleneck: its 2 s and the GPU's 1 s
        (pairs(((0, 0), (8, 10))), 1.0, 10.0),  # the CPU is 2 s ahead
        (pairs(((0, 0), (1, 10))), 0.0, 10.0),  # far ahead
        ([], 7.0, 0.0),  # unknown: with what is moved after backward, whose CPU is not ahead
        (pairs(((0, 0), (10, 10)), ((0, 0), (10, 10))), 7.0, 0.0),  # not once per backward
    ],
)
def test_what_gradient_copies_add_to_a_plain_backward(computed, path_s, computed_s):
    """Check the time by which DeepSpeed's gradient copies lengthen backward, from made-up times of the CPU and the GPU.

    The shorter of the two times of each copy counts, less the time by which the CPU is ahead of the GPU.
    """
    timer = PlainTimer.__new__(PlainTimer)
    timer.trace = ProfiledStep(plain=True)
    timer._phases = [("backward", *pairs(((0, 0), (20, 20)))[0])]
    timer._computed = computed
    timer._paths = pairs(((1, 1), (3, 6)), ((4, 7), (9, 8)))
    timer._late_paths = pairs(((12, 12), (16, 17)))
    trace = timer.end()
    assert (trace.gradient_path_s, trace.computed_s) == (path_s, computed_s)
    assert trace.phases["backward"] == 20


@pytest.mark.parametrize("name", ["_partition_all_parameters", "_get_norm_groups"])
def test_the_time_before_the_updates_counts_within_the_step_alone(engine, monkeypatch, name):
    """Check that both parts of the step before the updates count, and that calls outside of a step do not."""
    clock, work = [0.0], getattr(engine.optimizer, name)

    def longer(*args, **kwargs):
        clock[0] += 20.0
        return work(*args, **kwargs)

    monkeypatch.setattr(engine.optimizer, name, longer)
    monkeypatch.setattr("ebbtide.profiler.watcher.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    timer = PlainTimer(engine)
    timer.begin()
    engine.backward(engine(*BATCHES.at(0)))
    timer.timed("step", engine.step)
    engine.optimizer._partition_all_parameters()
    trace = timer.end()
    timer.remove()
    assert trace.step_issue_s == 20.0


def test_backward_under_a_plan_is_the_shorter_of_two_measurements():
    """Check backward's time of steps with hooks, which wait for the GPU, and without, which wait for copies."""
    watched = [ProfiledStep(phases={"backward": 0.47}, gradient_path_s=0.23)]
    launched = [ProfiledStep(plain=True, phases={"backward": 0.27}, computed_s=0.26, gradient_path_s=0.07)]
    copied = [ProfiledStep(plain=True, phases={"backward": 0.90}, computed_s=0.80, gradient_path_s=0.01)]
    unknown = [ProfiledStep(plain=True, phases={"backward": 0.27}, gradient_path_s=0.07)]
    assert _backward_s([], watched) == pytest.approx(0.24)
    assert _backward_s(launched, watched) == pytest.approx(0.19)
    assert _backward_s(copied, watched) == pytest.approx(0.24)
    assert _backward_s(unknown, watched) == pytest.approx(0.20)


def test_an_optimizer_that_is_replaced_ends_the_profile(engine):
    profile = PassiveProfile(engine, 2)
    stock = type(engine.optimizer)
    engine.optimizer.__class__ = type("Other", (stock,), {})
    train(engine, WARMUP_STEPS)
    assert "not with ebbtide.initialize" in str(profile.problem)
    assert "step" not in vars(engine)
    engine.optimizer.__class__ = stock


def test_evaluation_in_between_does_not_count(engine):
    profile = PassiveProfile(engine, 1)
    train(engine, WARMUP_STEPS)
    with torch.no_grad():
        for step in range(3):
            engine(*BATCHES.at(step))
    train(engine, 3)
    assert profile.workload.tokens_per_iteration == 64


def test_a_workload_tells_tokens_layers_and_its_peak(engine):
    profile = PassiveProfile(engine, 3)
    train(engine, profile.needed)
    found = profile.workload
    assert (found.samples_per_iteration, found.tokens_per_iteration) == (2, 64)
    held = {layer.name: layer.activation_bytes for layer in found.layers}
    # A block keeps at least its input and the widened state in bf16: 2 x 32 x (64 + 256).
    assert held["blocks.0"] == held["blocks.1"] >= 2 * 32 * 320 * 2
    assert held["head"] >= 2 * 32 * 256 * 2, "the head keeps its logits"
    assert {point.layer for point in found.memory_curve} >= {"blocks.0", "blocks.1", ""}
    peak = max(point.device_bytes for point in found.memory_curve)
    assert found.device_base_bytes + sum(held.values()) >= peak


def test_what_slows_the_forward_is_counted_in_one_step_alone(engine, monkeypatch):
    begun = []
    begin = SavedTensors.begin
    monkeypatch.setattr(SavedTensors, "begin", lambda self: (begun.append(1), begin(self)))
    profile = PassiveProfile(engine, 3)
    train(engine, profile.needed)
    assert profile.workload.phase_times["forward"].n == 3
    assert len(begun) == 1
    sampled = SampledProfile(engine)
    for step in range(2):
        sampled.step(*BATCHES.at(step))
    assert len(begun) == 2
    assert sampled.workload().layers[2].activation_bytes > 0


def test_what_activations_do_not_explain_of_the_peak_is_always_there():
    def trace(*device_bytes):
        points = [MemoryPoint(t_s=0, phase="other", device_bytes=n) for n in device_bytes]
        return ProfiledStep(memory=points)

    traces = [trace(100, 400), trace(120, 900)]
    layers = [Layer(params=1, forward_s=0, backward_s=0, activation_bytes=600)]
    assert _base_bytes(traces, traces[1], layers) == 300
    assert _base_bytes(traces, traces[1], layers * 2) == 100, "the least memory that was ever in use"


def test_a_step_without_backward_is_no_workload():
    with pytest.raises(ValueError, match="every profiled step must run the model's backward, but step"):
        workload_of(None, [ProfiledStep(phases=defaultdict(float, forward=1.0))], "none")


def test_saved_tensors_count_each_storage_once_and_no_parameter():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    x = torch.ones(4, 8, requires_grad=True)
    saved = SavedTensors(model)
    saved.begin()
    saved.enter("linear")
    hidden = model[0](x)
    saved.enter("tanh")
    y = model[1](hidden)
    (y * y).sum()
    saved.end()
    assert dict(saved.bytes_by_unit) == {"linear": 128, "tanh": 128}
    (model[0](x) * 2).exp().sum()  # no hook reacts any more
    assert sum(saved.bytes_by_unit.values()) == 256


def test_allocator_deltas_leave_out_what_is_gathered():
    in_use = iter([1000, 1500, 1600, 1700, 1900])
    gathered = iter([0, 400, 400, 0, 0])
    deltas = AllocatorDeltas(lambda: next(in_use), lambda: next(gathered))
    deltas.begin()  # holds 1000
    deltas.enter("a")  # 1100: before any unit
    deltas.leave("a")  # 1200
    deltas.enter("b")  # 1700: after a, before b
    deltas.leave("b")  # 1900
    assert dict(deltas.bytes_by_unit) == {"": 100, "a": 100 + 500, "b": 200}
