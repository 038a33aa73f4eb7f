"""Tests of plans that cut ZeRO-3's own subgroups, which are few at DeepSpeed's default size, into parts."""

import functools
import itertools

import deepspeed
import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.checkpoint.format.skeleton import lay_out
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.replan import auto
from ebbtide.runtime.zero import subgroup_size
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.flat_partitions import cuts_at_parameters, subgroups_of
from ebbtide.simulator import PlanError
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import ALIGNMENT, Layer, Workload
from ebbtide.tuner.placements.planning import QuickPlan
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, ByteGPT, ByteGPTConfig
from tests.machines import node
from tests.runtime.checkpoint.conftest import bytes_of_tensors
from tests.runtime.contract.test_bits import CASES, trainable, two_groups
from tests.runtime.contract.test_partitions import set_state
from tests.runtime.contract.training import DEVICES, SUBGROUP, assert_same, attached, outcome, plan_for, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
MIX = ["host", "device", "resident"]
LARGE = 40_000  # elements, so that DeepSpeed has two subgroups
SHORT_LIVED = {
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 1,
    "stage3_param_persistence_threshold": 0,
}
MANY_LAYERS = ByteGPTConfig(layers=5, hidden=64, heads=2, sequence=32)
CUT = {
    "subgroups": {},
    "one": {"subgroup_size": 10**9},
    "hard": {"clipping": 0.001},
    "l2": CASES["l2_adam"],
    "groups": {"parameters": two_groups},
    "buckets": CASES["small_buckets"],
    "frozen": CASES["frozen_parameters"],
    "fp32": {"precision": "fp32"},
    "sums": {"accumulation": 3},
    "wide sums": CASES["fp32_accumulation"],
    "away": CASES["offloaded_parameters"],
    "away and frozen": CASES["offloaded_and_frozen"],
}


def coarse(case="subgroups"):
    options = {"subgroup_size": LARGE, **CUT[case]}
    if "model" in options:
        options["model"] = options["model"]()
    return start(**options)


def cut(engine, pattern=MIX, device=DEVICE, **fields):
    return attached(engine, pattern, device, pieces=True, **fields)


@functools.cache
def stock(case="subgroups"):
    return outcome(coarse(case))


@pytest.mark.parametrize(
    ("case", "device"),
    [*itertools.product(CUT, [DEVICE]), *itertools.product(["subgroups", "sums"], list(DEVICES)[:1])],
)
def test_pieces_have_the_bits_of_what_they_are_pieces_of(case, device):
    engine = coarse(case)
    own = len(engine.optimizer.fp16_groups)
    locations = ["host", "device"] if "away" in case or case == "one" else None
    ours = cut(engine, device=device, device_sums=case == "sums", locations=locations)
    assert len(session_of(ours).executor.states) > own
    assert_same(outcome(ours), stock(case))


@given(st.lists(st.lists(st.integers(0, 100), max_size=12), max_size=3), st.integers(1, 200))
def test_pieces_end_with_parameters_and_with_vectors(groups, size):
    found = cuts_at_parameters(groups, size)
    for number, sizes in enumerate(groups):
        mine = [(begin, elements) for group, begin, elements in found if group == number]
        ends = list(itertools.accumulate(sizes, initial=0))
        assert [begin for begin, _ in mine] == [0, *(b + n for b, n in mine)][:-1]
        assert sum(n for _, n in mine) == sum(sizes)
        assert all(b in ends and b % ALIGNMENT == 0 for b, _ in mine)
        assert all(2 * n >= size for _, n in mine[:-1])
    assert [group for group, _, _ in found] == sorted(group for group, _, _ in found)


@pytest.mark.parametrize("pattern", [["host"], MIX])
def test_a_checkpoint_is_stocks_and_stocks_is_taken(pattern, tmp_path):
    # The checkpoint holds DeepSpeed's whole subgroups.
    saving = cut(coarse(), pattern)
    train(saving, 3)
    layout = lay_out(saving.optimizer.state_dict(), saving.checkpoint_engine._live, stream_device=True)
    subgroups = session_of(saving).executor.states
    assert {e.source.subgroup for e in layout.extents} >= set(range(len(subgroups)))
    assert bytes_of_tensors(layout)[1] < 1_000
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=3)  # the checkpoint must hold the state from before these steps
    saving.destroy()
    elsewhere = cut(coarse(), ["resident", "host"], locations=["host", "device", "host"])
    for resumed in (coarse(), elsewhere):
        resumed.load_checkpoint(str(tmp_path))
        ours = outcome(resumed, 1, first=3)
        assert_same(ours, (stock()[0], stock()[1][3:], stock()[2][3:]))


