"""Tests of ZeRO-1 and ZeRO-2 in the simulator: whole parameters on each rank, flat slices of optimizer
state, and steps that wait for all updates before they gather parameters.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from ebbtide.simulator import (
    Lane,
    Layer,
    ModelError,
    OpKind,
    Plan,
    PlanError,
    Quantity,
    Workload,
    build_schedule,
    build_strategy,
    preset,
    simulate,
    workload_from_model,
)
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.schedules.footprint import footprint

from tests.machines import machine, workload

LLAMA = json.loads(Path("examples/llama-3-8b.json").read_text())
TINY = {"layers": 3, "hidden": 65, "heads": 5, "vocabulary": 101, "norm_params": 1}


def host_plan(work, **fields):
    count = len(work.subgroups)
    return Plan(
        subgroup_size=max(work.subgroups),
        placement=Plan.runs(["host"] * count),
        staging_slots=0,
        overlap_forward=False,
        **fields,
    )


def estimated(stage, model=LLAMA, on="h100-node", **fields):
    return workload_from_model(model, preset(on), **{"sequence": 1024, "zero_stage": stage, **fields})


def test_a_step_waits_for_its_updates_and_then_gathers():
    work = workload((10, 10), zero_stage=2, step_gather_s=3.0, network_step_gather_bytes=5)
    timeline = simulate(build_schedule(work, host_plan(work)), machine())
    spans = {s.kind: s for s in timeline.spans if s.iteration == 2}
    gathers = [s for s in timeline.spans if s.iteration == 2 and s.kind == OpKind.PARAMETER_GATHER]
    assert {g.lane for g in gathers} == {Lane.COMPUTE, Lane.NETWORK}
    last_copy = max(s.end_s for s in timeline.spans if s.kind == OpKind.PARAMETER_H2D)
    assert {g.start_s for g in gathers} == {last_copy}
    assert spans[OpKind.STEP_END].end_s == last_copy + 5


def test_zero_1_sends_gradients_to_the_host_once_after_all_of_backward():
    first, second = (
        simulate(build_schedule(w, host_plan(w)), machine())
        for w in (workload((10, 10), zero_stage=s, gradient_accumulation_steps=3) for s in (1, 2))
    )
    locations = [s for s in first.spans if s.iteration == 2 and s.kind == OpKind.GRADIENT_D2H]
    behind = max(s.end_s for s in first.spans if s.iteration == 2 and s.kind == OpKind.BACKWARD)
    assert len(locations) == 2
    assert min(s.start_s for s in locations) >= behind
    again = [s for s in second.spans if s.iteration == 2 and s.kind == OpKind.GRADIENT_D2H]
    assert len(again) == 6


@pytest.mark.parametrize("strategy", ["ebbtide", "zero_offload"])
@pytest.mark.parametrize(("stage", "gradient_bytes"), [(1, 2), (1, 4), (2, 2), (2, 4)])
def test_what_deepspeed_adds_up_on_the_device_goes_to_the_host_once(stage, gradient_bytes, strategy):
    work = workload((10, 10), zero_stage=stage, grad_bytes_per_param=gradient_bytes, gradient_accumulation_steps=3)
    crosses = (stage, gradient_bytes) == (2, 2)
    if strategy == "ebbtide":
        made, sent = build_schedule(work, host_plan(work), iterations=1), 3 if crosses else 1
    else:  # after the last micro-batch also in fp32
        made, sent = build_strategy(strategy, work, iterations=1), 4 if crosses else 1
    assert len(made.of_kind(OpKind.GRADIENT_D2H)) == 2 * sent
    assert len(made.of_kind(OpKind.GRADIENT_H2D)) == 2 * (2 if crosses else 0)
    held = {
        g: footprint(work.model_copy(update={"gradient_accumulation_steps": g}), host_plan(work))["host"]
        for g in (1, 3)
    }
    assert held[3] - held[1] == (20 * gradient_bytes if crosses else 0)


def test_resident_state_takes_its_room_on_the_host_too():
    work = workload((10, 10), zero_stage=2)
    plan = Plan(subgroup_size=10, placement=Plan.runs(["resident"] * 2), staging_slots=0, overlap_forward=False)
    assert footprint(work, plan)["host"] == 20 * 12
    assert footprint(workload((10, 10)), plan)["host"] == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_updates_overlap_the_next_forward_on_one_rank(stage):
    work = workload((10, 10), zero_stage=stage)
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 2))
    apart, beside = (
        simulate(build_schedule(work, plan.model_copy(update={"overlap_forward": overlaps})), machine())
        for overlaps in (False, True)
    )
    assert beside.iteration_s < apart.iteration_s
    if stage == 2:
        assert beside.iteration_s == simulate(build_schedule(workload((10, 10)), plan), machine()).iteration_s


@pytest.mark.parametrize("fields", [{"step_gather_s": 1.0}, {"network_step_gather_bytes": 8}])
def test_a_plan_that_overlaps_forward_is_refused_on_several_ranks(fields):
    work = workload((10, 10), zero_stage=1, **fields)
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * 2))
    with pytest.raises(PlanError, match=r"overlap_forward must be false under ZeRO-1 with several ranks.*got true"):
        build_schedule(work, plan)
    with pytest.raises(PlanError, match=r"overlap_forward must be false for ZeRO-1 with several ranks"):
        PlanSweep(work, machine()).evaluate(np.zeros(2, dtype=np.int8), 0)


@pytest.mark.parametrize("name", ["zero3_offload", "twin_flow", "superoffload"])
def test_strategies_of_zero_3_say_what_there_is_instead(name):
    with pytest.raises(ValueError, match=r"needs ZeRO-3, but got .*ZeRO-2.*zero_offload, no_off"):
        build_strategy(name, workload(zero_stage=2))
    with pytest.raises(ValueError, match="needs ZeRO-1 or 2, but got a workload with ZeRO-3"):
        build_strategy("zero_offload", workload())


@pytest.mark.parametrize(
    ("fields", "said"), [({"step_gather_s": 1.0}, "must be 0 under ZeRO-3"), ({"zero_stage": 4}, "zero_stage")]
)
def test_what_a_stage_does_not_have_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        workload(**fields)
    gathering = Layer(params=4, forward_s=1, backward_s=1, network_gather_bytes=1)
    with pytest.raises(ValueError, match="must not gather parameters under ZeRO-2"):
        Workload(name="w", layers=(gathering,), subgroups=(4,), zero_stage=2)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_slices_are_as_deepspeed_cuts_them(stage, ranks):
    # As in DeepSpeed, all parameters are padded to a multiple of twice the number of ranks and divided into equal
    # parts.
    import torch
    from deepspeed.runtime.utils import align_dense_tensors

    work = estimated(stage, TINY, data_parallel=ranks)
    parameters = [n for block in architecture(TINY).blocks() for n in block.params]
    flat = align_dense_tensors([torch.empty(n) for n in parameters], 2 * ranks)
    assert work.params * ranks == sum(t.numel() for t in flat)
    assert work.parameters == ((work.params,),)
    assert sum(layer.params for layer in work.layers) == work.params
    smaller = work.recut(1000)
    assert set(smaller.subgroups[:-1]) == {1008}  # a multiple of 16


def test_the_first_rank_has_the_first_layers():
    work = estimated(2, data_parallel=4)
    held = [layer.params > 0 for layer in work.layers]
    assert held[0]
    assert held == sorted(held, reverse=True)
    assert 0.2 < sum(held) / len(held) < 0.3


def test_memory_by_stage():
    stages = {s: estimated(s, data_parallel=4) for s in (1, 2, 3)}
    one, two, three = (stages[s].device_base_bytes for s in (1, 2, 3))
    whole = 2 * architecture(LLAMA).elements
    assert two - three > 0.5 * whole
    assert one - two == pytest.approx(whole, rel=0.15)
    more = estimated(1, data_parallel=4, gradient_accumulation_steps=4)
    assert more.device_base_bytes > one
    wider = estimated(2, data_parallel=4, gradient_bytes=4)
    assert wider.device_base_bytes - two == 4 * wider.params  # ZeRO-2 adds up in these
    wider = estimated(1, data_parallel=4, gradient_accumulation_steps=4, gradient_bytes=4)
    assert wider.device_base_bytes - more.device_base_bytes >= 2 * whole  # and ZeRO-1 in those of all ranks


def test_what_crosses_between_ranks_by_stage():
    inside = estimated(2, data_parallel=4)
    assert inside.network_step_gather_bytes == 0
    wires = 0.8 * preset("h100-node").other_rates["nvlink_bytes_per_s"].median
    assert inside.step_gather_s >= 0.75 * 2 * 4 * inside.params / wires
    outside = estimated(2, data_parallel=16)
    whole = 2 * architecture(LLAMA).elements
    assert outside.network_step_gather_bytes == pytest.approx(15 / 16 * whole / 4, rel=1e-6)
    assert all(layer.network_gather_bytes == 0 for layer in outside.layers)
    reduced = sum(layer.network_reduce_bytes for layer in outside.layers)
    assert reduced == pytest.approx(2 * 15 / 16 * whole / 4, rel=1e-3)
    assert estimated(2, data_parallel=1).step_gather_s == 0


def test_how_much_of_a_reduction_backward_goes_on_beside():
    def beside(stage, **keys):
        return estimated(stage, ds_config={"zero_optimization": keys}).reduced_beside

    assert beside(3) == 0.1
    assert beside(3, reduce_bucket_size=10**8) == 0.5
    assert beside(3, reduce_bucket_size=10**7) == 1
    automatic = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    assert beside(3, **automatic) == pytest.approx(0.9, rel=1e-6)
    assert beside(3, overlap_comm=False) == beside(2) == beside(1) == 0
    assert beside(2, overlap_comm=True) == 1
    with pytest.raises(ModelError, match=r"zero_optimization.overlap_comm.*'aye'"):
        beside(3, overlap_comm="aye")


def test_zero_1_reduces_once_per_step_whatever_it_accumulates():
    def reducing_s(stage, micro):
        alone, four = (estimated(stage, data_parallel=n, gradient_accumulation_steps=micro) for n in (1, 4))
        return four.backward_s - alone.backward_s

    assert reducing_s(1, 8) == pytest.approx(reducing_s(1, 1), rel=1e-6)
    assert reducing_s(2, 8) == pytest.approx(8 * reducing_s(2, 1), rel=1e-6)


def test_stock_updates_its_slice_in_one_piece():
    work = workload(zero_stage=2, step_gather_s=5.0)
    timeline = simulate(build_strategy("zero_offload", work), machine())
    assert timeline.iteration_s == 4 + 8 + 160 + 40 + 80 + 5
    assert timeline.host_peak_bytes == 40 * (12 + 4 + 2)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"parameters": "wide"}, 4 + 8 + 160 + 40 + 160 + 5),
        ({"parameters": "fresh_16_bit"}, 4 + 8 + 160 + 40 + 2 * 80 + 5),
        ({"pinned": False}, 4 + 8 + 2 * 160 + 40 + 2 * 80 + 5),
    ],
)
def test_older_and_unpinned_ways_of_the_flat_offload(options, seconds):
    # One variant copies parameters to the GPU in fp32, which doubles the bytes. Another one copies parameters from
    # unpinned memory. A third one also copies gradients to unpinned memory. In this test, copies to or from unpinned
    # memory have half the bandwidth of other copies.
    work = workload(zero_stage=2, step_gather_s=5.0)
    half = {f"pageable_{way}_bytes_per_s": Quantity.exact(0.5) for way in ("h2d", "d2h")}
    timeline = simulate(build_strategy("zero_offload", work, **options), machine(**half))
    assert timeline.iteration_s == seconds


def test_a_way_that_no_version_has_is_refused():
    with pytest.raises(ValueError, match=r"parameters must be one of .*got 'other'"):
        build_strategy("zero_offload", workload(zero_stage=2), parameters="other")


def test_round_robin_deals_whole_parameters_out_to_the_ranks():
    def layers(**zero):
        made = workload_from_model(LLAMA, preset("h200"), {"zero_optimization": {"stage": 2, **zero}}, data_parallel=4)
        return [layer.params for layer in made.layers], made

    plain, before = layers()
    dealt, after = layers(round_robin_gradients=True)
    assert sum(plain) == sum(dealt) == sum(after.subgroups) == sum(before.subgroups)
    assert sum(map(bool, plain)) < len(plain) / 2 < sum(map(bool, dealt))


def test_aligned_parameters_are_padded_in_the_flat_buffer():
    sizes = [
        sum(
            workload_from_model(
                TINY, preset("h200"), {"zero_optimization": {"stage": 2, "parameter_alignment": on}}
            ).subgroups
        )
        for on in (False, True)
    ]
    parameters = sum(len(block.params) for block in architecture(TINY).blocks())
    assert sizes[0] < sizes[1] < sizes[0] + 8 * parameters
