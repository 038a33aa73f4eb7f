"""Tests that the simulator's fast engine and the plan sweep have the results of the reference simulator,
on random inputs.
"""

import random

import numpy as np
import pytest
from ebbtide.simulator import (
    STRATEGIES,
    Lane,
    Machine,
    OpKind,
    Plan,
    Quantity,
    Schedule,
    ScheduleBuilder,
    build_schedule,
    build_strategy,
    simulate,
)
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.schedules.strategies import stages
from ebbtide.simulator.update.order import UpdateOrder, order_of
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import PLACEMENT_CODES
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import machine, random_machine, random_workload, workload

EXACT = {"rel": 1e-9, "abs": 1e-9}


def assert_same(schedule, on, *, phases=True):
    reference, fast = simulate(schedule, on), simulate_fast(schedule, on)
    if phases:
        assert fast.iteration_s == pytest.approx(reference.iteration_s, **EXACT)
    assert fast.makespan_s == pytest.approx(reference.makespan_s, **EXACT)
    for name, seconds in reference.phases().items() if phases else ():
        assert fast.phases[name] == pytest.approx(seconds, **EXACT), name
    assert fast.device_peak_bytes == reference.device_peak_bytes
    assert fast.host_peak_bytes == reference.host_peak_bytes
    ends = sorted(span.end_s for span in reference.spans)
    assert np.sort(fast.end_s) == pytest.approx(ends, **EXACT)


def random_order(placements, rng):
    named = rng.choice(["forward", "arrival", None])
    if named:
        return UpdateOrder(host=named, device=rng.choice(["forward", "arrival"]))
    return order_of(rng.sample(range(len(placements)), len(placements)), placements)


def with_storage(on, rng):
    """Return a copy of a simulated machine with a drive of random read and write bandwidth."""
    rates = {f"storage_{way}_bytes_per_s": 10 ** rng.uniform(0, 3) for way in ("read", "write")}
    rates["storage_duplex_factor"] = rng.uniform(0.3, 1.0)
    return on.model_copy(update={name: Quantity.exact(rate) for name, rate in rates.items()})


def enlarged(work, on, rng):
    """Return a workload and a simulated machine that differ from the given ones in two ways.

    The times for launching a module, and for starting the updates, are zero or random. In half of the cases, the number
    of parameters and all speeds in bytes or parameters per second are multiplied by 2**24. Copies then take as long as
    before, but gradients exceed the number of bytes that may be on their way to the host at once. So the simulated
    backward has to wait for gradient copies.
    """
    issued = {name: rng.choice([0.0, rng.uniform(0, 2)]) for name in ("module_issue_s", "step_issue_s")}
    factor = rng.choice([1, 2**24])
    if factor > 1:
        layers = [layer.model_copy(update={"params": factor * layer.params}) for layer in work.layers]
        sizes = [factor * n for n in work.subgroups]
        issued |= {"layers": tuple(layers), "subgroups": tuple(sizes)}
        rates = [n for n in Machine.model_fields if n.endswith(("bytes_per_s", "params_per_s"))]
        known = {n: factor * getattr(on, n).median for n in rates if getattr(on, n) is not None}
        on = on.model_copy(update={n: Quantity.exact(rate) for n, rate in known.items()})
    return work.model_copy(update=issued), on


def random_job(rng):
    """Return a random workload, with any ZeRO stage, and a random machine with storage (see `enlarged`)."""
    work, on = random_workload(rng, rng.choice([1, 2, 3, 3])), with_storage(random_machine(rng), rng)
    return enlarged(work, on, rng)


