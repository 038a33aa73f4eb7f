"""Tests of a change of an engine's plan during training: by a call in the training script, and with ``plan="auto"``."""

import functools
import time
from dataclasses import replace
from types import SimpleNamespace

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.execution.allocated import LostPlanError, SwitchError
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.replan.auto import switch_together
from ebbtide.runtime.replan.observed import measured_rates, with_observed
from ebbtide.runtime.storage.errors import DamagedError, StorageError
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.simulator import Layer, Plan, PlanError, Quantity, Workload
from ebbtide.simulator.schedule import Lane, OpKind, Span
from ebbtide.simulator.timeline import Timeline

from studies.bench.bits import differences
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from tests.machines import node
from tests.runtime.contract.training import DEVICES, EMULATED, all_state, slowed

STEPS = 8
SUBGROUP = 20_000


def machine(**rates):
    memory = {"host_memory_bytes": 2**34, "device_memory_bytes": 2**34}
    return node(device_kind="emulated", cpu_cores=2, **memory, **rates)


def plan_of(pattern, count, slots=2, prefetch=1, locations=("device",)):
    placements = [pattern[i % len(pattern)] for i in range(count)]
    return Plan(
        subgroup_size=SUBGROUP,
        placement=Plan.runs(placements),
        staging_slots=slots,
        prefetch=prefetch,
        parameter_home=Plan.runs([locations[i % len(locations)] for i in range(count)], "home"),
    )


def new_engine(stage=3, **zero):
    import deepspeed

    torch.manual_seed(0)
    model = ByteGPT(SIZES["tiny"])
    config = ds_config(2, SUBGROUP, learning_rate=1e-3, stage=stage, **zero)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, steps=STEPS, after_step=lambda number: None):
    batches = Batches(2, SIZES["tiny"].sequence)
    losses = []
    for number in range(steps):
        losses.append(train_step(engine, batches.at(number, engine.device)))
        after_step(number)
    result = all_state(engine), torch.stack(losses)
    engine.destroy()
    return result


@functools.cache
def stock_of(stage):
    return train(new_engine(stage))


@pytest.fixture
def stock(only_rank):
    return stock_of(3)


STAGES = [*((3, device) for device in DEVICES.values()), (2, list(DEVICES.values())[-1])]


def assert_same_bits(ours, stock):
    assert differences(ours[0], stock[0]) == ()
    assert torch.equal(ours[1], stock[1])


@pytest.mark.parametrize(("stage", "device"), STAGES)
def test_switching_between_steps_changes_no_bit(only_rank, stage, device):
    engine = new_engine(stage)
    count = len(subgroups_of(engine.optimizer, SUBGROUP))
    patterns = [["host"], ["device", "resident"], ["host", "device"]]
    locations = [["device"], ["host"], ["host", "device"], ["device"]] if stage == 3 else [["device"]]
    ebbtide.runtime.attach(engine, plan_of(patterns[0], count), device=device())
    switched = []

    def switch(number):
        plan = plan_of(
            patterns[(number + 1) % 3], count, slots=3, prefetch=2, locations=locations[number % len(locations)]
        )
        switch_plan(engine, plan)
        now = session_of(engine).plan
        same_locations = now.parameter_locations == plan.parameter_locations
        switched.append(now.placements == plan.placements and same_locations)

    assert_same_bits(train(engine, after_step=switch), stock_of(stage))
    assert switched == [True] * STEPS


