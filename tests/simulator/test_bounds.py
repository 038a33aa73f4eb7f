"""No plan beats the bound: not by its numbers of placements, not by resources alone."""

from itertools import permutations, product

import numpy as np
import pytest

from simulator import Layer, Plan, Quantity, Workload, build_schedule, simulate
from simulator.analysis import named_bound
from simulator.analysis.bound import bound
from simulator.analysis.counted_bound import MOST_SUBGROUPS, count_bounds
from simulator.analysis.host_sequence import lowest_end_s
from simulator.analysis.many_plans import PlanSweep
from simulator.analysis.named_bound import MOST_CHOSEN, PLACEMENTS, NamedBounds
from simulator.analysis.sharing_modes import HOME, HOST, LEAVING, HostUpdates, modes
from simulator.analysis.window_program import Window
from simulator.analysis.window_times import Times
from simulator.engines.reference import capacities
from simulator.schedule import Lane, Op, OpKind
from simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES, Holding, tally
from simulator.update.order import UpdateOrder
from tests.machines import node

PLENTY = 2**45


def random_workload(rng, most, zero_stage=3):
    count = int(rng.integers(1, most + 1))
    size = int(10 ** rng.uniform(5, 8))
    sizes = [int(size * rng.uniform(0.3, 1.5)) if rng.random() < 0.5 else size] * count
    if rng.random() < 0.5:
        sizes = [int(size * rng.uniform(0.3, 1.5)) for _ in range(count)]
    cuts = sorted(rng.integers(1, sum(sizes), size=int(rng.integers(0, 14))).tolist())
    forward_s = float(10 ** rng.uniform(-1.5, 0.7)) * sum(sizes) / 7e9
    layers = tuple(
        Layer(params=int(params), forward_s=forward_s * rng.uniform(0.1, 2) / (len(cuts) + 1),
              backward_s=forward_s * rng.uniform(0.2, 4) / (len(cuts) + 1),
              activation_bytes=int(rng.integers(0, 10**8)))
        for params in np.diff([0, *cuts, sum(sizes)])
    )  # fmt: skip
    return Workload(
        name="random", layers=layers, subgroups=tuple(sizes), device_base_bytes=10**9,
        gradient_accumulation_steps=int(rng.choice([1, 1, 2, 3])),
        ranks_per_node=int(rng.choice([1, 1, 2, 4])),
        pipeline_idle_s=float(rng.choice([0, 0, forward_s])),
        grad_bytes_per_param=int(rng.choice([2, 4])), zero_stage=zero_stage,
        step_gather_s=forward_s if zero_stage < 3 and rng.random() < 0.5 else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_no_plan_whose_steps_wait_beats_the_bound(zero_stage):
    rng = np.random.default_rng(zero_stage)
    near = []
    for _ in range(12):
        work, on = random_workload(rng, 6, zero_stage), random_machine(rng)
        lowest = bound(work, on, PLENTY).iteration_s
        sweep = PlanSweep(work, on)
        for codes, slots, prefetch, threads, _, order in random_plans(rng, len(work.subgroups)):
            plan = (codes, slots, prefetch, threads, False, order)
            seconds = float(sweep.evaluate(*plan)[0])
            if lowest > seconds * (1 + 1e-8):
                longer = [PlanSweep(work, on, iterations=n) for n in (200, 400)]
                seconds = max(seconds, settled_s(longer, *plan))
            assert lowest <= seconds * (1 + 1e-6), plan
            near.append(seconds / lowest)
    assert min(near) < 1.02  # else the bound would say little


def random_machine(rng):
    between = {
        "h2d_bytes_per_s": (9.5, 11), "d2h_bytes_per_s": (9.5, 11), "dram_bytes_per_s": (10.5, 12),
        "host_adam_params_per_s": (8.7, 10.3), "stock_host_adam_params_per_s": (8.7, 10.3),
        "storage_write_bytes_per_s": (9, 9), "device_adam_params_per_s": (9.7, 11.2),
    }  # fmt: skip
    rates = {name: float(10 ** rng.uniform(*span)) for name, span in between.items()}
    threads = {
        n: Quantity.exact(rates["host_adam_params_per_s"] * float(rng.uniform(0.3, 1.2)))
        for n in (2, 8, 16)
    }
    return node(
        name="random", cpu_cores=32, host_memory_bytes=PLENTY,
        device_memory_bytes=PLENTY, copy_latency_s=float(rng.choice([0, 1e-5, 1e-3])),
        launch_latency_s=float(rng.choice([0, 1e-5, 1e-3])),
        device_shares_host_cores=bool(rng.random() < 0.2),
        host_adam_by_threads=threads if rng.random() < 0.4 else {},
        duplex_factor=Quantity.exact(float(rng.uniform(0.5, 1.1))),
        **rates,
    )  # fmt: skip


def settled_s(sweeps, *plan):
    """The mean of the last iterations: the first are shorter where the link falls behind."""
    sums = [float(sweep.evaluate(*plan)[0]) * (sweep.iterations - 2) for sweep in sweeps]
    return (sums[1] - sums[0]) / (sweeps[1].iterations - sweeps[0].iterations)


def random_rest(rng, slots, count):
    """Prefetch and on, as `PlanSweep.evaluate` takes them."""
    prefetch = slots if rng.random() < 0.7 else int(rng.integers(0, slots + 1))
    order = [None, np.arange(count)[::-1].copy(), rng.permutation(count)][rng.integers(3)]
    return prefetch, int(rng.choice([0, 1, 2, 4, 20])), bool(rng.random() < 0.9), order


def random_plans(rng, count):
    for _ in range(10):
        codes = rng.choice(3, size=count, p=rng.dirichlet([0.7] * 3)).astype(np.int8)
        visits = int((codes == 1).sum())
        slots = int(rng.integers(1, min(visits, 4) + 1)) if visits else 0
        yield codes, slots, *random_rest(rng, slots, count)


def all_placements(rng, count):
    for codes in product(range(3), repeat=count):
        for slots in range(1, codes.count(1) + 1) or (0,):
            yield np.array(codes, dtype=np.int8), slots, *random_rest(rng, slots, count)


@pytest.mark.skip(reason="those bounds let gradients queue with state, which has other lanes")
@pytest.mark.parametrize("most", [5, 12])
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_beats_the_bound_of_its_counts(seed, most):
    rng = np.random.default_rng([most, seed])
    for _ in range(20):
        workload, machine = random_workload(rng, most), random_machine(rng)
        found = count_bounds(workload, machine, PLENTY)
        columns = (found.host, found.device, found.resident, found.slots)
        floors = dict(zip(zip(*columns, strict=True), found.iteration_s, strict=True))
        lowest = bound(workload, machine, PLENTY).iteration_s
        sweeps = [PlanSweep(workload, machine, iterations=n) for n in (3, 200, 400)]
        plans = all_placements if len(workload.subgroups) <= 5 else random_plans
        for plan in plans(rng, len(workload.subgroups)):
            counts = (*(int((plan[0] == code).sum()) for code in (0, 1, 2)), plan[1])
            floor_s = max(floors[counts], lowest)
            seconds = float(sweeps[0].evaluate(*plan)[0])
            if floor_s > seconds * (1 + 1e-8):
                seconds = max(seconds, settled_s(sweeps[1:], *plan))
            assert floor_s <= seconds * (1 + 1e-6), (counts, plan)


def within_its_own_memory(work, codes, slots):
    """What a plan takes of the device, as `footprint` has it, with its activations."""
    placements = [PLACEMENTS[code] for code in codes]
    held = Holding.of_workload(work).bytes(tally(work.subgroups, placements), slots)
    activations = sum(layer.activation_bytes for layer in work.layers)
    return work.device_base_bytes + held["device"] + activations


@pytest.mark.skip(reason="those bounds let gradients queue with state, which has other lanes")
@pytest.mark.parametrize("most", [6, 14, 30])
def test_no_plan_beats_the_bound_of_its_own_memory_nor_that_of_its_names(most):
    """Memory is what makes elements count, which any number of subgroups may have."""
    rng, near = np.random.default_rng(most), []
    for _ in range(8):
        work, on = random_workload(rng, most), random_machine(rng)
        slow = {name: on.rate(name) / 4 for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
        on = on.with_rates(**slow) if rng.random() < 0.5 else on
        sweeps, times = [PlanSweep(work, on, iterations=n) for n in (3, 200, 400)], Times(work, on)
        for plan in random_plans(rng, len(work.subgroups)):
            codes, slots = plan[:2]
            floors = [bound(work, on, within_its_own_memory(work, codes, slots)).iteration_s]
            if len(codes) <= MOST_CHOSEN:
                floors.append(named_bound._Chosen(times, codes[None, :], slots).lowest_s())
            seconds = float(sweeps[0].evaluate(*plan)[0])
            if max(floors) > seconds * (1 + 1e-8):
                seconds = max(seconds, settled_s(sweeps[1:], *plan))
            assert max(floors) <= seconds * (1 + 1e-6), (floors, plan)
            near.append(seconds / max(floors))
    assert min(near) < 1.001  # else the bounds would say little


def test_few_large_subgroups_are_bounded_by_name():
    """Any host update but the small one leaves forward waiting longer than fluid ones would."""
    sizes, on = (10**8, 10**8, 10**7), machine()
    layers = tuple(Layer(params=n, forward_s=0.05, backward_s=0.02) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, device_base_bytes=10**9)
    named = NamedBounds(Times(work, on), PLENTY)
    # The small one on the host: behind backward its update, its copy, the last forward.
    by_hand = 3 * 0.02 + max(0.01 + 2e7 / 20e9 + 0.05, 3 * 0.05 + 2e8 / 50e9)
    assert named.lowest_s(1, 0, 0) == pytest.approx(by_hand)
    assert named.most_promising(1, 0, 0, 1) == [("resident", "resident", "host")]
    # Two of them: the second's update follows the first's, and is the small one's.
    assert named.lowest_s(2, 0, 0) == pytest.approx(3 * 0.02 + 0.1 + 2e8 / 20e9 + 2 * 0.05)
    assert np.isinf(NamedBounds(Times(work, on), 10**9).lowest_s(0, 0, 0))


def test_new_parameters_come_home_behind_all_fetched_gradients():
    """Four micro-batches on a slow link: the third update waits for the first copy's slot."""
    work = workload(6, gradient_accumulation_steps=4)
    have = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    found = count_bounds(work, have, 10**9 + 6 * 10**8)  # only the host has room
    assert found.host.tolist() == [6]
    # Of a micro-batch: backward, forward; then the first gradient is fetched.
    begin_s = (6 * 0.02 + 6 * 0.01 + 0.02) / 4
    fetched_s = begin_s + 3 * 6 * 0.2
    held_s = fetched_s + 0.2 + 4 * 0.1 + 0.2 + 0.01 / 4
    assert found.iteration_s[0] >= max(held_s, fetched_s + 6 * 0.2)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 6), staging_slots=0,
                order=UpdateOrder(host="arrival"))  # fmt: skip
    timeline = simulate(build_schedule(work, plan, 6), have)
    assert found.iteration_s[0] <= timeline.iteration_s * (1 + 1e-9)


