"""What the executor submits is what the schedule says: op by op, lane by lane, wait by wait."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.devices.base import Device
from runtime.devices.lane import Completion
from runtime.execution.executor import Executor
from runtime.execution.step_template import step_template
from simulator import Layer, OpKind, Plan, Workload, build_schedule
from simulator.update.order import order_of
from simulator.update.recipes import recipe_of, ways

STEPS = 4
EXECUTED = {step.kind for way in ways() for step in recipe_of(*way).steps}
GRADIENTS = {OpKind.GRADIENT_D2H, OpKind.GRADIENT_REDUCE, OpKind.BACKWARD}


class Recorded:
    """A lane that runs nothing and notes what it was given."""

    def __init__(self, name, notes):
        self.name, self.notes, self.stream = name, notes, None

    def submit(self, body, waits, completion):
        del body
        self.notes.append((self.name, completion, list(waits)))


class Recording(Device):
    """Not unified: parameters cross. Lanes note; the barrier is an event that can be told."""

    unified = False

    def __init__(self):
        self.notes = []

    def lanes(self):
        return {name: Recorded(name, self.notes) for name in super().lanes()}

    def current_event(self):
        return "norm"


def executor_for(workload, plan):
    states = [
        SimpleNamespace(
            index=i, placement=p, parameter_home=home, elements=n, wire=torch.empty(1),
            gradient=torch.empty(1),
        )
        for i, (n, p, home) in enumerate(
            zip(workload.subgroups, plan.placements, plan.parameter_homes, strict=True)
        )
    ]  # fmt: skip
    template = step_template(workload.subgroups, workload.wire_dtype, plan)
    return Executor(Recording(), states, [], template, 1, SimpleNamespace(forms=list, moments=()))


def executed(workload, plan):
    """(step, kind, subgroup) -> names of what it waits for; and the ops of each lane in order."""
    executor = executor_for(workload, plan)
    arrivals = [Completion(("gradient", s)) for s in range(len(workload.subgroups))]
    names, waits, lanes = {}, {}, {}
    for step in range(STEPS):
        executor.device.notes.clear()
        executor.prefetch()
        early = len(executor.device.notes)
        executor.launch([None] * len(arrivals), lambda s: [arrivals[s]])
        kinds = {t.op.label: (t.op.kind, t.op.subgroup) for t in executor.template}
        for number, (lane, completion, given_waits) in enumerate(executor.device.notes):
            name = (step, *kinds[completion.label])
            names[completion] = name
            lanes.setdefault(lane, []).append(name)
            waits[name] = {"prefetch"} if number < early else set()
            for wait in given_waits:
                known = "norm" if wait.event == "norm" else names.get(wait, wait.label)
                waits[name] |= {known} - {""}
    return waits, lanes


def simulated(workload, plan):
    """The same of the schedule, without the training loop's own ops."""
    ops = build_schedule(workload, plan, iterations=STEPS).ops
    waits, lanes = {}, {}
    for op in ops:
        if op.kind in EXECUTED:
            name = (op.iteration, op.kind, op.subgroup)
            lanes.setdefault(op.lane, []).append(name)
            waits[name] = {named(ops[i], op) for i in op.after}
    return waits, lanes


def named(other, op):
    if other.kind in EXECUTED:
        return other.iteration, other.kind, other.subgroup
    if other.kind == OpKind.NORM:
        assert other.iteration == op.iteration
        return "norm"
    assert other.kind in GRADIENTS
    if op.kind == OpKind.STATE_H2D:
        return "prefetch"
    return ("gradient", op.subgroup)


def random_case(rng):
    sizes = [rng.randint(10, 90) for _ in range(rng.randint(1, 9))]
    cut = rng.randint(0, sum(sizes))
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in (cut, sum(sizes) - cut))
    workload = Workload(
        name="w", layers=layers, subgroups=tuple(sizes),
        gradient_accumulation_steps=rng.randint(1, 3),
    )  # fmt: skip
    chosen = rng.choices(ways(), k=len(sizes))
    placements = [placement for placement, _ in chosen]
    slots = rng.randint(1, 4)
    plan = Plan(
        subgroup_size=90, placement=Plan.runs(placements), staging_slots=slots,
        parameter_home=Plan.home_runs([home for _, home in chosen]),
        prefetch=rng.randint(0, slots), overlap_forward=rng.random() < 0.7,
        order=order_of(rng.sample(range(len(sizes)), len(sizes)), placements),
    )  # fmt: skip
    return workload, plan


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_executed_dag_is_the_simulated_one(seed):
    workload, plan = random_case(random.Random(seed))
    run, expected = executed(workload, plan), simulated(workload, plan)
    assert run[1] == expected[1]
    assert run[0] == expected[0]


def test_buffers_of_two_updates_at_once_are_never_the_same():
    """The k-th use of a slot waits for the op that gave it back: so says the schedule; the buffer
    that the executor takes for it must be that slot's.
    """
    rng = random.Random(5)
    for _ in range(20):
        workload, plan = random_case(rng)
        executor = executor_for(workload, plan)
        executor.parameter_slots = [torch.empty(90) for _ in executor.parameter_slots]
        executor.outgoing_slots = [torch.empty(90) for _ in executor.outgoing_slots]
        waits, _ = simulated(workload, plan)
        for users, slots, update, copy in (
            (executor._incoming, executor.parameter_slots, OpKind.UPDATE_HOST,
             OpKind.PARAMETER_H2D),
            (executor._outgoing, executor.outgoing_slots, OpKind.UPDATE_DEVICE,
             OpKind.PARAMETER_D2H),
        ):  # fmt: skip
            uses, count = [(step, s) for step in range(STEPS) for s in users], len(slots)
            for number, (step, s) in enumerate(uses[count:], start=count):
                before = uses[number - count]
                assert (before[0], copy, before[1]) in waits[step, update, s]
                mine, theirs = (executor._parameter_out(i, n) for n, i in ((step, s), before))
                assert mine.data_ptr() == theirs.data_ptr()


@pytest.mark.parametrize("forgotten", ["now", "before"])
def test_a_forgotten_wait_is_seen(forgotten, monkeypatch):
    workload = Workload(
        name="w", layers=(Layer(params=40, forward_s=1.0, backward_s=1.0),), subgroups=(10,) * 4
    )
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 4), staging_slots=0)

    whole = step_template(workload.subgroups, "bf16", plan)

    def without(*_):
        return [dataclasses.replace(t, **{forgotten: ()}) for t in whole]

    monkeypatch.setitem(globals(), "step_template", without)
    assert executed(workload, plan)[0] != simulated(workload, plan)[0]
