"""Tests of what ``plan="auto"`` computes from the first training steps, which it measures: the workload, and
the speeds of the machine's copies and updates.
"""

import random
import time
from itertools import pairwise
from types import SimpleNamespace

import ebbtide.runtime
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.devices.passes import Pass, Place, WatchedPasses, disjoint
from ebbtide.runtime.execution.gradients import ParameterSlice
from ebbtide.runtime.execution.session import Recorder
from ebbtide.runtime.replan.auto import better_plan, host_plan
from ebbtide.runtime.replan.observed import as_observed, gradient_s, observed_workload
from ebbtide.runtime.zero.gathers import CollectiveGathers
from ebbtide.runtime.zero.subgroup_size import piece_elements
from ebbtide.simulator import Machine, OpKind, Quantity, build_schedule
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.schedules.footprint import footprint

from studies.bench.byte_gpt import SIZES, Batches
from studies.one_answer.__main__ import _job, _machine
from studies.one_answer.automatic import automatic, simulated_rates, simulated_workload
from tests.machines import node
from tests.runtime.contract.training import EMULATED, plan_for, slowed, start, train


class Engine:
    """A stand-in for a training engine with two parameters in the first subgroup and one in the second."""

    shares_state = False
    parts = (("a", 0, 0, 60), ("a", 0, 60, 20), ("b", 1, 0, 20))

    def sizes(self):
        return (90, 20)  # with padding

    def slices(self):
        return {n: ParameterSlice(s, offset, size, real=True) for n, (_, s, offset, size) in enumerate(self.parts)}

    def units(self):
        return {(s, offset): unit for unit, s, offset, _ in self.parts}

    def gathers(self):
        return None

    def bucket_params(self):
        return 0

    def micro_batches(self):
        return 3

    def wire_dtype(self):
        return "bf16"

    def gradient_bytes(self):
        return 2

    def clips(self):
        return True

    def recomputes(self):
        return None

    def update_rule(self):
        return SimpleNamespace(name="adam")

    def zero_stage(self):
        return 3


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 2.0), ("emulated", 0.0)])
def test_the_time_to_start_the_updates_counts_beside_a_gpu_alone(monkeypatch, device, seconds):
    now = iter([0.0, 1.0, 10.0, 12.0, 20.0, 27.0])
    monkeypatch.setattr("ebbtide.runtime.execution.session.time", SimpleNamespace(perf_counter=lambda: next(now)))
    recorder = Recorder(SimpleNamespace(name=device, watched=None, moment=lambda: None), origin_s=0.0)
    assert recorder.step_issue_s == 0.0
    for _ in range(3):
        recorder.step_begins()
        recorder.issue_ends()
    assert recorder.step_issue_s == seconds


def backward(step, slower=1.0):
    """Return a recorded backward pass of 10 s, 4 s of them waits. The gradient of its last parameter comes first."""
    at = 1000.0 * step
    made = ((at + 3.0, (Place(1, 0, 20),)), (at + 8.0, (Place(0, 60, 20),)), (at + 9.0, (Place(0, 0, 60),)))
    return Pass(OpKind.BACKWARD, step, at, at + 10.0 * slower, ((at + 1.0, at + 2.0), (at + 4.0, at + 7.0)), made)


def test_waits_for_copies_are_no_time_of_the_gpu():
    passes = [backward(0, slower=50.0), backward(1), backward(2, slower=1.1), backward(3)]
    passes += [Pass(OpKind.FORWARD, n, 1000.0 * n - 10.0, 1000.0 * n - 7.0) for n in range(4)]
    seen = observed_workload(Engine(), passes)
    assert seen.backward_s == pytest.approx(3 * 6.0), "of three micro-batches, without the first step and the waits"
    assert seen.forward_s == pytest.approx(3 * 3.0)
    assert [(layer.name, layer.params) for layer in seen.layers] == [("a", 90), ("b", 20)]
    assert [layer.backward_s for layer in seen.layers] == pytest.approx([4.0, 2.0])
    assert observed_workload(Engine(), []).forward_s == 0.0


