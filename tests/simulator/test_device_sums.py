"""Tests of on-device gradient accumulation in the simulator: the ops, the memory, and the time that is saved."""

import pytest
from ebbtide.simulator import OpKind, Plan, build_schedule, simulate
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES, Holding

from tests.machines import machine, workload


def planned(sums, placements=("host", "device", "stored", "host"), **fields):
    return Plan(subgroup_size=10, placement=Plan.runs(placements), device_sums=sums, **fields)


def crossings(kind, **fields):
    work = workload(gradient_accumulation_steps=3)
    ops = build_schedule(work, planned(**fields), iterations=1).of_kind(kind)
    return [[op.subgroup for op in ops].count(subgroup) for subgroup in range(4)]


def test_the_first_ones_that_leave_the_device_stay():
    stay = [planned(n).summed_on_device for n in range(5)]
    assert [[i for i, s in enumerate(some) if s] for some in stay] == [[], [0], [0, 2], [0, 2, 3], [0, 2, 3]]
    assert "device_sums" not in planned(0).model_dump()
    locations = Plan.runs(["host"] * 4, "home")
    assert planned(9, parameter_home=locations).summed_on_device == planned(9).summed_on_device


def test_they_go_to_the_host_once_and_never_come_back():
    assert crossings(OpKind.GRADIENT_H2D, sums=0) == [2, 0, 2, 2]
    assert crossings(OpKind.GRADIENT_D2H, sums=0) == [3, 0, 3, 3]
    assert crossings(OpKind.GRADIENT_H2D, sums=2) == [0, 0, 0, 2]
    assert crossings(OpKind.GRADIENT_D2H, sums=2) == [1, 0, 1, 3]


def test_early_updates_begin_after_the_one_copy_to_the_host():
    work = workload(gradient_accumulation_steps=2)
    schedule = build_schedule(work, planned(9, ["host"] * 4, speculate=4))
    location = {op.id for op in schedule.of_kind(OpKind.GRADIENT_D2H)}
    early_updates = schedule.of_kind(OpKind.UPDATE_HOST_EARLY)
    assert len(early_updates) == len(location) == 4 * schedule.iterations
    assert all(location.intersection(op.after) for op in early_updates)


def test_over_a_slow_link_an_iteration_is_shorter_by_the_crossings():
    work = workload(forward_s=1 / 6, backward_s=1 / 3, gradient_accumulation_steps=6)
    on = machine(h2d_bytes_per_s=2.0, d2h_bytes_per_s=2.0, host_adam_params_per_s=1e9)
    crosses, stays = (simulate(build_schedule(work, planned(n, ["host"] * 4)), on).iteration_s for n in (0, 4))
    assert crosses >= 6 * 40
    assert 40 + 40 <= stays < 40 + 40 + 12 + 1  # copied to the host once, the new parameters, and forward and backward


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_they_take_their_gradient_on_the_device_and_no_spare_on_the_host(micro_batches):
    work = workload((2**27,) * 4, gradient_accumulation_steps=micro_batches)  # 256 MiB each
    before, after = (footprint(work, planned(n)) for n in (0, 2))
    taken = 2 * 2**28 if micro_batches > 1 else 0
    assert after["device"] - before["device"] == taken  # the third sum still fits into the room
    assert before["host"] - after["host"] == taken
    every = footprint(work, planned(3))
    less = GRADIENTS_UNDER_WAY_BYTES if taken else 0  # no other gradients are under way
    assert every["device"] - before["device"] == 3 * taken // 2 - less
    held = Holding.of_workload(work)
    sizes = [2**27] * 3
    assert [held.most_sums(sizes, n * 2**28, sum(sizes)) for n in (-1, 0, 1, 2)] == ([0, 0, 1, 3] if taken else [0] * 4)
