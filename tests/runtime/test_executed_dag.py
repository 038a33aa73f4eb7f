"""Tests that the runtime's executor submits the ops of the simulator's schedule: the same ops on each lane (a
queue of ops that run one after the other), in the same order and with the same waits.
"""

import dataclasses
import random
from collections import Counter
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.allocated import Allocated
from ebbtide.runtime.execution.bodies import EarlyUpdates, SubgroupJob
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.execution.gradients import GradientBuffers, GradientOps, ParameterSlice
from ebbtide.runtime.execution.subgroup_state import StagingSlot
from ebbtide.runtime.zero.windows import Windows, ZeroSlice
from ebbtide.simulator import Layer, OpKind, Plan, Workload, build_schedule
from ebbtide.simulator.update.order import order_of
from ebbtide.simulator.update.steps import Slot
from ebbtide.simulator.update.way import ways
from ebbtide.tuner.placements.candidate import STAGED
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = 4
RECIPES = [way.recipe for way in ways()]
GRADIENTS = {step.kind for recipe in RECIPES for step in recipe.gradient_steps}
EXECUTED = {step.kind for recipe in RECIPES for step in recipe.steps} | GRADIENTS
REDUCED = {OpKind.GRADIENT_REDUCE, OpKind.BACKWARD}  # DeepSpeed's own ops


class Recorded:
    """A stand-in for a lane of the runtime (a queue of ops that run one after the other). It runs nothing, and
    records the ops that are submitted to it.
    """

    def __init__(self, name, device):
        self.name, self.device, self.stream = name, device, None

    def submit(self, body, waits, completion):
        del body
        self.device.notes.append((self.name, completion, list(waits), self.device.layer))
        completion.issued.set()


class Recording(Device):
    """A fake device whose lanes (queues of ops) only record the ops that the executor submits, and run none.

    It claims to have GPU memory separate from host memory, so that the executor also copies parameters. All its events
    count as reached.

    Attributes:
        layer: The layer whose backward was the latest.
    """

    unified = False

    def __init__(self):
        self.notes, self.layer = [], None

    def lanes(self):
        return {name: Recorded(name, self) for name in super().lanes()}

    def current_event(self):
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None)


def executor_for(workload, plan):
    states = [
        SimpleNamespace(
            index=i,
            placement=p,
            parameter_location=location,
            elements=n,
            wire=torch.empty(1),
            gradient=torch.empty(n),
            state=(),
            sum=torch.empty(n) if summed else None,
        )
        for i, (n, p, location, summed) in enumerate(
            zip(workload.subgroups, plan.placements, plan.parameter_locations, plan.summed_on_device, strict=True)
        )
    ]
    rule = SimpleNamespace(forms=list, moments=())
    device = Recording()
    early_updates = EarlyUpdates(device, states, plan.updated_early)
    count = sum(p in STAGED for p in plan.placements)
    slots = [StagingSlot(()) for _ in range(min(plan.staging_slots, count))]
    stored = [StagingSlot(()) for _ in range(plan.host_slots)]
    return Executor(device, Allocated(plan, states, slots, stored, early_updates), 1, rule)


def executed(workload, plan):
    """Run a few steps of the runtime's executor on lanes (queues of ops) that record the submitted ops instead of
    running them.

    An op is named by a tuple: the step, the kind, the subgroup, and the number of earlier ops of this kind and
    subgroup in the step.

    Returns:
        Two dicts. The first has, for each op, the names of the ops and events that it waits for. The second
        has, for each lane, its ops in order.
    """
    executor = executor_for(workload, plan)
    names, waits, lanes = {}, {}, {}
    for step in range(STEPS):
        executor.device.notes.clear()
        backward(executor, workload)
        gradients = len(executor.device.notes)
        executor.launch([None] * len(executor.states))
        kinds = {op.label: (op.kind, op.subgroup) for op, _ in executor.history[-1].ops}
        seen = Counter()
        for number, (lane, completion, given_waits, layer) in enumerate(executor.device.notes):
            kind = kinds[completion.label]
            name = names[completion] = (step, *kind, seen[kind])
            seen[kind] += 1
            lanes.setdefault(lane, []).append(name)
            early = number < gradients and kind[0] in (OpKind.STATE_H2D, OpKind.STATE_READ)
            waits[name] = {"prefetch"} if early else set()
            # The event of the training stream is that of the reduction or of the norm. State that is staged or read
            # early waits for a backward.
            event = "prefetch" if early else ("reduced", layer) if number < gradients else "norm"
            for wait in given_waits:
                waits[name] |= {names.get(wait, event if wait.event else "")} - {""}
        for subgroup in range(len(executor.states)):
            executor.wait_parameters([subgroup])
    return waits, lanes