def random_plan(work, rng):
    known = list(RECIPES) if work.zero_stage == 3 else ["host", "device", "resident"]
    placements = rng.choices(known, k=len(work.subgroups))
    slots, host_slots = rng.randint(1, 4), rng.randint(1, 4)
    locations = ["device"] * len(placements)
    if work.zero_stage == 3:
        locations = rng.choices(rng.choice([["device"], ["host"], ["device", "host"]]), k=len(locations))
    return Plan(
        subgroup_size=max(work.subgroups),
        placement=Plan.runs(placements),
        staging_slots=slots,
        parameter_home=Plan.runs(locations, "home"),
        prefetch=rng.randint(0, slots),
        threads=rng.choice([0, 1, 2]),
        host_slots=host_slots,
        speculate=rng.randint(0, len(placements)),
        speculate_among=rng.randint(0, len(placements)),
        speculate_visits=rng.choice([0, rng.randint(0, len(placements))]),
        device_sums=rng.choice([0, rng.randint(0, len(placements))]),
        overlap_forward=work.overlaps_forward and rng.random() < 0.7,
        order=random_order(placements, rng),
    )


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_ops_on_every_lane(seed):
    rng = random.Random(seed)
    out = ScheduleBuilder()
    rates = {
        Lane.COMPUTE: "wall_s",
        Lane.DEVICE_UPDATE: "device_adam_params_per_s",
        Lane.H2D: "h2d_bytes_per_s",
        Lane.H2D_PARAMETERS: "h2d_bytes_per_s",
        Lane.D2H: "d2h_bytes_per_s",
        Lane.HOST: "host_adam_params_per_s",
        Lane.STORAGE: "storage_write_bytes_per_s",
        Lane.NETWORK: "network_bytes_per_s",
        Lane.STORAGE_READ: "storage_read_bytes_per_s",
        Lane.H2D_FETCH: "h2d_bytes_per_s",
        Lane.D2H_GRADIENTS: "d2h_bytes_per_s",
        Lane.H2D_GRADIENTS: "h2d_bytes_per_s",
        Lane.ISSUE: "wall_s",
    }
    # Some schedules have few lanes and few kinds. Many ops then differ in one value only, and each value must count.
    lanes = rng.sample(list(Lane), rng.choice([1, 2, len(Lane)]))
    kinds = rng.choice([list(OpKind), [OpKind.GRADIENT_D2H, OpKind.STATE_D2H]])
    work, dram_bytes = ([rng.uniform(0, most) for _ in range(2)] for most in (50, 300))
    for number in range(rng.randint(1, 60)):
        lane = rng.choice(lanes)
        out.iteration = number // 20
        out.add(
            rng.choice(kinds),
            lane,
            rng.choice([0.0, *work, rng.uniform(0, 50)]),
            rng.choice([rates[lane], "wall_s"]),
            rng.sample(range(number), min(number, rng.randint(0, 4))),
            dram_bytes=rng.choice([0.0, *dram_bytes, rng.uniform(0, 300)]),
            cores=rng.choice([0, 1, 4, np.inf]),
            device_share=rng.choice([0.0, 0.5, 1.0]),
            latency_s=rng.choice([0.0, 0.1]),
            device_alloc_bytes=rng.randint(0, 9),
            device_free_bytes=rng.randint(0, 9),
            host_alloc_bytes=rng.randint(0, 9),
            host_free_bytes=rng.randint(0, 9),
        )
    schedule = Schedule(ops=tuple(out.ops), iterations=3, ranks_per_node=rng.choice([1, 2, 4]))
    # The phase of a forward on the storage lane is undefined, so phases are not compared.
    assert_same(schedule, random_machine(rng), phases=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(sorted(STRATEGIES)))
