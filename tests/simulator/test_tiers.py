"""Tests of the simulator's tables, which describe the placements of optimizer state. From these tables the simulator
computes the bytes in GPU memory, in host memory and on a drive.

The tests add a new placement to the tables. The engines that simulate schedules must support it without a change.
"""

import random
from dataclasses import replace

import pytest
from ebbtide.simulator import OpKind, Plan, build_schedule, simulate
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import summary
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.schedules.footprint import footprint, tally
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.order import order_of
from ebbtide.simulator.update.recipes import RECIPES, Recipe
from ebbtide.simulator.update.steps import Queue, Wait, into, out_of
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import PLACEMENT_CODES, Way

from tests.machines import machine, random_machine, random_workload, workload

EXACT = {"rel": 1e-9, "abs": 1e-9}
FURTHER = "spilled"


@pytest.fixture
def further(monkeypatch):
    """Add a new placement of optimizer state to the simulator's tables and return its name.

    Tests use it to show that the simulator needs no other change for a new placement. Under this placement, the state
    is read from storage, updated on the host, and written back.
    """
    update, location = RECIPES["host"].steps
    steps = (
        out_of("storage", OpKind.STATE_READ, lambda b: b.state, Wait.NORM),
        replace(update, waits=update.waits | Wait.PREVIOUS),
        location,
        into("storage", OpKind.STATE_WRITE, lambda b: b.state, Wait.PREVIOUS),
    )
    monkeypatch.setitem(RECIPES, FURTHER, Recipe(Queue.HOST, "storage", "host", steps))
    monkeypatch.setitem(PLACEMENT_CODES, FURTHER, len(PLACEMENT_CODES))
    return FURTHER


def planned(placements, locations=(), order=None, **fields):
    """Return a plan with the given placements, without validation."""
    # Validation would refuse the placement ``spilled``, which the fixture `further` adds to the simulator for a test.
    plan = Plan(subgroup_size=10, ways=(Way("host"),) * len(placements), **fields)
    ways = tuple(map(Way, placements, locations or ["device"] * len(placements)))
    return plan.model_copy(update={"ways": ways, "order": order or plan.order})


def random_plan(work, rng, **fields):
    known = [p for p, recipe in RECIPES.items() if work.zero_stage == 3 or recipe.state != "storage"]
    placements = rng.choices(known, k=len(work.subgroups))
    locations = rng.choices(["device", "host"], k=len(placements)) if rng.random() < 0.4 else ()
    slots = rng.randint(1, 4)
    return planned(
        placements,
        locations if work.zero_stage == 3 else (),
        order_of(rng.sample(range(len(placements)), len(placements)), placements),
        staging_slots=slots,
        prefetch=rng.randint(0, slots),
        overlap_forward=work.zero_stage == 3,
        **fields,
    )


@pytest.mark.parametrize("seed", range(25))
def test_the_sweeps_peaks_and_times_are_those_of_the_schedule_for_every_placement(seed, further):
    rng = random.Random(seed)
    work, on = random_workload(rng, rng.choice([3, 3, 2, 1])), random_machine(rng)
    plan = random_plan(work, rng)
    row = PlanSweep(work, on).evaluate_plan(plan)
    schedule = build_schedule(work, plan)
    held = footprint(work, plan)
    timeline = simulate(schedule, on)
    activations = max(m.device_bytes for m in timeline.memory) - schedule.device_base_bytes
    assert row[summary.ITERATION_S] == pytest.approx(timeline.iteration_s, **EXACT)
    assert (row[summary.DEVICE_PEAK], row[summary.HOST_PEAK]) == (held["device"] + activations, held["host"])


def test_stored_state_is_in_no_other_memory_and_its_parameters_cross_like_hosted_ones(further):
    work = workload((10, 20))
    plan = planned([further, "device"], staging_slots=1)
    held = footprint(work, plan)
    assert held["storage"] == 2 * 10 * 12
    assert held["host"] == 20 * 12 + 10 * 2 + 10 * 2  # state of a staged update, a gradient, and its buffer
    assert held["device"] == 20 * 2 + 64 * 12 + 10 * 2  # and gradients that are being copied to the host


def test_what_is_held_is_counted_by_placement():
    held = Holding.of(ADAM, 2, 2)
    # In the order of `ways`, those with parameters on the host last.
    assert held.per_param["host"] == (14, 12, 0, 2, 16, 14, 2, 4)
    assert held.per_param["storage"] == (0, 0, 0, 24) * 2  # a step writes to other extents than the previous step
    counts, elements, largest = tally(zip((3, 4, 5), Way.each(("host", "resident", "host")), strict=True))
    assert (counts[:3], elements[:3], largest[:3]) == ([2, 0, 1], [8, 0, 4], [5, 0, 4])


def test_a_stored_subgroup_takes_host_slots_and_extents():
    work = workload((10, 20, 30))
    plan = Plan(subgroup_size=30, placement=Plan.runs(["stored"] * 3), staging_slots=0, host_slots=2)
    held = footprint(work, plan)
    assert held["storage"] == 2 * 60 * 12
    assert held["host"] == 60 * 2 + 2 * 64 * 12 + 2 * 30 * 2  # gradients, slots of 64 elements, parameters


def test_capacities_are_the_machines_and_a_rank_has_its_part_of_what_is_shared():
    on = machine(host_memory_bytes=800, device_memory_bytes=300)
    assert [TIERS[m].capacity_bytes(on, 4) for m in TIERS] == [300, 200, None]