def backward(executor, workload):
    """Deliver the gradients of each micro-batch of a step to the executor, those of the last layer first.

    A layer has up to three parameters in each subgroup that holds a part of the layer. With several micro-batches it
    has one, because each parameter's sum is fetched apart.
    """
    last = workload.gradient_accumulation_steps - 1
    held, parts, slices = [0] * len(workload.subgroups), {}, {}
    for layer, shares in enumerate(workload.shares()):
        for subgroup, n in shares:
            parts[layer, subgroup] = n
            for elements in [n] if last or n < 3 else [1, n - 2, 1]:
                slices[layer, subgroup, held[subgroup]] = ParameterSlice(subgroup, held[subgroup], elements, real=True)
                held[subgroup] += elements
    executor.gradients.layers = {(subgroup, offset): layer for layer, subgroup, offset in slices}

    def complete(subgroup):
        if subgroup in executor.early_updates.wires:
            executor.update_early(subgroup, SubgroupJob(None, []))
        executor.issue.come_in()

    locations = GradientBuffers(executor.device, executor.states, slices, executor.gradients, complete=complete)
    for micro_batch in range(last + 1):
        for delivery, executor.device.layer in delivered(parts, workload.planned_bucket_params):
            if micro_batch == last:
                executor.prefetch()
            keys = [key for part in delivery for key in slices if key[:2] == part]
            bucket = torch.zeros(sum(slices[key].elements for key in keys))  # as DeepSpeed's, in one piece
            gradients = bucket.split([slices[key].elements for key in keys])
            with locations.together():
                for key, gradient in zip(keys, gradients, strict=True):
                    locations.accept(slices[key], gradient, first=micro_batch == 0, boundary=micro_batch == last)


def delivered(parts, size):
    """Yield a pair for each time that DeepSpeed hands gradients over to ebbtide: the list of these gradients, and the
    layer whose backward ran last.

    DeepSpeed collects gradients in a bucket of ``size`` elements, as in
    ``reduce_independent_p_g_buckets_and_remove_grads``. When the next gradient does not fit, the bucket's gradients are
    handed over in the order of their parameters. If ``size`` is 0, each gradient is handed over alone, as soon as it is
    computed.

    Args:
        parts: Number of elements of each layer's part of a subgroup.
    """
    bucket = []
    for key in reversed(parts):
        layer, _ = key
        if bucket and sum(parts[one] for one in [*bucket, key]) > size:
            yield sorted(bucket), layer if size else bucket[0][0]
            bucket = []
        bucket.append(key)
    yield sorted(bucket), layer


def simulated(workload, plan):
    """Return the ops that the simulator schedules, in the form in which `executed` returns submitted ops.

    Returns:
        Two dicts: the ops and events that each op waits for, and the ops of each lane in order. Ops of the training
        loop, such as forwards, are left out.
    """
    ops = build_schedule(workload, plan, iterations=STEPS).ops
    waits, lanes, names, seen = {}, {}, {}, Counter()
    for op in ops:
        if op.kind in EXECUTED:
            kind = (op.iteration, op.kind, op.subgroup)
            name = names[op.id] = (*kind, seen[kind])
            seen[kind] += 1
            lanes.setdefault(op.lane, []).append(name)
            waits[name] = {names[i] if i in names else named(ops[i], op) for i in op.after}
            if not op.after:  # the early reads of the first step
                waits[name] = {"prefetch"}
            if "norm" in waits[name]:  # the norm comes after the whole backward
                waits[name] = {wait for wait in waits[name] if "reduced" not in wait and wait != "prefetch"}
    return waits, lanes


def named(other, op):
    if other.kind == OpKind.NORM:
        assert other.iteration == op.iteration
        return "norm"
    assert other.kind in REDUCED
    return "prefetch" if op.kind in (OpKind.STATE_H2D, OpKind.STATE_READ) else ("reduced", other.layer)


