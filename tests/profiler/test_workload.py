"""Tests of the workload that the profiler reads from a DeepSpeed engine in training."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ebbtide.profiler import SampledProfile, profile_engine
from ebbtide.profiler.watcher import units
from ebbtide.profiler.workload import _own_gradient_path_s
from ebbtide.runtime.zero.flat_partitions import subgroups_of

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, train_step
from tests.runtime.contract.test_module_hooks import Reads
from tests.runtime.contract.training import SUBGROUP, start, train

ONE_BLOCK = replace(SIZES["tiny"], layers=1)


def test_units_are_the_blocks_and_what_is_beside_them():
    names = [name for name, _ in units(ByteGPT(SIZES["tiny"]))]
    assert names == ["bytes_in", "positions", "blocks.0", "blocks.1", "norm", "head"]
    wrapped = torch.nn.Module()
    wrapped.model = ByteGPT(SIZES["tiny"])
    assert units(wrapped)[2][0] == "model.blocks.0"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_live_engine(only_rank, accumulation):
    engine = start(ByteGPT(ONE_BLOCK), accumulation=accumulation)
    batches, numbers = Batches(2, 32), iter(range(10**6))

    def one_step(live):
        for _ in range(accumulation):
            train_step(live, batches.at(next(numbers)))

    workload = profile_engine(engine, one_step, iterations=2)
    assert workload.subgroups == tuple(engine.optimizer.fp16_partitioned_groups_flat_numel)
    assert workload.subgroup_size == SUBGROUP
    assert sum(layer.params for layer in workload.layers) == workload.params
    assert [layer.name for layer in workload.layers][:3] == ["bytes_in", "positions", "blocks.0"]
    assert workload.gradient_accumulation_steps == accumulation
    assert workload.clip
    assert workload.forward_s > 0
    assert workload.backward_s > 0
    assert workload.stock_backward_extra_s is not None
    assert {p.phase for p in workload.memory_curve} >= {"forward", "backward", "step"}
    times = [p.t_s for p in workload.memory_curve]
    assert times == sorted(times)
    assert "backward" not in vars(engine), "the profiler's wrappers must be removed"
    assert "partition_grads" not in vars(engine.optimizer)
    engine.destroy()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_live_engine_below_zero_3(only_rank, stage, accumulation):
    engine = start(ByteGPT(ONE_BLOCK), stage=stage, accumulation=accumulation)
    batches, numbers = Batches(2, 32), iter(range(10**6))

    def one_step(live):
        for _ in range(accumulation):
            train_step(live, batches.at(next(numbers)))

    before = set(vars(engine.optimizer))
    work = profile_engine(engine, one_step, iterations=2)
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer"
    assert set(vars(engine.optimizer)) - before <= {"_global_grad_norm"}, "the profiler's wrappers must be removed"
    assert (work.zero_stage, work.live_params, work.gradient_accumulation_steps) == (stage, None, accumulation)
    assert work.params == sum(map(int, engine.optimizer.partition_size))
    held = {name: sum(p.numel() for p in module.parameters()) for name, module in units(engine.module)}
    padding = work.params - sum(held.values())
    assert {layer.name: layer.params for layer in work.layers[:-1]} == dict(list(held.items())[:-1])
    assert work.layers[-1].params == held["head"] + padding
    assert work.planned.backward_s > 0
    for size in (SUBGROUP, 7_001):
        assert work.recut(size).subgroups == subgroups_of(engine.optimizer, size), "a plan for it must fit"
    one_step(engine)
    engine.destroy()


def test_a_part_of_the_gradients_stands_for_all(monkeypatch):
    """Check the profiled time in which gradients are copied to the host and their norm is computed.

    In this test, each copy and each norm takes 1 s. The gradients of a subgroup are copied once for each micro-batch,
    and their norm is computed once in a step. If only a part of the gradients is measured, the time is scaled up to all
    of them.
    """
    clock, flats = itertools.count(), [torch.empty(n) for n in (100, 300, 100)]
    held = {"round_robin_bit16_groups": [[flat] for flat in flats], "round_robin_bit16_offsets": [[0]] * len(flats)}
    held["partition_size"] = [flat.numel() for flat in flats]
    optimizer = SimpleNamespace(gradient_accumulation_dtype=torch.bfloat16, **held)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))  # each reading of the clock adds one second
    assert _own_gradient_path_s(optimizer, micro=1) == 3 + 3
    assert _own_gradient_path_s(optimizer, micro=4) == 4 * 3 + 3
    # Of the gradients, only the first two are larger.
    monkeypatch.setattr("ebbtide.profiler.workload.UNCACHED_BYTES", 1000)
    assert _own_gradient_path_s(optimizer, micro=4) == (4 * 2 + 2) * 500 / 400


@pytest.mark.parametrize("reuse", [0, 10**9])
def test_what_a_live_engine_gathers_again(only_rank, reuse):
    """Check which parameters the profiler records as gathered a second time in a step, for backward under ZeRO-3.

    Norms and biases are gathered once, because DeepSpeed keeps them until the end of the step. The other parameters are
    gathered again, unless DeepSpeed keeps them because their next use comes soon (``stage3_max_reuse_distance``).
    """
    options = {"stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 1}
    engine = start(ByteGPT(ONE_BLOCK), stage3_param_persistence_threshold=100, **options)
    numbers = iter(range(10**6))
    batches = Batches(2, 32)
    workload = profile_engine(engine, lambda e: train_step(e, batches.at(next(numbers))), 2)
    small = sum(p.numel() for p in engine.module.parameters() if p.ds_numel <= 100)
    blocks = [layer for layer in workload.layers if layer.name.startswith("blocks")]
    assert blocks
    assert sum(layer.persistent_params for layer in workload.layers) == small > 0
    if reuse:
        assert all(layer.regathered_params == 0 for layer in blocks)
        assert workload.live_params == workload.params
    else:
        assert all(n.regathered_params == n.params - n.persistent_params for n in blocks)
        assert workload.live_params < workload.params
    engine.destroy()


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"stage3_param_persistence_threshold": 0, "accumulation": 2}, {"stage": 1}, {"stage": 2, "accumulation": 2}],
)
def test_profiling_changes_no_bit(only_rank, recompute, options):
    """Check the bits of steps with and without DeepSpeed's hooks on modules, and of those after them."""

    def train_on(engine, batches):
        for tokens in batches:
            engine.backward(loss := engine(tokens))
            engine.step()
            losses.append(loss.detach())

    generator, micro = torch.Generator().manual_seed(1), options.get("accumulation", 1)
    batches = [torch.randint(0, 64, (2, 12), generator=generator) for _ in range(14 * micro)]
    states, found = [], []
    for profiled in (False, True):
        losses, left = [], iter(batches)
        torch.manual_seed(0)  # before the model: some of its weights are random
        engine = start(Reads(recompute, options.get("stage", 3)), clipping=0.5, micro_batch=2, **options)
        torch.manual_seed(5)
        if profiled:
            work = profile_engine(engine, lambda live, left=left: train_on(live, itertools.islice(left, micro)), 2)
            assert len(losses) == 9 * micro, "the last three without hooks"
            assert work.planned.forward_s != work.forward_s
            assert work.planned.backward_s != work.backward_s
        train_on(engine, left)
        states.append(state_of(engine))
        found.append(torch.stack(losses))
        engine.destroy()
    assert torch.equal(*found)
    assert not differences(*states)


