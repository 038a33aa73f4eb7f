"""Tests that the predicted GPU and host memory of a plan equal what the runtime allocates, to the byte."""

import itertools
import json
import mmap
from collections import deque

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.execution import gradients
from ebbtide.runtime.execution.gradients import GradientOps
from ebbtide.runtime.zero.flat_partitions import cuts_of
from ebbtide.runtime.zero.host_memory import needed_bytes
from ebbtide.runtime.zero.stage3_buffers import Pieces, gradient_of, split_gradients
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.schedules.footprint import footprint, moved_out, tally
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import Layer, Workload
from torch.multiprocessing.reductions import StorageWeakRef

from studies.trials.paced_device import EmulatedRates, PacedDevice
from tests.conftest import without_a_rank
from tests.prepared import run
from tests.runtime.contract.test_bits import two_groups
from tests.runtime.contract.training import DEVICES, SUBGROUP, assert_same, attached, outcome, plan_for, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
PATTERNS = {
    "hosted": ["host"],
    "one of each": ["host", "device", "resident"],
    "staged": ["device", "device", "resident"],
    "stored": ["stored", "device", "stored"],  # needs ZeRO-3
}
GRADIENTS = {
    "bf16": {},
    "accumulated in bf16": {"accumulation": 2},
    "accumulated in fp32": {"accumulation": 2, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
}


def allocated_device_bytes(executor):
    resident = [s for s in executor.states if s.placement == "resident"]
    on_device = [s.gradient for s in executor.states if RECIPES[s.placement].gradient == "device"]
    held = [t for s in resident for t in s.state] + on_device + list(executor.slots)
    held += executor.outgoing_slots
    return sum(t.nbytes for t in held)


@pytest.mark.parametrize(
    ("pattern", "gradients", "stage"),
    [
        *itertools.product(["one of each"], GRADIENTS, (3, 2)),
        ("one of each", "accumulated in bf16", 1),
        ("hosted", "bf16", 3),
        ("hosted", "accumulated in fp32", 2),
        ("staged", "accumulated in bf16", 3),
        ("staged", "bf16", 2),
        *itertools.product(["stored"], GRADIENTS, [3]),
    ],
)
def test_the_footprint_is_what_is_allocated(pattern, gradients, stage):
    options = GRADIENTS[gradients]
    micro_batches = options.get("accumulation", 1)
    locations = ["device", "host"] if stage == 3 else ["device"]
    engine = attached(start(stage=stage, **options), PATTERNS[pattern], DEVICE, seed=None, locations=locations)
    own = session_of(engine)
    if micro_batches > 1:  # from the second step on, the sums of the previous step are kept
        train(engine, 2 * micro_batches)
    sizes = tuple(s.elements for s in own.executor.states)
    kept = own.executor.states[0].gradient.element_size()
    assert kept == (4 if "fp32" in gradients else 2)
    held = Holding.of(ADAM, kept, 2, stage=stage, micro_batches=micro_batches)
    locations = own.plan.parameter_locations
    amounts, plan = tally(zip(sizes, map(Way, own.plan.placements, locations), strict=True)), own.plan
    told = held.bytes(amounts, plan.staging_slots, plan.host_slots)
    assert told["host"] == session_of(engine).host_bytes()
    on_host = [RECIPES[placement].gradient == "host" for placement in plan.placements]
    leave = sum(n for n, location in zip(sizes, on_host, strict=True) if location) * kept
    assert told["device"] == allocated_device_bytes(own.executor) + leave  # fewer bytes than the limit
    named = own.plan.model_copy(update={"subgroups": sizes})
    needed = needed_bytes(named, kept, stage=stage, micro_batches=micro_batches)
    assert needed == told["host"]
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(
        name="w",
        layers=layers,
        subgroups=sizes,
        subgroup_size=SUBGROUP,
        device_base_bytes=2 * sum(sizes),
        grad_bytes_per_param=kept,
        zero_stage=stage,
        gradient_accumulation_steps=micro_batches,
    )
    whole = footprint(work, own.plan)
    gone = moved_out(work, [n * (location == "host") for n, location in zip(sizes, locations, strict=True)])
    base = max(0, work.device_base_bytes - 2 * gone)
    assert (whole["host"], whole["device"] - base) == (told["host"], told["device"])
    engine.destroy()


@pytest.mark.parametrize(
    ("pattern", "speculate"), [(["host"], 1), (["host", "device", "resident", "stored"], 99), (["device"], 99)]
)
def test_the_memory_of_early_updates_is_predicted_to_the_byte(pattern, speculate):
    engine = attached(
        start(), pattern, DEVICE, seed=None, speculate=speculate, speculate_visits=speculate, host_slots=2
    )
    own = session_of(engine)
    train(engine, 2)
    sizes = tuple(s.elements for s in own.executor.states)
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, subgroup_size=SUBGROUP)
    assert any(own.plan.updated_early)
    told = footprint(work, own.plan)
    assert told["host"] == session_of(engine).host_bytes()
    sent = sum(n for n, p in zip(sizes, own.plan.placements, strict=True) if RECIPES[p].gradient == "host")
    assert told["device"] == allocated_device_bytes(own.executor) + 2 * sent
    named = own.plan.model_copy(update={"subgroups": sizes})
    assert needed_bytes(named, 2) == session_of(engine).host_bytes()
    engine.destroy()