def test_every_strategy(seed, name):
    rng = random.Random(seed)
    work = random_workload(rng, rng.choice(stages(name)))
    assert_same(build_strategy(name, work), random_machine(rng))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_sweep_builds_and_runs_the_schedule_of_the_plan(seed):
    rng = random.Random(seed)
    work, on = random_job(rng)
    sweep = PlanSweep(work, on)
    for _ in range(3):  # buffers are reused
        plan = random_plan(work, rng)
        reference = simulate(build_schedule(work, plan), on)
        swept = sweep.result(plan)
        assert swept.iteration_s == pytest.approx(reference.iteration_s, **EXACT)
        assert swept.phases == pytest.approx(reference.phases(), **EXACT)
        assert swept.device_peak_bytes == reference.device_peak_bytes
        assert swept.host_peak_bytes == reference.host_peak_bytes


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_longer_warm_up_gives_the_mean_of_the_later_iterations(seed):
    rng = random.Random(seed)
    work, on = random_job(rng)
    plan = random_plan(work, rng)
    few, many = (PlanSweep(work, on, n).evaluate_plan(plan)[0] * (n - 2) for n in (6, 12))
    assert PlanSweep(work, on).longer(12, 5).evaluate_plan(plan)[0] == pytest.approx((many - few) / 6, **EXACT)


def test_more_kinds_of_ops_than_are_remembered():
    out = ScheduleBuilder()
    for number in range(40):
        out.add(OpKind.UPDATE_HOST, Lane.HOST, 3.0 + number, "host_adam_params_per_s", dram_bytes=10.0 + 7 * number)
        out.add(OpKind.STATE_H2D, Lane.H2D, 2.0 + number, "h2d_bytes_per_s", dram_bytes=5.0 + 3 * number)
        out.add(OpKind.STATE_D2H, Lane.D2H, 1.0 + number, "d2h_bytes_per_s", dram_bytes=2.0 + number)
    on = machine(dram_bytes_per_s=8.0, duplex_factor=0.7)
    assert_same(Schedule(ops=tuple(out.ops)), on)


def test_the_speeds_of_ops_that_run_together_again_are_not_computed_again(monkeypatch):
    for name in ("run", "_events", "_speeds"):  # as Python, so that their calls can be counted
        monkeypatch.setattr(kernel, name, getattr(kernel, name).py_func)
    computed, find = [], kernel._find_speeds

    def counted(slot, count, capacity, notes):
        computed.append(int(sum(notes.bits[notes.active[:count]])))
        find(slot, count, capacity, notes)

    monkeypatch.setattr(kernel, "_find_speeds", counted)
    out, rng = ScheduleBuilder(), random.Random(0)
    for _ in range(2000):
        number = rng.randrange(4)
        kind, lane, rate = rng.choice(
            [
                (OpKind.UPDATE_HOST, Lane.HOST, "host_adam_params_per_s"),
                (OpKind.STATE_H2D, Lane.H2D, "h2d_bytes_per_s"),
                (OpKind.GRADIENT_D2H, Lane.D2H_GRADIENTS, "d2h_bytes_per_s"),
            ]
        )
        out.add(kind, lane, 3.0 + number, rate, dram_bytes=10.0 + 7 * number)
    schedule, on = Schedule(ops=tuple(out.ops)), machine(dram_bytes_per_s=8.0)
    found = simulate_fast(schedule, on)
    assert len(computed) == len(set(computed)) > 60
    monkeypatch.undo()
    assert found == simulate_fast(schedule, on)


def test_a_compiled_schedule_runs_on_many_machines():
    schedule = build_strategy("twin_flow", workload(), ratio=0.5)
    compiled = compile_schedule(schedule)
    for link in (0.5, 1.0, 8.0):
        on = machine(h2d_bytes_per_s=link)
        assert simulate_fast(compiled, on) == simulate_fast(schedule, on)


def test_a_sweep_refuses_what_a_plan_may_not_be():
    from ebbtide.simulator import PlanError

    sweep = PlanSweep(workload(), machine())
    device = np.array([PLACEMENT_CODES["device"]] * 4, dtype=np.int8)
    with pytest.raises(PlanError, match="got 3 for 4 subgroups"):
        sweep.evaluate(device[:3])
    with pytest.raises(PlanError, match="prefetch=3, staging_slots=2"):
        sweep.evaluate(device, 2, 3)
    with pytest.raises(PlanError, match="staging_slots=0"):
        sweep.evaluate(device, 0, 0)
