"""Tests of when gradients leave DeepSpeed's bucket in the simulator, with results that were worked out by hand."""

import random

import pytest
from ebbtide.simulator import Layer, OpKind, Plan, Way, Workload, build_schedule, build_strategy, preset
from ebbtide.simulator.estimates.estimate import workload_from_model
from ebbtide.simulator.schedules import buckets
from ebbtide.simulator.schedules.buckets import leavings
from ebbtide.tuner.placements.search import UpdateOrders

from tests.machines import machine, random_workload, workload

HOSTED = Plan(subgroup_size=10, ways=Way.each(["host"] * 4), overlap_forward=False)


def left(work, bucket):
    """Return, for each layer, the numbers of the layers whose gradients leave DeepSpeed's reduce bucket after this
    layer's backward.
    """
    return [[one.layer for one in some] for some in leavings(work, bucket)]


def layers(*params, **others):
    return tuple(Layer(params=n, forward_s=1.0, backward_s=2.0, **others) for n in params)


def test_a_gradient_leaves_when_the_next_one_does_not_fit():
    work = workload((10,) * 6)
    assert left(work, 0) == [[0], [1], [2], [3], [4], [5]]
    assert left(work, 10) == [[1, 0], [2], [3], [4], [5], []]
    assert left(work, 19) == left(work, 10)


def test_a_bucket_of_zero3_is_sorted_by_layer():
    work = workload((10,) * 6)
    # Layers 5 and 4 fill the bucket and are sent when layer 3 is done. Layers 3 and 2 are sent when layer 1 is done.
    assert left(work, 20) == [[0, 1], [2, 3], [], [4, 5], [], []]
    below = work.model_copy(update={"zero_stage": 2})
    assert left(below, 20) == [[1, 0], [3, 2], [], [5, 4], [], []]
    once = work.model_copy(update={"zero_stage": 1})
    assert left(once, 20) == [[0], [1], [2], [3], [4], [5]]


def test_all_that_is_left_leaves_at_the_end_of_backward():
    assert left(workload((10,) * 3), 1000) == [[0, 1, 2], [], []]


def test_small_parameters_leave_with_their_layer():
    # In DeepSpeed, gradients leave the bucket when the next one does not fit. In the simulator, all gradients of a
    # layer leave at one time: when DeepSpeed has reduced half of the layer's elements. So if the bucket holds a single
    # gradient, a layer's gradients leave after the layer's own backward. In DeepSpeed, the last of these gradients
    # would wait for a gradient of the next layer.
    work = Workload(name="w", layers=layers(40, 40), subgroups=(80,), parameters=((10,) * 8,))
    assert left(work, 10) == [[0], [1]]
    # Five gradients fit. The sixth one, half of layer 0's, is computed in the middle of layer 0's backward.
    assert left(work, 50) == [[0], [1]]
    # Six gradients fit. The seventh one is computed after the middle.
    assert left(work, 60) == [[0, 1], []]
    unknown = work.model_copy(update={"parameters": ()})
    assert left(unknown, 10) == [[0], [1]]
    assert left(unknown, 40) == [[1, 0], []]
    assert left(unknown, 80) == [[0, 1], []]


def test_zero2_counts_the_gradients_of_all_ranks_slices():
    work = Workload(name="w", layers=layers(10, 10, 0), subgroups=(20,), zero_stage=2)
    assert left(work, 20) == [[1, 0], [], [2]]
    others = layers(10, 10) + layers(0, params_of_others=10)
    assert left(work.model_copy(update={"layers": others}), 20) == [[2, 1, 0], [], []]


def behind(schedule):
    """Return a list with a pair for each gradient copy of a schedule: the subgroup whose gradient is copied, and the
    layer of the op that the copy waits for.
    """
    copies = [op for op in schedule.ops if op.kind == OpKind.GRADIENT_D2H]
    return [(op.subgroup, schedule.ops[op.after[0]].layer) for op in copies]


def test_copies_of_gradients_wait_for_the_bucket():
    work = workload((10,) * 4, reduce_bucket_params=20)
    assert behind(build_schedule(work, HOSTED, 1)) == [(2, 1), (3, 1), (0, 0), (1, 0)]
    stock = build_strategy("zero3_offload", work.model_copy(update={"reduce_bucket_params": 1000}), iterations=1)
    ends = [op.id for op in stock.ops if op.kind == OpKind.BACKWARD]
    assert min(op.id for op in stock.ops if op.kind == OpKind.GRADIENT_D2H) > max(ends)


def test_a_plan_has_a_bucket_of_its_own():
    work = workload((10,) * 4, reduce_bucket_params=1000)
    own = work.model_copy(update={"planned_bucket_params": 10})
    assert behind(build_schedule(work, HOSTED, 1)) == [(n, 0) for n in range(4)]
    assert behind(build_schedule(own, HOSTED, 1)) == [(3, 2), (2, 1), (1, 0), (0, 0)]
    assert build_strategy("zero3_offload", work) == build_strategy("zero3_offload", own)