def test_parameters_that_are_apart_are_shown_whole():
    ours = cut(coarse(), ["host"], locations=["host", "device"])
    optimizer = ours.optimizer
    train(ours, 2)
    assert optimizer.lp_param_buffer.numel() == 0
    assert not any(w.numel() for w in optimizer.__dict__["fp16_partitioned_groups_flat"])
    for number in (2, 3):
        train(ours, 1, first=number)
        shown, masters = list(optimizer.fp16_partitioned_groups_flat), optimizer._masters()
        assert all(map(torch.equal, shown, [m.data.to(torch.bfloat16) for m in masters]))
    optimizer.refresh_fp32_params()
    assert all(map(torch.equal, [w.float() for w in shown], [m.data for m in masters]))
    ours.destroy()


def look(engine, number):
    """Append to ``engine.seen`` the training state, the gradients and the fp32 partitions that DeepSpeed's
    attributes and getters show after a step.
    """
    from deepspeed.utils import safe_get_full_grad

    del number
    engine.seen = getattr(engine, "seen", [])
    engine.seen.append(state_of(engine))
    grads = {str(i): safe_get_full_grad(p).clone() for i, p in enumerate(engine.module.parameters())}
    engine.seen.append(grads)
    flat = engine.optimizer.fp32_partitioned_groups_flat
    engine.seen.append({str(i): part.detach().cpu().clone() for i, part in enumerate(flat)})


def write(engine, number):
    if number == 1:
        set_state(engine)
    if number == 2:
        engine.optimizer.fp32_partitioned_groups_flat[1].data.mul_(0.5)


def away(engine, number):
    if number in (1, 3):
        (engine.offload_states if number == 1 else engine.reload_states)()


@pytest.mark.parametrize("each", [look, write])
def test_what_is_shown_and_what_is_written_between_steps(each):
    engines = [coarse(), cut(coarse())]
    results = [outcome(engine, 4, each=each) for engine in engines]
    assert_same(results[1], results[0])
    shown = [getattr(engine, "seen", []) for engine in engines]
    assert all(not differences(a, b) for a, b in zip(*shown, strict=True))


@pytest.mark.skipif(
    Version(deepspeed.__version__) < Version("0.19"),
    reason="this DeepSpeed cannot move an offloaded optimizer's states",
)
@pytest.mark.parametrize("device", list(DEVICES))
def test_state_and_parameters_go_away_and_come_back(device):
    ours = cut(coarse(), device=device)
    before = session_of(ours).plan
    locations = []

    def each(engine, number):
        away(engine, number)
        states = session_of(engine).executor.states
        locations.append({state.parameter_location for state in states})
        ends = [state.wire.data_ptr() + state.wire.nbytes for state in states]
        parts = [p.ds_tensor for p in engine.module.parameters()]
        assert all(any(s.wire.data_ptr() <= p.data_ptr() < e for s, e in zip(states, ends, strict=True)) for p in parts)

    result = outcome(ours, 4, each=each)
    assert_same(result, stock())
    if not session_of(ours).device.unified:
        assert locations == [{"device"}, {"host"}, {"host"}, {"device"}]
    assert session_of(ours).plan.placements == before.placements


def test_another_plan_of_the_same_pieces():
    ours = cut(coarse())

    def each(engine, number):
        switch_plan(engine, plan_for(engine, [["resident"], ["host"], ["device"], MIX][number % 4], pieces=True))

    assert_same(outcome(ours, each=each), stock())


@pytest.mark.parametrize("pattern", [MIX, ["resident"]])
def test_their_footprint_is_what_is_allocated(pattern):
    # Check the predicted memory to the byte: DeepSpeed's fp32 tensors stay, even if all state is on the GPU.
    ours = cut(coarse(), pattern, seed=None)
    own = session_of(ours)
    sizes = own.engine.sizes()
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, state_stays=own.engine.shares_state)
    assert footprint(work, own.plan)["host"] == session_of(ours).host_bytes()
    train(ours, 1)
    resident = [s for s in own.executor.states if s.placement == "resident"]
    ours.destroy()
    flats = {p.untyped_storage().data_ptr() for p in ours.optimizer.__dict__["fp32_partitioned_groups_flat"]}
    assert all(s.p.untyped_storage().data_ptr() in flats for s in resident), (
        "the masters must be in DeepSpeed's tensors"
    )


def test_stored_state_and_own_steps_are_not_for_pieces():
    own = {"extra": {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}}
    for placement, options in (("stored", {}), ("host", own)):
        engine = start(subgroup_size=LARGE, **options)
        with pytest.raises(PlanError, match="placement of the engine's 2 subgroups"):
            ebbtide.runtime.attach(engine, plan_for(engine, [placement], pieces=True))
        engine.destroy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU refuses no page locks")
@pytest.mark.parametrize(
    ("granted", "locations"), [(1, None), (5, None), (8, None), (10, None), (13, ["host", "device"])]
)
def test_a_refused_page_lock_leaves_stock(fake, granted, locations):
    engine = coarse()
    fake.runtime.refuses_after = granted
    plan = plan_for(engine, ["resident", "device"], pieces=True, locations=locations)
    with pytest.raises(MemoryError, match=r"CUDA error 2\. Free host memory"):
        ebbtide.runtime.attach(engine, plan, device=CudaDevice())
    assert not fake.runtime.locked
    assert_same(outcome(engine), stock())