def random_case(rng, *, bucket=False):
    """Return a random workload and a random plan.

    Args:
        bucket: True for a workload in which gradients wait in DeepSpeed's bucket before they go to ebbtide. Each layer
            is then one parameter, which lies in one subgroup. False for a workload without a bucket, in which a layer
            may lie in several subgroups.
    """
    sizes = [rng.randint(10, 90) for _ in range(rng.randint(1, 9))]
    # With few layers, a layer contains many subgroups. With many layers, a subgroup contains several layers, and parts
    # of others.
    cuts = sorted(rng.randint(0, sum(sizes)) for _ in range(rng.choice([1, 5, 40])))
    if bucket:
        cuts = sorted({*cuts, *accumulate(sizes[:-1])} - {0, sum(sizes)})
    layers = tuple(
        Layer(params=end - begin, forward_s=1.0, backward_s=1.0) for begin, end in pairwise([0, *cuts, sum(sizes)])
    )
    micro_batches = rng.choice([1, 2, 3, 8])
    workload = Workload(
        name="w",
        layers=layers,
        subgroups=tuple(sizes),
        gradient_accumulation_steps=micro_batches,
        parameters=(tuple(layer.params for layer in layers),) if bucket else (),
        planned_bucket_params=rng.choice([5, rng.randint(1, sum(sizes)), 1000]) if bucket else 0,
    )
    chosen = rng.choices(ways(), k=len(sizes))
    placements = [way.placement for way in chosen]
    slots, host_slots = rng.randint(1, 4), rng.randint(1, 4)
    plan = Plan(
        subgroup_size=90,
        ways=tuple(chosen),
        staging_slots=slots,
        prefetch=rng.randint(0, slots),
        overlap_forward=rng.random() < 0.7,
        order=order_of(rng.sample(range(len(sizes)), len(sizes)), placements),
        host_slots=host_slots,
    )
    return workload, plan


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_executed_dag_is_the_simulated_one(seed):
    workload, plan = random_case(random.Random(seed))
    run, expected = executed(workload, plan), simulated(workload, plan)
    assert run[1] == expected[1]
    assert run[0] == expected[0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_gradients_leave_the_bucket_in_the_executed_dag_as_in_the_simulated_one(seed):
    workload, plan = random_case(random.Random(seed), bucket=True)
    run, expected = executed(workload, plan), simulated(workload, plan)
    assert run[1] == expected[1]
    assert run[0] == expected[0]


def test_who_takes_a_buffer_waits_for_who_gave_it_back(monkeypatch):
    rng, uses, add = random.Random(5), Counter(), Executor._add
    given = {}

    def noted(self, step, subgroup, waits):
        holds = self.issue.holds
        if step.takes is not None:
            number = holds[step.takes, subgroup]
            behind = given.get((step.takes, number))
            assert behind is None or behind in waits
            uses[step.takes] += behind is not None
        end = add(self, step, subgroup, waits)
        if step.gives_back is not None:
            given[step.gives_back, holds[step.gives_back, subgroup]] = end
        return end

    monkeypatch.setattr(Executor, "_add", noted)
    for _ in range(20):
        given.clear()
        executed(*random_case(rng))
    assert set(uses) == set(Slot)


def test_a_layer_that_lies_in_one_piece_is_copied_once(monkeypatch):
    workload = Workload(
        name="w",
        layers=(Layer(params=40, forward_s=1.0, backward_s=1.0),) * 2,
        subgroups=(50, 30),
        planned_bucket_params=1000,
        parameters=((40,), (40,)),
    )
    plan = Plan(subgroup_size=50, placement=Plan.runs(["host"] * 2), staging_slots=0)
    sent = []
    leaving = lambda device, source, stream: sent.append(source.numel()) or source
    monkeypatch.setattr(Recording, "leaving", leaving)
    executed(workload, plan)
    assert sent == [40, 10, 30] * STEPS


@pytest.mark.parametrize("forgotten", ["all waits", "the first wait", "arrival", "after", "reduced"])
def test_a_forgotten_wait_is_seen(forgotten, monkeypatch):
    workload = Workload(
        name="w",
        layers=(Layer(params=40, forward_s=1.0, backward_s=1.0),),
        subgroups=(10,) * 4,
        gradient_accumulation_steps=2,
    )
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 4), staging_slots=0)
    assert executed(workload, plan)[0] == simulated(workload, plan)[0]
    add, submit = Executor._add, GradientOps._submit
    if forgotten in ("after", "reduced"):
        less = lambda own, how, *rest: submit(own, dataclasses.replace(how, **{forgotten: ()}), *rest)
        monkeypatch.setattr(GradientOps, "_submit", less)
    elif forgotten == "arrival":
        monkeypatch.setattr(Executor, "_arrived", lambda *_: [])
    else:
        first = 1 if forgotten == "the first wait" else None
        monkeypatch.setattr(
            Executor, "_add", lambda own, step, s, waits: add(own, step, s, waits[first:] if first else [])
        )
    assert executed(workload, plan)[0] != simulated(workload, plan)[0]


def test_a_sum_that_is_set_apart_has_arrived(monkeypatch):
    # First, a step is skipped. No update waits for the gradient sum of this step, so the copy of the sum to its host
    # buffer may still run. The next step has a single micro-batch, and overwrites this host buffer. The runtime saves
    # the old sum first, because stock DeepSpeed would keep the old sum and might add to it later. In this test a copy
    # runs only when something waits for it, so that a missing wait shows.
    under_way, wait_host = {}, Completion.wait_host

    def submit(self, body, waits, completion):
        under_way[completion] = body
        completion.issued.set()

    def arrive(completion):
        under_way.pop(completion, lambda: None)()
        wait_host(completion)

    monkeypatch.setattr(Recorded, "submit", submit)
    monkeypatch.setattr(Completion, "wait_host", arrive)
    size = 4
    workload = Workload(name="one", layers=(Layer(params=size, forward_s=1.0, backward_s=1.0),), subgroups=(size,))
    plan = Plan(subgroup_size=size, placement=Plan.runs(["host"]))
    executor = executor_for(workload, plan)
    executor.states[0].gradient.zero_()
    piece = ZeroSlice(0, 0, size, real=True)
    locations = Windows(executor.device, executor.states, {0: piece}, executor.gradients)
    locations.accept(piece, torch.ones(size), first=True, boundary=True)
    assert under_way, "the copy to host memory is under way"
    locations.close_window()
    locations.accept(piece, torch.full((size,), 2.0), first=True, boundary=True, alone=True)
    assert torch.equal(piece.apart, torch.ones(size))
