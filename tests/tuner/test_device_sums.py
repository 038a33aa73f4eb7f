"""Tests that the plan search keeps the gradient sums of micro-batches on the GPU if memory allows that and
the iteration gets faster.
"""

import ebbtide.tuner
from ebbtide.simulator import build_schedule, build_strategy, simulate, what_if

from tests.machines import node
from tests.tuner.test_search import workload

GIB = 2**30


def machine(link=4e9, device_gib=4.0):
    return node(h2d_bytes_per_s=link, d2h_bytes_per_s=link, device_memory_bytes=int(device_gib * GIB))


def accumulating(micro_batches=4):
    pass_s = 0.027 / micro_batches
    # With this clip rate, no update begins early.
    counts = {"gradient_accumulation_steps": micro_batches, "clip_rate": 1.0}
    return workload(6, size=7 * 10**7, forward_s=pass_s, **counts)


def planned(micro_batches=4, **facts):
    return ebbtide.tuner.plan(accumulating(micro_batches), machine(**facts), memory_margin=0)


def test_sums_stay_and_the_plan_is_faster():
    found = planned()
    assert any(found.summed_on_device)
    timeline = simulate(build_schedule(accumulating(), found), machine())
    told = found.prediction
    assert abs(told.iteration_s - timeline.iteration_s) <= 1e-9 * timeline.iteration_s
    crossing = found.with_bits(sum_on_device=False)
    crossing_s = simulate(build_schedule(accumulating(), crossing), machine()).iteration_s
    assert told.iteration_s < 0.97 * crossing_s
    assert told.lower_bound_s <= told.iteration_s
    assert told.device_peak_bytes <= machine().device_memory_bytes
    assert any("accumulate gradients on the GPU" in reason for reason in found.reasons)


def test_with_less_memory_not_all_of_them_stay():
    more, less = planned(), planned(device_gib=3.1)
    assert less.prediction.device_peak_bytes <= 3.1 * GIB
    assert 0 < sum(less.summed_on_device) < len(less.ways)
    assert less.prediction.iteration_s > more.prediction.iteration_s


def test_none_stay_where_there_is_nothing_to_add_up_or_to_save():
    assert not any(planned(1).summed_on_device)
    assert not any("accumulate gradients" in reason for reason in planned(1).reasons)
    assert not any(planned(link=2e12, device_gib=3.1).summed_on_device)


def test_evenly_spread_plans_have_sums_on_the_device_too():
    """Check that plans made without a search keep as many gradient sums on the GPU as fit.

    `what_if` makes such plans if it has no planner. They spread their placements evenly over the model.
    """
    hosted = {"device_share": 0.0, "resident_share": 0.0}
    crossing = build_strategy("ebbtide", accumulating(), **hosted)
    table = what_if(
        accumulating(), machine(), [("ebbtide", hosted)], gpu_memory_bytes=[2.9 * GIB / 0.95, 4.0 * GIB / 0.95]
    )
    few_s, many_s = table.iteration_s
    assert few_s == simulate(crossing, machine()).iteration_s
    assert many_s < 0.9 * few_s
    assert (table.iteration_s >= table.lower_bound_s * (1 - 1e-9)).all()