def test_switching_to_another_models_plan_is_refused_and_leaves_the_engine_alone(stock):
    engine = new_engine()
    count = len(engine.optimizer.fp16_partitioned_groups_flat)
    ebbtide.runtime.attach(engine, plan_of(["host"], count))
    with pytest.raises(PlanError, match=r"plan\.ways must set the placement of"):
        switch_plan(engine, plan_of(["host"], count + 1))
    assert_same_bits(train(engine), stock)


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_plans_after_the_watched_steps(only_rank, stage, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.replan.auto._free_device_bytes", lambda device: 10**9)
    # Under ZeRO-1 and 2, DeepSpeed ignores the key.
    engine = new_engine(stage, offload_param={"device": "cpu"})
    ebbtide.runtime.attach(engine, "auto", device=slowed(1e9, 1e9, 1e9), machine=machine())
    placements = []

    def note(number):
        plan = session_of(engine).plan
        placements.append(set(plan.placements))
        if len(placements) < 4 or stage == 2:
            assert set(plan.parameter_locations) == ({"host"} if stage == 3 else {"device"})

    assert_same_bits(train(engine, after_step=note), stock_of(stage))
    assert placements[0] == {"host"}
    if EMULATED:
        assert placements[-1] - {"host"}, "a fast device with free memory must get some subgroups"


STRANGE = [1.0, 133954.0, 1e30, 0.0, -1.0, float("inf"), float("nan")]


@pytest.mark.parametrize("rate", STRANGE)
def test_a_rate_that_no_machine_has_is_left_out(rate):
    own = machine()
    assert with_observed(own, {"host_adam_params_per_s": rate}) == own
    other = with_observed(own, {"host_adam_params_per_s": rate, "h2d_bytes_per_s": 5e9})
    assert other == own.with_rates(h2d_bytes_per_s=5e9)


@pytest.mark.parametrize("strange", [{"host_adam_params_per_s": 1.0}, {"h2d_bytes_per_s": float("nan")}, {"no": 1.0}])
def test_what_was_observed_ends_no_run(stock, monkeypatch, strange):
    # In an earlier version such a speed ended a run in its fourth step. The speed was wrong because the operating
    # system had paused the thread of an op for too long.
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_rates", lambda *_: strange)
    engine = new_engine()
    ebbtide.runtime.attach(engine, "auto", machine=machine())
    assert_same_bits(train(engine), stock)


FAILING = [
    "ebbtide.tuner.placements.planning.quicker_plan",
    "ebbtide.runtime.replan.auto.observed_workload",
    "ebbtide.runtime.devices.passes.WatchedPasses.passes",
]


@pytest.mark.parametrize("place", FAILING)
def test_a_failed_observation_ends_no_run(stock, monkeypatch, caplog, place):
    monkeypatch.setattr(place, fail)
    engine = new_engine()
    ebbtide.runtime.attach(engine, "auto", machine=machine())
    own, ended = session_of(engine), []
    assert_same_bits(train(engine, after_step=lambda _: ended.append(own.device.watched is None)), stock)
    assert "planning from observed steps failed" in caplog.text
    assert "planted" in caplog.text
    assert ended[-1]
    assert own.plan.overlap_forward


def test_a_new_plan_that_cannot_start_leaves_the_plan_before(stock, monkeypatch, caplog):
    begun = []

    class OnlyOnce(Executor):
        def __init__(self, *args):
            begun.append(1)
            if len(begun) == 2:
                raise torch.OutOfMemoryError("planted")
            super().__init__(*args)

    monkeypatch.setattr("ebbtide.runtime.execution.session.Executor", OnlyOnce)
    engine = new_engine()
    ebbtide.runtime.attach(engine, "auto", machine=machine())
    own = session_of(engine)
    before, kept = own.plan.ways, []
    assert_same_bits(train(engine, after_step=lambda number: kept.append(own.plan.ways == before)), stock)
    assert all(kept[:5])
    assert "the new one cannot start" in caplog.text
    assert "OutOfMemoryError: planted" in caplog.text
    assert len(begun) >= 3, "the old plan must have been started again"


class Rank:
    """A stand-in for the session of one rank, whose switches and answers to the other rank are recorded."""

    def __init__(self, error=None, others_fail=False):
        self.plan = plan_of(["host"], 2).model_copy(update={"overlap_forward": False})
        self.engine = SimpleNamespace(any_rank=self.any_rank)
        self.answers, self._error, self._others_fail = [], error, others_fail

    def any_rank(self, flag):
        self.answers.append(flag)
        return flag or self._others_fail

    def switch(self, plan):
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.plan = plan


NEW = plan_of(["device"], 2)
REFUSALS = [SwitchError(MemoryError("planted")), StorageError("planted"), PlanError("planted")]


@pytest.mark.parametrize("error", [None, *REFUSALS])
@pytest.mark.parametrize("others_fail", [False, True])
def test_all_ranks_switch_or_none(error, others_fail):
    # The two plans that then run overlap updates with forward alike. Otherwise one rank would wait for the other one
    # for ever.
    rank = Rank(error, others_fail)
    stays = error is not None or others_fail
    before = rank.plan.ways
    assert switch_together(rank, NEW) is not stays
    assert rank.answers == [error is not None]
    assert rank.plan.ways == (before if stays else NEW.ways)
    assert rank.plan.overlap_forward == NEW.overlap_forward


@pytest.mark.parametrize(
    "error",
    [LostPlanError(MemoryError("one"), MemoryError("two")), BackgroundError("planted"), DamagedError("planted")],
)
def test_a_rank_that_cannot_go_on_answers_the_others_first(error):
    rank = Rank(error)
    with pytest.raises(type(error)):
        switch_together(rank, NEW)
    assert rank.answers == [True]


def fail(*_, **__):
    raise ValueError("planted")


def test_auto_plans_nothing_while_states_are_offloaded(stock, monkeypatch):
    # A new plan would take the GPU memory that `offload_states` has freed, and `reload_states` would undo the plan.
    monkeypatch.setattr("ebbtide.runtime.replan.auto._free_device_bytes", lambda device: 10**9)
    engine = new_engine()
    ebbtide.runtime.attach(engine, "auto", device=slowed(1e9, 1e9, 1e9), machine=machine())
    placements = []

    def note(number):
        placements.append(set(session_of(engine).plan.placements))
        if number == 1:
            engine.offload_states()
        if number == 4:
            engine.reload_states()
        if number == 5:
            seen = [p.iteration for p in session_of(engine).recorder.passes() if p.kind is OpKind.BACKWARD]
            assert seen == [0, 1, 5], "steps under the temporary plan must not be recorded"

    assert_same_bits(train(engine, after_step=note), stock)
    assert placements[:6] == [{"host"}] * 6
    if EMULATED:
        assert placements[6] - {"host"}, "auto replans after the fourth step that it has watched"
        assert placements[7] == placements[6]


def test_rates_come_from_the_spans():
    spans = [
        Span(OpKind.UPDATE_HOST, Lane.HOST, 0.0, 2.0, subgroup=0),
        Span(OpKind.UPDATE_HOST, Lane.HOST, 2.0, 3.0, subgroup=1),
        Span(OpKind.STATE_H2D, Lane.H2D, 0.0, 4.0, subgroup=1),
        Span(OpKind.FORWARD, Lane.COMPUTE, 0.0, 1.0),
    ]
    on = machine(host_adam_out_of_place=Quantity.exact(0.5))
    timeline, layers = (Timeline(tuple(spans), "measured"), [Layer(params=300, forward_s=1.0, backward_s=1.0)])
    work = Workload(name="w", layers=layers, subgroups=(100, 200))
    rates = measured_rates(timeline, work, on)
    assert rates == {"host_adam_params_per_s": 125.0, "h2d_bytes_per_s": 200 * 12 / 4.0}
    lion = measured_rates(timeline, work.model_copy(update={"optimizer": "lion"}), on)
    assert lion["h2d_bytes_per_s"] == 200 * 8 / 4.0, "a staged update copies 8 bytes per parameter with Lion"
    assert lion["host_adam_params_per_s"] == pytest.approx(125.0 * 20 / 28), "Lion's rate is converted to Adam's"
    updated_early = [replace(span, kind=OpKind.UPDATE_HOST_EARLY) for span in spans]
    timeline = Timeline(tuple(updated_early), "measured")
    assert measured_rates(timeline, work, on) == {"host_adam_params_per_s": 250.0}, "early updates are in place"
    writes = [Span(OpKind.STATE_WRITE, Lane.STORAGE, 3.0, 4.0, subgroup=s) for s in (0, 1)]
    timeline = Timeline((*updated_early, *writes), "measured")
    assert measured_rates(timeline, work, on) == {"host_adam_params_per_s": 125.0}, (
        "stored state is updated in a buffer"
    )


def test_checkpoints_carry_the_digest_of_the_plan_they_were_made_under(only_rank, tmp_path):
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints

    engine = new_engine()
    count = len(engine.optimizer.fp16_partitioned_groups_flat)
    ebbtide.runtime.attach(engine, plan_of(["host"], count), device=list(DEVICES.values())[-1]())
    digests = []
    for tag, pattern in (("first", ["host"]), ("second", ["host", "device"])):
        switch_plan(engine, plan_of(pattern, count))
        engine.save_checkpoint(str(tmp_path), tag=tag)
        engine.checkpoint_engine.wait()
        digests.append(session_of(engine).plan.digest)
    saved = {entry.tag: entry.plan for entry in list_checkpoints(tmp_path)}
    assert saved == dict(zip(("first", "second"), digests, strict=True))
    assert len(set(digests)) == 2
    engine.destroy()


def test_what_is_recorded_of_forward_breaks_no_compiled_graph(dynamo):
    from ebbtide.runtime.zero.attach import _record_forward

    calls = []
    recorder = SimpleNamespace(
        forward_begins=lambda: calls.append(time.perf_counter()), forward_ends=lambda: calls.append(time.perf_counter())
    )
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    _record_forward(module, recorder)
    module.compile(backend="eager")
    for _ in range(2):
        module(torch.randn(2, 8))
    assert not dynamo["graph_break"]
    assert len(calls) == 4