def test_what_backward_computes_is_divided_among_gradients():
    found = gradient_s([backward(1)])
    assert found == pytest.approx({(1, 0): 2.0, (0, 60): 2.0, (0, 0): 2.0}), "the last one has the rest"
    assert gradient_s([]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_intervals_are_joined(seed):
    rng = random.Random(seed)
    some = [(start, start + rng.randint(-3, 9)) for start in rng.choices(range(60), k=12)]
    joined = disjoint(some)
    covered = {n for start, end in some for n in range(start, end)}
    assert {n for start, end in joined for n in range(start, end)} == covered
    assert all(end < start for (_, end), (start, _) in pairwise(joined))
    whole = Pass(OpKind.FORWARD, 0, 0.0, 70.0, joined)
    assert whole.computed_s == 70 - len(covered)
    assert whole.computed_between_s(20.0, 40.0) == sum(n not in covered for n in range(20, 40))


JOBS = [
    ("Llama 3.2 1B", "a100-node", {"accumulation": 16}, 1.0),
    ("Llama 2 13B", "a100-node", {"gpus": 4}, 0.7),
    ("Llama 3.2 1B", "rtx4090-x4", {"gpus": 4, "zero_stage": 2}, 0.7),
    ("Mistral 7B", "h100-node", {"device_memory_bytes": 30 * 2**30}, 1.0),
]


@pytest.mark.parametrize(("model", "name", "about", "slower"), JOBS)
def test_watched_steps_show_the_work_and_the_rates_whatever_shares_the_machine(model, name, about, slower):
    # In this test the measured steps come from a simulation. The computed workload must have the times of the simulated
    # workload. In a new simulation with the computed workload and speed, CPU updates must be as fast as in the measured
    # steps.
    believed = Machine.preset(name)
    update_rate = slower * believed.host_adam_params_per_s.median
    true = believed.with_rates(host_adam_params_per_s=update_rate)
    work = estimated(_job(model, about), true).planned  # what it takes with all parameters in GPU memory
    plan = host_plan(max(work.subgroups), len(work.subgroups))
    schedule = build_schedule(work, plan)
    watched = simulate_fast(schedule, true)
    seen = simulated_workload(work, true, schedule, watched)
    assert seen.planned.backward_s == pytest.approx(work.backward_s, rel=1e-6)
    assert seen.planned.forward_s == pytest.approx(work.forward_s, rel=1e-6)
    assert seen.step_gather_s == pytest.approx(work.step_gather_s, rel=1e-6)
    by_params, before_s = [], 0.0
    for layer in reversed(work.layers):  # another rank has the gradients of the last layers
        before_s += layer.backward_s
        if layer.params:
            by_params.insert(0, before_s)
            before_s = 0.0
    assert [layer.backward_s for layer in seen.planned.layers] == pytest.approx(by_params, rel=1e-6)
    rates = simulated_rates(schedule, watched, seen, believed)
    found = as_observed(believed, rates, seen, plan)
    schedule = build_schedule(seen, plan)
    again = simulated_rates(schedule, simulate_fast(schedule, found), seen, found)
    assert again["host_adam_params_per_s"] == pytest.approx(rates["host_adam_params_per_s"], rel=0.02)


RAN = [(3, gpus, location) for gpus in (1, 4) for location in ("device", "host")]
RAN += [(stage, gpus, "device") for stage in (1, 2) for gpus in (1, 4)]


@pytest.mark.parametrize("layer_issue_s", [1e-4, 8e-4, 2e-3])
@pytest.mark.parametrize(("stage", "gpus", "location"), RAN)
def test_watched_steps_foretell_the_plan_that_ran_and_others(stage, gpus, location, layer_issue_s):
    # The machine's GPU takes all, about half or almost none of the time, and the training thread the rest.
    machine = Machine.preset("h100-node").model_copy(update={"layer_issue_s": Quantity.exact(layer_issue_s)})
    work = estimated(_job("Mistral 7B", {"gpus": gpus, "zero_stage": stage}), machine)
    plan = host_plan(max(work.subgroups), len(work.subgroups), location)

    def iteration_s(workload, plan):
        return simulate_fast(build_schedule(workload, plan), machine).iteration_s

    schedule = build_schedule(work, plan)
    seen = simulated_workload(work, machine, schedule, simulate_fast(schedule, machine), location)
    # With parameters in host memory, the time to launch a layer may show in part, where its copy ends just in time.
    # Below ZeRO-3, the gradients of other ranks are not seen.
    near = 1e-6 if location == "device" and (stage == 3 or gpus == 1) else 2e-3
    assert iteration_s(seen, plan) == pytest.approx(iteration_s(work, plan), rel=near)
    other = host_plan(max(work.subgroups), len(work.subgroups), "device" if location == "host" else "host")
    others = [plan.model_copy(update={"overlap_forward": work.overlaps_forward})]
    if stage == 3:
        others += [other, other.model_copy(update={"overlap_forward": True})]
    for one in others:
        assert iteration_s(seen, one) == pytest.approx(iteration_s(work, one), rel=0.02)
    assert seen.forward_s == pytest.approx(work.forward_s, rel=0.05)
    assert seen.backward_s == pytest.approx(work.backward_s, rel=0.05)
    assert seen.step_issue_s == pytest.approx(work.step_issue_s)


@pytest.mark.parametrize(("model", "name", "about", "slower"), JOBS)
def test_what_auto_expects_is_what_its_plan_takes(model, name, about, slower):
    machine = _machine(name, about)
    expected_s, true_s = automatic(estimated(_job(model, about), machine), machine)
    assert expected_s == pytest.approx(true_s, rel=0.01)


@pytest.mark.skipif(not EMULATED, reason="a real link is as fast as it is")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_slow_link_shows_as_waits(only_rank, monkeypatch, stage):
    monkeypatch.setattr("ebbtide.runtime.execution.gradients.GRADIENTS_UNDER_WAY_BYTES", 0)
    engine = start(stage=stage, accumulation=2)
    ebbtide.runtime.attach(engine, _plan(engine), device=slowed(None, 2e6))
    recorder = session_of(engine).recorder
    recorder.watch()
    train(engine, 6, batches=Batches(2, SIZES["tiny"].sequence))
    copies = [s for s in engine.optimizer.timeline().spans if s.kind == OpKind.GRADIENT_D2H]
    seen = [p for p in recorder.passes() if p.kind == OpKind.BACKWARD]
    engine.destroy()
    assert [p.iteration for p in seen] == [0, 1, 2]
    for one in seen:
        inside = [c for c in copies if one.start_s <= c.start_s + recorder.origin_s <= one.end_s]
        moved_s = sum(c.end_s - c.start_s for c in inside[:-1])
        waited_s = sum(end - start for start, end in one.waits)
        assert len(one.made) > 10
        assert len(one.waits) > 1
        assert 0 < waited_s < one.end_s - one.start_s
        assert waited_s > 0.5 * moved_s, "backward itself is short"


@pytest.mark.skipif(not EMULATED, reason="a real link is as fast as it is")
def test_parameters_that_are_still_coming_in_show_as_waits(only_rank):
    engine = start(offload_param={"device": "cpu"})
    ebbtide.runtime.attach(engine, _plan(engine), device=slowed(2e6, None))
    recorder = session_of(engine).recorder
    recorder.watch()
    train(engine, 3)
    # From the second forward on, DeepSpeed gathers ahead. Its backward finds the parameters that forward has left.
    seen = [p for p in recorder.passes() if p.kind == OpKind.FORWARD and p.iteration]
    engine.destroy()
    assert len(seen) == 2
    for one in seen:
        assert len(one.waits) > 1
        assert one.computed_s < one.end_s - one.start_s


def test_the_thread_that_launches_kernels_is_timed_beside_a_gpu_alone(monkeypatch):
    # Autograd's thread runs the backward of a GPU, and the script's thread waits for it.
    clocks = {1: iter([1.0, 3.0, 5.0, 5.5]), 2: iter([7.0, 9.0, 10.5])}
    thread = [1]
    monkeypatch.setattr("ebbtide.runtime.devices.passes.threading", SimpleNamespace(get_ident=lambda: thread[0]))
    clock = SimpleNamespace(thread_time=lambda: next(clocks[thread[0]]))
    monkeypatch.setattr("ebbtide.runtime.devices.passes.time", clock)
    seen = {}
    for name in ("cuda", "emulated"):
        device = Device()
        device.name = name
        watched = WatchedPasses(device)
        for kind, gradients in ((OpKind.FORWARD, 0), (OpKind.BACKWARD, 3)):
            watched.begins(kind, 0)
            for _ in range(gradients):
                thread[0] = 2
                watched.made([Place(0, 0, 1)])
            thread[0] = 1
            watched.ends(kind)
        seen[name] = [one.issued_s for one in watched.passes()]
    assert seen == {"cuda": [2.0, 3.5], "emulated": [0.0, 0.0]}


def test_moments_are_of_the_stream_on_which_a_pass_begins():
    class Streams(Device):
        current = "compute"

        def training_streams(self):
            return [self.current]

        def moment(self, stream=None):
            asked.append(stream)
            return super().moment()

    asked, device = [], Streams()
    watched = WatchedPasses(device)
    copy = Completion("a copy")
    watched.will_wait([copy])
    watched.made([Place(0, 0, 1)])
    assert asked == [], "outside of a pass"
    watched.begins(OpKind.BACKWARD, 0)
    device.current = "reduction"
    watched.made([Place(0, 0, 1)])
    watched.will_wait([copy, Completion.done()])
    assert watched.passes() == [], "it has not ended"
    watched.ends(OpKind.BACKWARD)
    assert asked == ["compute"] * 4
    assert watched.passes() == [], "nor has the copy"
    copy.issued.set()
    copy.end_s = watched._noted[OpKind.BACKWARD, 0].end.host_s
    (seen,) = watched.passes()
    assert len(seen.waits) == len(seen.made) == 1
    watched.begins(OpKind.BACKWARD, 0)
    watched.made([Place(0, 0, 1)])
    assert len(asked) == 4, "the second micro-batch"


def _plan(engine):
    return plan_for(engine, ["host"])


def test_nothing_is_recorded_that_nobody_asks_for(only_rank):
    engine = start()
    ebbtide.runtime.attach(engine, _plan(engine))
    recorder = session_of(engine).recorder
    train(engine, 2)
    assert recorder.passes() == []
    recorder.watch()
    state = torch.get_rng_state()
    train(engine, 1)
    recorder.unwatch()
    assert torch.equal(torch.get_rng_state(), state)
    train(engine, 1)
    assert recorder.passes() == []
    engine.destroy()


def test_steps_of_many_micro_batches_are_seen(only_rank):
    # Only the first micro-batch of a step is measured. Its times must not come from the general timeline, which keeps
    # only the last 64 forwards, backwards and optimizer steps.
    engine = start(accumulation=40)
    ebbtide.runtime.attach(engine, _plan(engine))
    own = session_of(engine)
    own.recorder.watch()
    train(engine, 2 * 40)
    passes = own.recorder.passes()
    seen = observed_workload(own.engine, passes)
    engine.destroy()
    assert [p.iteration for p in passes] == [0, 0, 1, 1]
    assert seen.forward_s > 0
    assert seen.backward_s > 0
    assert seen.params == sum(own.engine.sizes())
    assert len(seen.layers) > 2


def test_host_memory_that_is_not_free_is_not_planned_with():
    machine = Machine.preset("a100-node")
    work = estimated(_job("Llama 3.2 1B", {}), machine)
    work = work.in_pieces(4 * piece_elements(work.params)).model_copy(update={"clip_rate": 0.0})
    current = host_plan(work.subgroup_size, len(work.subgroups), overlap_forward=True)
    taken = footprint(work, current)["host"]
    for free in (0, 10**9):
        found = better_plan(work, machine, current, 2**32, free)
        assert found.iteration_s < found.current_s
        assert footprint(work, found.plan)["host"] <= taken + free
    roomy = better_plan(work, machine, current, 2**32, 10**12)
    assert footprint(work, roomy.plan)["host"] > taken + free, "for early updates"


def _seen(recorder, kind):
    return [p for p in recorder.passes() if p.kind == kind]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_between_steps_is_no_forward_of_training(only_rank, stage):
    engine = start(stage=stage)
    ebbtide.runtime.attach(engine, _plan(engine))
    recorder = session_of(engine).recorder
    recorder.watch()
    evaluated = []

    def evaluate(engine, number):
        with torch.no_grad():
            engine(*Batches(2, SIZES["tiny"].sequence).at(number, engine.device))
        evaluated.append(time.perf_counter())

    train(engine, 3, each=evaluate)
    seen = _seen(recorder, OpKind.FORWARD)[:3]
    engine.destroy()
    assert [p.iteration for p in seen] == [0, 1, 2]
    for before_s, one in zip(evaluated[:-1], seen[1:], strict=True):
        assert before_s <= one.start_s, "the evaluation came first"


def test_a_forward_that_fails_is_recorded_anew():
    watched = WatchedPasses(Device())
    watched.begins(OpKind.FORWARD, 0)  # this forward fails
    again_s = time.perf_counter()
    watched.begins(OpKind.FORWARD, 0)
    watched.ends(OpKind.FORWARD)
    (forward,) = watched.passes()
    assert again_s <= forward.start_s


def test_one_backward_of_two_forwards_is_recorded_as_a_whole(only_rank):
    # One backward of two forwards is one pass, although DeepSpeed calls its start hook twice.
    engine = start()
    ebbtide.runtime.attach(engine, _plan(engine))
    recorder = session_of(engine).recorder
    recorder.watch()
    batches, begun, begins = Batches(2, SIZES["tiny"].sequence), [], recorder.backward_begins

    def note():
        begun.append(time.perf_counter())
        begins()

    recorder.backward_begins = note
    first, second = (engine(*batches.at(number, engine.device)) for number in range(2))
    before_s = time.perf_counter()
    engine.backward(first + second)
    (seen,) = _seen(recorder, OpKind.BACKWARD)
    engine.destroy()
    assert len(begun) == 2
    assert before_s <= seen.start_s < begun[1]


def test_a_wait_for_one_parameter_is_a_wait_for_all_of_its_gather():
    # Check which copies from host memory to the GPU are recorded as waited for, when forward or backward waits for one
    # gathered parameter. These must be the copies of all parameters in the same gather, because the gather begins only
    # after all of them.
    waited, names = [], ["first", "second", "apart"]
    held = torch.zeros(1)
    held.final_location = "cpu"
    common = {"ds_tensor": held, "ds_secondary_tensor": None, "ds_persist": False}
    common["ds_status"] = ZeroParamStatus.NOT_AVAILABLE
    params = [type(name, (), {**common, "ds_id": number})() for number, name in enumerate(names)]
    device = SimpleNamespace(
        will_wait=waited.extend, training_waits=lambda ends: None, unified=False, training_streams=list
    )
    partitions = SimpleNamespace(
        subgroup_of={},
        subgroups=lambda params: [],
        live_on_host=lambda param, executor: True,
        bring=lambda params, executor: {p: (torch.zeros(1), [type(p).__name__]) for p in params},
    )
    executor = SimpleNamespace(device=device, wait_parameters=lambda subgroups: None)
    gathers = CollectiveGathers(partitions, [], {})
    gather = lambda params: SimpleNamespace(wait=lambda: waited.append("gather"))
    handles = []
    for module in (params[:2], params[2:]):
        gathers.module_begins(module)
        fetches = gathers.fetch(module, gather, executor)
        handles += [fetches.of(param) for param in module]
    for handle in handles:
        handle.wait()
    assert waited == ["first", "second", "gather", "gather", "apart", "gather"]


def test_an_engine_that_is_destroyed_leaves_no_recorder_to_the_next(only_rank):
    device = slowed(None, None)
    engine = start()
    ebbtide.runtime.attach(engine, "auto", machine=node(device_kind="emulated"), device=device)
    train(engine, 2)
    assert device.watched is not None
    engine.destroy()
    assert device.watched is None