def test_the_first_visit_waits_for_the_norm_or_holds_up_what_is_fetched():
    """Eight hosted, two visits through one slot; ops and backward in seconds."""
    micro, backward_s, forward_s, update_s = 4, 0.04, 0.005, 0.2
    layer = Layer(params=10**8, forward_s=micro * forward_s, backward_s=micro * backward_s)
    work = workload(10, gradient_accumulation_steps=micro, layers=(layer,) * 10)
    rates = {"h2d_bytes_per_s": 3e9, "d2h_bytes_per_s": 3e9, "host_adam_params_per_s": 5e8}
    copy_s, visit_s = 2e8 / 3e9, 12e8 / 3e9
    begin_s = 10 * (backward_s + forward_s)
    norm_s = 4 * begin_s - 10 * forward_s
    # Of the last three micro-batches all sums are fetched, one after the other.
    fetched_s = begin_s + backward_s + 3 * 8 * copy_s
    # Behind the norm: two visits, the first write-back, and what is not copied beside that.
    beside_s = visit_s / update_s * copy_s + 2 * copy_s
    late_s = fetched_s + 2 * visit_s + visit_s + 8 * copy_s - beside_s + forward_s
    # Else the last sums share the way with it, and six updates wait for the first copy.
    shared_s = norm_s - 9 * backward_s + 8 * copy_s + visit_s
    early_s = shared_s + copy_s + 6 * update_s + copy_s + forward_s
    lowest_s = NamedBounds(Times(work, machine(**rates)), PLENTY).lowest_s(8, 2, 1)
    assert late_s < early_s
    assert lowest_s == pytest.approx(late_s)


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 20e9, "d2h_bytes_per_s": 10e9, "dram_bytes_per_s": 1e13,
        "host_adam_params_per_s": 1e9, "stock_host_adam_params_per_s": 1e9,
    }  # fmt: skip
    facts = {
        "host_memory_bytes": PLENTY, "device_memory_bytes": PLENTY,
        "copy_latency_s": 0.0, "launch_latency_s": 0.0,
    }  # fmt: skip
    return node(**{**rates, **facts, **changes})