@pytest.mark.parametrize(
    "options", [{"stage": 1}, {"stage": 2}, {}, {"offload_param": {"device": "cpu"}, "accumulation": 2}]
)
def test_auto_cuts_what_is_large(options, monkeypatch):
    monkeypatch.setattr(subgroup_size, "LEAST_PIECE", SUBGROUP)
    options = {"subgroup_size": 10**9, **options}
    stock = outcome(start(**options))
    engine = start(**options)
    ebbtide.runtime.attach(engine, "auto", device=DEVICES[DEVICE]())
    sizes = session_of(engine).engine.sizes()
    assert len(sizes) > 3
    assert sizes == subgroups_of(engine.optimizer, SUBGROUP)
    assert_same(outcome(engine), stock)


def test_auto_switches_to_early_updates_of_pieces(monkeypatch):
    monkeypatch.setattr(subgroup_size, "LEAST_PIECE", SUBGROUP)
    monkeypatch.setattr(auto, "better_plan", lambda _, __, now, *___: QuickPlan(now.with_bits(early=True), 1.0, 2.0))
    stock, engine = outcome(coarse(), 8), coarse()
    ebbtide.runtime.attach(engine, "auto", device=DEVICES[DEVICE]())
    updated_early = []

    def each(live, number):
        del number
        updated_early.append(sum(session_of(live).plan.updated_early))

    assert_same(outcome(engine, 8, each=each), stock)
    pieces = len(session_of(engine).executor.states)
    assert updated_early == [0] * (auto.WATCHED_STEPS - 1) + [pieces * (DEVICE != "unified")] * 5


def dropping(size=SIZES["tiny"]):
    """Return a byte GPT with dropout after every block, so that each forward pass draws random numbers."""
    torch.manual_seed(0)
    model = ByteGPT(size)
    for block in model.blocks:
        block.register_forward_hook(lambda module, _, out: torch.nn.functional.dropout(out, 0.2, module.training))
    return model


@pytest.mark.skipif(DEVICE == "unified", reason="one memory has no other place for parameters")
@pytest.mark.parametrize("options", [{"subgroup_size": SUBGROUP}, {"accumulation": 2, "clipping": 0.01}])
def test_auto_moves_parameters_and_trains_the_same_bits(options, monkeypatch):
    # DeepSpeed's config keeps all parameters on the GPU. The plan comes from the real search. The search is told that
    # the CPU updates slowly and that no GPU memory is free.
    monkeypatch.setattr(subgroup_size, "LEAST_PIECE", SUBGROUP)
    monkeypatch.setattr(auto, "better_plan", functools.partial(with_a_slow_cpu, auto.better_plan))
    options = {"subgroup_size": 4 * LARGE, **SHORT_LIVED, **options}
    micro_batches = options.get("accumulation", 1)
    count = (auto.WATCHED_STEPS + 2) * micro_batches
    stock = outcome(start(dropping(MANY_LAYERS), **options), count)
    engine, locations = start(dropping(MANY_LAYERS), **options), []
    ebbtide.runtime.attach(engine, "auto", device=DEVICES[DEVICE](), machine=node(device_kind="emulated"))

    def each(live, number):
        del number
        own = session_of(live)
        locations.append({state.parameter_location for state in own.executor.states})
        assert {*own.plan.parameter_locations} == locations[-1]

    ours = outcome(engine, count, each=each)
    before = auto.WATCHED_STEPS * micro_batches - 1
    assert locations[:before] == [{"device"}] * before
    assert all("host" in there for there in locations[before:])
    assert_same(ours, stock)
    assert all(torch.equal(ours[0][name], value) for name, value in stock[0].items())


def with_a_slow_cpu(better_plan, workload, machine, current, _free_device, free_host):
    """Return the plan that ``better_plan`` makes for a machine with a slow CPU, fast links and no free GPU memory."""
    slow = machine.with_rates(host_adam_params_per_s=1e5, h2d_bytes_per_s=1e11, d2h_bytes_per_s=1e11)
    return better_plan(workload, slow, current, 0, free_host)


@pytest.mark.parametrize("options", [{"extra": {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}}])
def test_auto_leaves_deepspeeds_own_subgroups(options, monkeypatch):
    monkeypatch.setattr(subgroup_size, "LEAST_PIECE", SUBGROUP)
    engine = start(subgroup_size=LARGE, **options)
    ebbtide.runtime.attach(engine, "auto", device=DEVICES[DEVICE]())
    assert len(session_of(engine).engine.sizes()) == 2
    engine.destroy()


def test_small_models_stay_whole():
    engine = start(subgroup_size=10**9, parameters=trainable)
    ebbtide.runtime.attach(engine, "auto", device=DEVICES[DEVICE]())
    assert len(session_of(engine).engine.sizes()) == 1
    engine.destroy()