def test_state_comes_in_early_once_the_first_gradients_have_left():
    plan = Plan(subgroup_size=10, ways=Way.each(["device"] * 4), staging_slots=2, prefetch=2, overlap_forward=False)
    made = build_schedule(workload((10,) * 4, reduce_bucket_params=10), plan, 1)
    first = next(op for op in made.ops if op.kind == OpKind.STATE_H2D)
    assert [made.ops[i].layer for i in first.after] == [2]


def test_a_reduction_waits_for_the_bucket():
    held = tuple(layer.model_copy(update={"network_reduce_bytes": 4}) for layer in workload().layers)
    work = workload().model_copy(update={"layers": held, "reduce_bucket_params": 20})
    made = build_strategy("no_offload", work, iterations=1)
    found = [(op.layer, made.ops[op.after[0]].layer) for op in made.ops if op.kind == OpKind.GRADIENT_REDUCE]
    assert found == [(2, 1), (3, 1), (0, 0), (1, 0)]


@pytest.mark.parametrize("seed", range(40))
def test_every_gradient_leaves_once_after_it_is_computed(seed):
    rng = random.Random(seed)
    work = random_workload(rng, rng.choice([1, 2, 3]))
    for bucket in (work.reduce_bucket_params, rng.randint(1, work.params)):
        found = leavings(work, bucket)
        assert sorted(one.layer for some in found for one in some) == list(range(len(work.layers)))
        assert all(one.layer >= at for at, some in enumerate(found) for one in some)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("ranks", "stage", "zero", "own", "planned"),
    [
        (1, 3, {}, 500_000_000, 50_000_000),
        (2, 3, {}, 250_000_000, 25_000_000),
        (4, 3, {}, 125_000_000, 125_000_000),
        (4, 2, {}, 500_000_000, 500_000_000),
        (2, 3, {"reduce_bucket_size": 8_000_000}, 4_000_000, 4_000_000),
        (1, 3, {"reduce_bucket_size": 500_000_000}, 500_000_000, 500_000_000),
        (1, 3, {"reduce_bucket_size": "auto"}, 1024**2, 1024**2),
    ],
)
def test_the_bucket_is_the_configs(ranks, stage, zero, own, planned):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}
    work = workload_from_model(LLAMA, preset("h100-node"), config, data_parallel=ranks)
    assert (work.reduce_bucket_params, work.planned_bucket_params) == (own, planned)


def test_a_workload_file_without_a_bucket_keeps_its_meaning():
    work = workload((10,) * 4)
    fields = work.model_dump(mode="json")
    del fields["reduce_bucket_params"], fields["planned_bucket_params"]
    read = Workload.model_validate(fields)
    assert read == work
    assert left(read, read.reduce_bucket_params) == [[0], [1], [2], [3]]


def test_a_whole_layer_leaves_in_the_order_of_its_parameters():
    # If DeepSpeed's reduce bucket holds all gradients, DeepSpeed sorts them by the numbers of their parameters. If the
    # bucket holds one gradient at a time, the last parameter's gradient is copied first, because backward computes it
    # first.
    own = {"layers": layers(20, 20), "parameters": ((10,) * 4,)}
    work = workload((10,) * 4, reduce_bucket_params=1000).model_copy(update=own)
    assert behind(build_schedule(work, HOSTED, 1)) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    one_by_one = work.model_copy(update={"reduce_bucket_params": 10})
    assert behind(build_schedule(one_by_one, HOSTED, 1)) == [(3, 1), (2, 1), (1, 0), (0, 0)]


def test_the_order_of_updates_knows_when_gradients_leave():
    work = workload((10,) * 4, backward_s=2.0)
    assert UpdateOrders(work, machine()).complete_s == [8, 6, 4, 2]
    held = work.model_copy(update={"reduce_bucket_params": 20})
    assert UpdateOrders(held, machine()).complete_s == [8, 8, 6, 6]


@pytest.mark.parametrize("seed", range(40))
def test_a_small_bucket_costs_no_time_and_changes_nothing(seed, monkeypatch):
    # With and without this limit, gradients must leave the bucket after the backward of the same layers.
    rng = random.Random(seed)
    work = random_workload(rng, rng.choice([2, 3])).model_copy(update={"parameters": ()})
    sizes = [layer.params + layer.params_of_others for layer in work.layers]
    bucket = max(1, max(sizes) // rng.randint(65, 500))
    assert max(len(buckets._pieces(n, bucket)) for n in sizes if n) == min(
        buckets.MOST_PIECES, -(-max(sizes) // bucket)
    )
    found = leavings(work, bucket)
    monkeypatch.setattr(buckets, "MOST_PIECES", 10**9)
    assert found == leavings(work, bucket)