def workload(subgroups=4, size=10**8, **changes):
    layer = Layer(params=size, forward_s=0.01, backward_s=0.02, activation_bytes=10**8)
    fields = {"device_base_bytes": 10**9, "layers": (layer,) * subgroups} | changes
    return Workload(name="w", subgroups=(size,) * subgroups, **fields)


def floor_of(found, *counts):
    columns = zip(found.host, found.device, found.resident, found.slots, strict=True)
    return found.iteration_s[list(columns).index(counts)]


def test_all_on_the_host_is_a_chain_that_the_bound_knows_to_the_last_microsecond():
    work, have = workload(), machine()
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 4), staging_slots=0)
    in_turn = simulate(build_schedule(work, plan), have).iteration_s
    # Backward; the first layer's gradient home; four updates; one copy home; the last forward.
    assert in_turn == pytest.approx(4 * 0.02 + 2e8 / 10e9 + 4 * 0.1 + 2e8 / 20e9 + 0.01, rel=1e-9)
    # The second layer's gradient is home when backward ends: the host need not wait for the first.
    begun = Plan.from_fields({**plan.model_dump(), "order": {"host": [[1, 0], [2, 3]]}})
    by_hand = 4 * 0.02 + 4 * 0.1 + 2e8 / 20e9 + 0.01
    assert simulate(build_schedule(work, begun), have).iteration_s == pytest.approx(by_hand)
    assert floor_of(count_bounds(work, have, PLENTY), 4, 0, 0, 0) == pytest.approx(by_hand)


