"""Staging slots in memory that activations leave: when they are there, and what they change."""

import numpy as np
import pytest
from ebbtide.simulator import Layer, OpKind, Plan, PlanError, Workload, build_schedule
from ebbtide.simulator.analysis.bound import bound
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.analysis.memory_kinds import peaks_by_kind
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.update.footprint import Activations, footprint, slot_bytes
from ebbtide.simulator.update.recipes import HOST_SLOTS

from tests.machines import node as machine
from tests.simulator.test_bounds import random_machine, random_plans, random_workload, steady_s

SIZE = 64_000_000
EACH = 12 * SIZE  # bytes of a slot
ACTIVATIONS = 10**9  # of each layer


def work(layers=4, **fields):
    layer = Layer(params=SIZE, forward_s=0.05, backward_s=0.1, activation_bytes=ACTIVATIONS)
    return Workload(name="w", layers=(layer,) * layers, subgroups=(SIZE,) * layers, **fields)


def planned(*growing, slots=0, **fields):
    return Plan(
        subgroup_size=SIZE,
        placement=Plan.runs(["device"] * 4),
        staging_slots=slots,
        growing_slots=growing,
        prefetch=slots + len(growing),
        **fields,
    )


def ops(schedule, kind, iteration=1):
    return {op.subgroup if op.subgroup >= 0 else op.layer: op for op in schedule.of_kind(kind, iteration)}


def test_a_slot_grows_behind_its_subgroups_backward_and_goes_a_layer_before_its_forward():
    schedule = build_schedule(work(), planned(2, 1))
    backward, fetch = ops(schedule, OpKind.BACKWARD), ops(schedule, OpKind.STATE_H2D)
    assert backward[2].id in fetch[0].after, "the first one that comes in"
    assert backward[1].id in fetch[1].after
    forward = ops(schedule, OpKind.FORWARD, 2)
    left = ops(schedule, OpKind.STATE_D2H)
    waits = {layer: {s for s, op in left.items() if op.id in forward[layer].after} for layer in range(4)}
    # Visits leave in the order 0 to 3, and the two slots are free when the last two have left.
    assert waits == {0: {2}, 1: {3}, 2: set(), 3: set()}


def test_the_peak_has_slots_or_activations_but_not_both():
    peaks = {}
    for plan in (planned(slots=2), planned(3, slots=1), planned(2, 1), planned(0, 0)):
        result = simulate_fast(compiled := compile_schedule(build_schedule(work(), plan)), machine())
        held, beside = footprint(work(), plan)["device"], Activations.of(work())
        assert result.device_peak_bytes == held + beside.most_bytes(plan.grown, EACH)
        peaks[plan.staging_slots, plan.growing_slots] = result.device_peak_bytes
        kinds = peaks_by_kind(compiled, result)["device"]
        assert sum(kinds.values()) == result.device_peak_bytes
        assert kinds.get("staging", 0) == plan.staging_slots * EACH
        assert kinds["activations"] == 4 * ACTIVATIONS
    assert peaks[2, ()] == peaks[1, (3,)] + EACH == peaks[0, (2, 1)] + 2 * EACH
    assert slot_bytes(work(), planned(2, 1)) == EACH