def test_parameters_leave_no_flat_buffer_behind():
    for config in ({}, {"offload_param": {"device": "cpu"}}):
        engine = attached(start(**config), ["host"], DEVICE, locations=["device", "host"])
        optimizer = engine.optimizer
        assert getattr(optimizer, "lp_param_buffer", torch.empty(0)).numel() == 0
        assert all(flat.numel() == 0 for flat in optimizer.param_groups_fp16_flat_cpu_memory)
        for state in optimizer._ebbtide.executor.states:
            assert state.wire.untyped_storage().nbytes() == state.wire.nbytes
        engine.destroy()


def test_gradients_under_way_are_bounded(monkeypatch):
    most = 30_000  # bytes. Larger parameters are sent alone
    monkeypatch.setattr(gradients, "GRADIENTS_UNDER_WAY_BYTES", most)
    expected = outcome(start(accumulation=2), 4)
    engine, sent, seen = start(accumulation=2), deque(), []

    def noted(ops, how, subgroup, offset, location, source, send=GradientOps._send):
        send(ops, how, subgroup, offset, location, source)
        sent.append((ops.latest, source.nbytes))
        under_way = [n for arrival, n in sent if not arrival.ended]
        seen.append((sum(under_way), len(under_way), source.nbytes))

    monkeypatch.setattr(GradientOps, "_send", noted)
    device = PacedDevice(EmulatedRates(d2h_bytes_per_s=20e6))
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=device)
    ours = outcome(engine, 4)
    assert_same(ours, expected)
    assert any(count > 1 for _, count, _ in seen), "several copies must be in progress at a time"
    assert all(total <= max(most, size) for total, _, size in seen), max(seen)
    monkeypatch.setattr(GradientOps, "_make_room", lambda *_: None)
    engine = start(accumulation=2)
    seen.clear()
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=PacedDevice(EmulatedRates(None, 20e6)))
    train(engine, 4)
    engine.destroy()
    assert max(seen)[0] > 2 * most, "only the limit may bound the copies in progress"


class Copying(DEVICES[DEVICE]):
    """An emulated device that uses a copy of each host buffer that it is given, and never the buffer itself.
    ebbtide's CUDA device does the same with buffers that are not page-locked.
    """

    def host_adopt(self, tensor):
        return tensor.clone()


def test_deepspeeds_flat_gradients_are_not_there_twice_while_they_move():
    # DeepSpeed's flat gradient buffer is freed part by part while the runtime moves its gradients to other memory, so
    # that host memory never holds them twice.
    engine = start()
    optimizer = engine.optimizer
    optimizer._pieces = Pieces(optimizer, cuts_of(optimizer, SUBGROUP))
    flat = optimizer.grad_partitions_flat_buffer.fill_(1.0)
    split_gradients(optimizer, Copying())
    assert optimizer.grad_partitions_flat_buffer.numel() == 0
    borders = len(optimizer.fp16_groups) + 1
    assert int(flat.count_nonzero()) * flat.element_size() <= borders * mmap.PAGESIZE
    for index in range(len(optimizer.fp16_groups)):
        gradient = gradient_of(optimizer, index)
        assert torch.equal(gradient, torch.ones_like(gradient))
    engine.destroy()


class Locking(DEVICES[DEVICE]):
    """An emulated device that copies each host buffer before use, as ebbtide's CUDA device does with buffers that are
    not page-locked. Buffers that the device itself has allocated are not copied.

    ``kept`` shows whether the original of a copied buffer stays in memory. Each copy adds to ``kept`` the number of
    originals of earlier copies that still exist. If ``kept`` is 0 at the end, each original was freed before the next
    buffer was copied.
    """

    def __init__(self):
        super().__init__()
        self.own, self.sources, self.kept = set(), [], 0

    def host_empty(self, elements, dtype):
        made = super().host_empty(elements, dtype)
        self.own.add(StorageWeakRef(made.untyped_storage()))
        return made

    def host_adopt(self, tensor):
        if StorageWeakRef(tensor.untyped_storage()) in self.own:
            return tensor
        self.kept += sum(not source.expired() for source in self.sources)
        self.sources.append(StorageWeakRef(tensor.untyped_storage()))
        return self.host_empty(tensor.numel(), tensor.dtype).copy_(tensor)


def test_below_zero_3_a_flat_buffer_is_gone_before_the_next_one_moves():
    engine, device = start(stage=2, parameters=two_groups), Locking()
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), device=device)
    assert len(device.sources) >= 2, "each parameter group must have its own buffer"
    assert device.kept == 0
    assert all(source.expired() for source in device.sources)
    engine.destroy()


@pytest.fixture(scope="module")
def measured(tmp_path_factory, deepspeed_ops):
    """Run `tests.runtime.measured_memory`, which measures the host and device memory of an engine in several cases.
    Return the folder with its results, one file per case.
    """
    folder = tmp_path_factory.mktemp("measured")
    done = run(["-m", "tests.runtime.measured_memory", folder], env=without_a_rank())
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["host", "mixed", "device"])
def test_both_memories_are_within_3_percent_of_what_a_process_takes(case, measured):
    # The GPU is emulated in host memory. Host memory is measured as the process's resident set without the emulated
    # GPU's memory.
    for memory, (told, taken) in json.loads((measured / f"{case}.json").read_text()).items():
        assert taken == pytest.approx(told, rel=0.03), memory