def test_gradients_that_come_home_slowly_are_a_chain_too():
    """A gradient takes 0.2 s, and the first layer's comes last: then its update, copy, forward."""
    work, have = workload(), machine(d2h_bytes_per_s=1e9)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 4), staging_slots=0,
                order=UpdateOrder(host="arrival"))  # fmt: skip
    by_hand = 0.02 + 4 * 0.2 + 0.1 + 2e8 / 20e9 + 4 * 0.01
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    assert floor_of(count_bounds(work, have, PLENTY), 4, 0, 0, 0) == pytest.approx(by_hand)


def test_visits_beyond_the_slots_wait_for_a_write_back():
    slow = Layer(params=10**8, forward_s=0.01, backward_s=0.5)  # all can come in meanwhile
    work, have = workload(2, layers=(slow, slow)), machine()
    update_s, in_s, out_s = 1e8 / 50e9, 12e8 / 20e9, 12e8 / 10e9
    by_hand = 2 * 0.5 + update_s + out_s + in_s + update_s + 0.01
    plan = Plan(
        subgroup_size=10**8, placement=Plan.runs(["device"] * 2), staging_slots=1, prefetch=1,
    )  # fmt: skip
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    found = count_bounds(work, have, PLENTY)
    assert floor_of(found, 0, 2, 0, 1) == pytest.approx(by_hand)
    assert floor_of(found, 0, 2, 0, 2) == pytest.approx(2 * 0.5 + 2 * update_s + 2 * 0.01)


def test_a_slot_holds_its_visits_one_after_the_other():
    """Backward is too short to hide what the next iteration's first visit waits for."""
    work, have = workload(2), machine()
    by_hand = 2 * (12e8 / 20e9 + 1e8 / 50e9 + 12e8 / 10e9)
    plan = Plan(
        subgroup_size=10**8, placement=Plan.runs(["device"] * 2), staging_slots=1, prefetch=1,
    )  # fmt: skip
    steady = simulate(build_schedule(work, plan, 12), have).iteration_s
    assert steady == pytest.approx(by_hand)
    assert floor_of(count_bounds(work, have, PLENTY), 0, 2, 0, 1) == pytest.approx(by_hand)


def test_the_last_visit_shares_the_link_with_the_one_before():
    """Two slots: what the last one waits for has left, and the one between leaves beside it."""
    slow = Layer(params=10**8, forward_s=0.01, backward_s=0.5)
    half = {"d2h_bytes_per_s": 20e9, "device_adam_params_per_s": 1e13}
    work = workload(3, layers=(slow,) * 3)
    have = machine(**half, duplex_factor=Quantity.exact(0.5))  # 20 GB/s both ways together
    alone_s = 12e8 / 20e9
    by_hand = 3 * 0.5 + alone_s + 2 * alone_s + 0.01
    plan = Plan(
        subgroup_size=10**8, placement=Plan.runs(["device"] * 3), staging_slots=2, prefetch=2,
    )  # fmt: skip
    steady = simulate(build_schedule(work, plan, 6), have).iteration_s
    assert steady == pytest.approx(by_hand, rel=1e-3)
    times, counts = Times(work, have), tuple(np.array([n]) for n in (0, 3, 2))
    window = Window(times)
    elements = np.zeros(1), np.array([1e8])
    asked = window.requirements(counts, *elements, visit_last=True, early_home=False)[0]
    window_s = float(asked @ window.program.cut(asked))
    assert times.rest_s + window_s == pytest.approx(steady, rel=1e-3)