@pytest.mark.parametrize(
    ("left", "wanted", "expected"),
    [
        (4 * ACTIVATIONS + 3 * EACH, 3, (3, ())),
        (4 * ACTIVATIONS + EACH, 3, (1, (3, 2))),  # 1e9 bytes less are more than a slot
        (4 * ACTIVATIONS, 2, (0, (3, 2))),
        (4 * ACTIVATIONS, 6, (0, (3, 2, 1, 0, 0))),  # 5.2 slots in all
        (ACTIVATIONS // 2, 1, (1, ())),  # not even without activations: does not fit
    ],
)
def test_slots_grow_as_soon_as_there_is_room(left, wanted, expected):
    assert Activations.of(work()).slots(left, wanted, EACH) == expected


def test_subgroups_without_parameters_and_far_too_many_slots():
    assert planned(3, 2, 1, 0, 0, 0, slots=1).grown == (3, 2, 1), "there are four visits"


def test_what_a_plan_may_say():
    with pytest.raises(ValueError, match=r"growing_slots must name subgroups, 0 to 3, but got 4"):
        planned(4)
    with pytest.raises(ValueError, match=r"prefetch=2, staging_slots=0 and 1 growing_slots"):
        Plan(subgroup_size=1, placement=Plan.runs(["device"]), staging_slots=0, growing_slots=(0,), prefetch=2)
    with pytest.raises(PlanError, match="growing_slots must be absent under ZeRO-2"):
        build_schedule(work(zero_stage=2), planned(3, overlap_forward=False))
    assert "growing_slots" not in planned(slots=2).model_dump(mode="json")


@pytest.mark.parametrize("guessed", [0, 2])
def test_no_plan_whose_slots_grow_beats_the_bound_of_its_memory(guessed):
    for grown in ((3,), (3, 2), (3, 2, 1), (0, 0)):
        plan = planned(*grown, speculate_visits=guessed)
        result = simulate_fast(build_schedule(work(), plan), machine())
        found = bound(work(), machine(), result.device_peak_bytes, guesses=bool(guessed))
        assert found.iteration_s <= result.iteration_s * (1 + 1e-9)


def test_the_bound_without_slots_that_grow_would_be_none():
    """With memory for no slot beside all activations they visit all the same."""
    plan = planned(3, 2, 1)
    result = simulate_fast(build_schedule(work(), plan), machine())
    room = result.device_peak_bytes
    assert room < footprint(work(), planned(slots=1))["device"] + 4 * ACTIVATIONS
    assert bound(work(), machine(), room).params["device"] > 0


def test_slots_that_grew_are_left_before_activations_need_their_room():
    """There is room for slots in the place of activations, and for none beside them: all four
    visits have left before the third layer's forward, over 10 GB/s.
    """
    slow = machine(d2h_bytes_per_s=10e9, host_adam_params_per_s=1e6)
    room = footprint(work(), planned(slots=1))["device"] - EACH + 4 * ACTIVATIONS
    floor_s = bound(work(), slow, room).iteration_s
    assert floor_s >= (4 * 0.1 + 4 * EACH / 10e9 + 2 * 0.05) * (1 - 1e-3)
    result = simulate_fast(compile_schedule(build_schedule(work(), planned(3, 2, 1, 0))), slow)
    assert result.device_peak_bytes <= room
    assert floor_s <= result.iteration_s


def test_slots_that_grow_are_filled_behind_the_backward_that_makes_room_for_them():
    """The first layer has all activations: no visit comes in before the end of backward."""
    first = work().layers[0].model_copy(update={"activation_bytes": 4 * ACTIVATIONS})
    others = work().layers[0].model_copy(update={"activation_bytes": 0})
    late = work().model_copy(update={"layers": (first, *[others] * 3)})
    slow = machine(h2d_bytes_per_s=10e9, host_adam_params_per_s=1e6)
    room = footprint(late, planned(slots=1))["device"] - EACH + 4 * ACTIVATIONS
    floor_s = bound(late, slow, room).iteration_s
    assert floor_s >= (4 * 0.1 + 4 * EACH / 10e9 + 0.05) * (1 - 1e-3)
    result = simulate_fast(compile_schedule(build_schedule(late, planned(0, 0, 0, 0))), slow)
    assert result.device_peak_bytes <= room
    assert floor_s <= result.iteration_s


@pytest.mark.parametrize("most", [4, 8, 20])
def test_no_random_plan_whose_slots_grow_beats_the_bound_of_its_memory(most):
    rng, grew = np.random.default_rng(most), 0
    for _ in range(2):
        work, on = random_workload(rng, most), random_machine(rng)
        layers = tuple(
            n.model_copy(update={"activation_bytes": int(12 * n.params * rng.uniform(0, 2))}) for n in work.layers
        )
        work = work.model_copy(update={"layers": layers})
        able = [s for s, held in enumerate(work.layers_of_subgroups()) if held]
        sweep = PlanSweep(work, on)
        for codes, slots, *rest in random_plans(rng, len(work.subgroups), 2):
            grown = rng.choice(able, size=int(rng.integers(min(1, slots), slots + 1))).tolist()
            plan = (codes, slots - len(grown), *rest, HOST_SLOTS, grown)
            room = float(sweep.evaluate(*plan)[kernel.DEVICE_PEAK])
            floor_s = bound(work, on, room).iteration_s
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), plan
            grew += bool(grown)
    assert grew


def test_a_forward_before_which_no_slot_goes_waits_for_no_visit():
    """All activations are the last layer's, so that the slots that grew go before the forward of
    the layer below: visits come in and leave while the others run.
    """
    layers = [n.model_copy(update={"activation_bytes": 0}) for n in work(16).layers]
    layers[-1] = layers[-1].model_copy(update={"activation_bytes": 3 * ACTIVATIONS})
    late = work(16).model_copy(update={"layers": tuple(layers)})
    slow = machine(d2h_bytes_per_s=12e9, h2d_bytes_per_s=12e9, host_adam_params_per_s=1e6)
    plan = Plan(
        subgroup_size=SIZE,
        placement=Plan.runs(["device"] * 16),
        staging_slots=1,
        growing_slots=(15, 15, 15),
        prefetch=4,
    )
    result = simulate_fast(compile_schedule(build_schedule(late, plan, 8)), slow)
    assert bound(late, slow, result.device_peak_bytes).iteration_s <= result.iteration_s
