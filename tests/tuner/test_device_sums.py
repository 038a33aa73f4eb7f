"""Tests that the plan search keeps the gradient sums of micro-batches on the GPU if memory allows that and
the iteration gets faster.
"""

import ebbtide.tuner
from ebbtide.simulator import build_schedule, simulate

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