@pytest.mark.parametrize("updates", [1, 3, 6])
def test_the_best_sequence_of_host_updates_is_that_of_all_permutations(updates):
    rng = np.random.default_rng(updates)
    for _ in range(40):
        ready, work, tail = rng.random((3, updates))
        best = np.inf
        for sequence in permutations(range(updates)):
            now, end = 0.0, 0.0
            for i in sequence:
                now = max(now, ready[i]) + work[i]
                end = max(end, now + tail[i])
            best = min(best, end)
        both = np.ones((2, updates), dtype=bool)
        both[1, 1:] = False
        alone = ready[0] + work[0] + tail[0]
        floors, order = np.array([0.5 * best, alone]), np.array([0, 1])
        found = lowest_end_s(both, np.array([ready, ready]), work, tail, floors, order)
        assert found <= min(best, alone) * (1 + 1e-9)
        assert found == pytest.approx(min(best, alone), rel=1e-5)


def test_slots_are_as_large_as_a_mean_visit():
    """Memory for one slot of the larger size, and for the gradients of half of all elements: eight
    visits have a slot of an eighth of them, more of them one of the larger size.
    """
    sizes = (10**8, 12 * 10**7) * 8
    layers = tuple(Layer(params=n, forward_s=0.01, backward_s=0.02) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, device_base_bytes=10**9)
    have = machine(h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    room = 12 * 12 * 10**7 + 2 * sum(sizes) // 2
    hosted = sum(sizes) - room / (2 + 12 / 8)
    lowest = bound(work, have, 10**9 + room).iteration_s
    assert lowest >= 16 * 0.02 + hosted / 1e9
    # Seven of the larger ones fit.
    codes = np.array([i % 2 for i in range(16)], dtype=np.int8)
    codes[15] = 0
    assert within_its_own_memory(work, codes, 1) <= 10**9 + room + GRADIENTS_UNDER_WAY_BYTES
    assert lowest <= float(PlanSweep(work, have, iterations=12).evaluate(codes, 1, 1)[0])


def test_what_does_not_fit_is_not_counted():
    work, have = workload(), machine()
    state = 12 * 10**8
    # Two subgroups and their gradients, beside the activations.
    limit = 10**9 + 2 * state + 2 * 2 * 10**8 + 4 * 10**8
    found = count_bounds(work, have, limit)
    assert (found.resident + found.slots).max() == 2
    roomy = count_bounds(work, have, PLENTY)
    assert len(roomy.host) > len(found.host)
    assert list(found.iteration_s) == sorted(found.iteration_s)


def test_the_bound_is_not_below_that_of_its_best_counts():
    work, have = workload(12), machine()
    limit = 10**9 + 4 * 12 * 10**8
    assert bound(work, have, limit).iteration_s >= count_bounds(work, have, limit).iteration_s[0]


def test_too_many_to_count_are_refused_and_left_to_the_linear_program():
    many, have = workload(MOST_SUBGROUPS + 1, 10**6), machine()
    with pytest.raises(ValueError, match=f"at most {MOST_SUBGROUPS} subgroups.*got"):
        count_bounds(many, have, PLENTY)
    assert bound(many, have, PLENTY).iteration_s > 0


def test_a_half_duplex_link_slows_both_directions_alike():
    have = machine(duplex_factor=Quantity.exact(0.6))
    come = Op(0, OpKind.STATE_H2D, Lane.H2D, 10**9, "h2d_bytes_per_s", dram_bytes=10**9)
    leave = Op(0, OpKind.STATE_D2H, Lane.D2H, 10**9, "d2h_bytes_per_s", dram_bytes=10**9)
    updates = HostUpdates(((1e9, 16.0),), 28.0, scales=False)
    found = modes([[come], [], [leave]], updates, have, capacities(have, 1))
    assert sorted(map(tuple, found.round(9))) == [
        (0.0, 0.0, 1.0, 1e9),
        (0.6, 0.0, 0.6, 1e9),
        (0.9, 0.0, 0.0, 1e9),
    ]  # fmt: skip - 0.6 * (20 + 10) GB/s: not even one way at 20
    assert (found[:, HOST] == 1e9).all()
    assert (found[:, HOME] == 0).all()
    assert found[:, LEAVING].max() == 1.0