def test_single_steps_are_watched_and_those_between_them_are_not(only_rank):
    plain = start()
    expected, _ = train(plain, 6)
    plain.destroy()
    engine = start()
    profile, batches = SampledProfile(engine), Batches(2, 32)
    with pytest.raises(ValueError, match="must be >= 1"):
        profile.workload()
    losses = []
    for step in range(6):
        if step % 2:
            losses.append(profile.step(*batches.at(step), bare=step == 5).detach())
        else:
            losses.append(train_step(engine, batches.at(step)))
        assert "backward" not in vars(engine), "the profiler's wrappers must be removed"
    workload = profile.workload()
    assert workload.phase_times["iteration"].n == 2, "without the step without hooks"
    assert workload.planned.backward_s > 0
    assert workload.planned != workload
    assert min(q.median for q in workload.phase_times.values()) > 0
    assert workload.subgroups == tuple(engine.optimizer.fp16_partitioned_groups_flat_numel)
    engine.destroy()
    assert torch.equal(torch.stack(losses), torch.stack(expected))


def test_what_a_module_costs_the_host_counts_where_a_device_computes(only_rank, monkeypatch):
    engine = start()
    profile, batches = SampledProfile(engine), Batches(2, 32)
    for number in range(2):
        profile.step(*batches.at(number))
    assert profile.workload().module_issue_s == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = profile.workload()
    monkeypatch.undo()
    modules = sum(bool(m._parameters) for m in engine.module.modules())
    assert 0 < found.module_issue_s * modules <= found.forward_s
    engine.destroy()


def test_what_is_no_zero_engine_is_refused():
    class Engine:
        optimizer = object()

    with pytest.raises(ValueError, match="must run stock ZeRO-1, 2 or 3"):
        profile_engine(Engine(), lambda engine: None)
    with pytest.raises(ValueError, match="must run stock ZeRO-1, 2 or 3"):
        SampledProfile(Engine())
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        profile_engine(Engine(), lambda engine: None, iterations=0)
