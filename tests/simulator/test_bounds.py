"""Tests of the lower bounds on the iteration time: no plan beats the bound of its own placements, or the
bound of the memory that it takes.
"""

import numpy as np
import pytest
from ebbtide.simulator import Layer, Plan, Quantity, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.bound import NumberedBounds, bound, fluid_bound
from ebbtide.simulator.analysis.bounds.model import Model
from ebbtide.simulator.analysis.bounds.modes import modes
from ebbtide.simulator.analysis.bounds.sharing import Sharing
from ebbtide.simulator.analysis.bounds.window import Window
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.recipe_arrays import totals
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.schedule import Lane, Op, OpKind
from ebbtide.simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES, Holding, footprint, tally
from ebbtide.simulator.update.optimizer import OPTIMIZERS
from ebbtide.simulator.update.order import UpdateOrder
from ebbtide.simulator.update.recipes import RECIPES, Slot
from ebbtide.simulator.update.way import EARLY, PLACEMENT_CODES, SUMMED, Way, plain_ways

from studies.trials.emulated_training import Setting
from studies.trials.guessed_overlap import setting_of
from tests.machines import node

PLENTY = 2**45
PLACEMENTS = tuple(RECIPES)
STAGED = [i for i, r in enumerate(RECIPES.values()) if any(s.takes == Slot.STAGING for s in r.steps)]


def random_workload(rng, most, zero_stage=3):
    count = int(rng.integers(1, most + 1))
    size = int(10 ** rng.uniform(5, 8))
    sizes = [int(size * rng.uniform(0.3, 1.5)) if rng.random() < 0.5 else size] * count
    if rng.random() < 0.5:
        sizes = [int(size * rng.uniform(0.3, 1.5)) for _ in range(count)]
    if rng.random() < 0.4:  # such as an embedding's, or that of a head too
        for i in {0, -int(rng.integers(2))}:
            sizes[i] = int(sizes[i] * rng.uniform(2, 6))
    cuts = sorted(rng.integers(1, sum(sizes), size=int(rng.integers(0, 14))).tolist())
    forward_s = float(10 ** rng.uniform(-1.5, 0.7)) * sum(sizes) / 7e9
    layers = tuple(
        Layer(
            params=int(params),
            forward_s=forward_s * rng.uniform(0.1, 2) / (len(cuts) + 1),
            backward_s=forward_s * rng.uniform(0.2, 4) / (len(cuts) + 1),
            activation_bytes=int(rng.integers(0, 10**8)),
        )
        for params in np.diff([0, *cuts, sum(sizes)])
    )
    return Workload(
        name="random",
        layers=layers,
        subgroups=tuple(sizes),
        device_base_bytes=10**9,
        gradient_accumulation_steps=int(rng.choice([1, 1, 2, 3])),
        ranks_per_node=int(rng.choice([1, 1, 2, 4])),
        optimizer=str(rng.choice(list(OPTIMIZERS))),
        pipeline_idle_s=float(rng.choice([0, 0, forward_s])),
        grad_bytes_per_param=int(rng.choice([2, 4])),
        zero_stage=zero_stage,
        step_gather_s=forward_s if zero_stage < 3 and rng.random() < 0.5 else 0.0,
    )


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_no_plan_whose_steps_wait_beats_the_bound(zero_stage):
    rng = np.random.default_rng(zero_stage)
    near = []
    for _ in range(5):
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


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_no_plan_beats_the_bound_over_a_network(zero_stage):
    """Check that no random plan beats the lower bound if forward and backward spend most of their time waiting
    for network collectives.
    """
    rng = np.random.default_rng(7 + zero_stage)
    near = []
    for _ in range(5):
        work, on = random_workload(rng, 6, zero_stage), random_machine(rng)
        gathers, slow = zero_stage == 3, 3 * work.layers[0].forward_s + 0.1
        layers = [
            layer.model_copy(
                update={
                    "network_gather_bytes": int(gathers * rng.uniform(0, 1e10) * slow),
                    "network_reduce_bytes": int(rng.uniform(0, 1e10) * slow),
                }
            )
            for layer in work.layers
        ]
        step = {} if gathers else {"network_step_gather_bytes": int(1e10 * slow)}
        work = work.model_copy(update={"layers": tuple(layers), **step})
        on = on.with_rates(network_bytes_per_s=1e10)
        lowest, sweep = bound(work, on, PLENTY).iteration_s, PlanSweep(work, on)
        for codes, slots, prefetch, threads, overlap, order in random_plans(rng, len(work.subgroups)):
            plan = (codes, slots, prefetch, threads, overlap and gathers, order)
            seconds = float(sweep.evaluate(*plan)[0])
            assert lowest <= seconds * (1 + 1e-6), plan
            near.append(seconds / lowest)
    assert min(near) < 1.05


def random_machine(rng):
    between = {
        "h2d_bytes_per_s": (9.5, 11),
        "d2h_bytes_per_s": (9.5, 11),
        "dram_bytes_per_s": (10.5, 12),
        "host_adam_params_per_s": (8.7, 10.3),
        "stock_host_adam_params_per_s": (8.7, 10.3),
        "storage_write_bytes_per_s": (9, 9),
        "device_adam_params_per_s": (9.7, 11.2),
    }
    rates = {name: float(10 ** rng.uniform(*span)) for name, span in between.items()}
    threads = {n: Quantity.exact(rates["host_adam_params_per_s"] * float(rng.uniform(0.3, 1.2))) for n in (2, 8, 16)}
    return node(
        name="random",
        cpu_cores=32,
        host_memory_bytes=PLENTY,
        device_memory_bytes=PLENTY,
        copy_latency_s=float(rng.choice([0, 1e-5, 1e-3])),
        launch_latency_s=float(rng.choice([0, 1e-5, 1e-3])),
        device_shares_host_cores=bool(rng.random() < 0.2),
        host_adam_by_threads=threads if rng.random() < 0.4 else {},
        duplex_factor=Quantity.exact(float(rng.uniform(0.5, 1.1))),
        **rates,
    )


def settled_s(sweeps, *plan):
    """Return a plan's mean iteration time over the last iterations of a long simulation. If copies over the link
    fall behind, earlier iterations are shorter.
    """
    sums = [float(sweep.evaluate(*plan)[0]) * (sweep.iterations - 2) for sweep in sweeps]
    return (sums[1] - sums[0]) / (sweeps[1].iterations - sweeps[0].iterations)


def random_rest(rng, slots, count):
    """Return random values of the last arguments of `PlanSweep.evaluate`: prefetch, threads, overlap and order."""
    prefetch = slots if rng.random() < 0.7 else int(rng.integers(0, slots + 1))
    order = [None, np.arange(count)[::-1].copy(), rng.permutation(count)][rng.integers(3)]
    return prefetch, int(rng.choice([0, 1, 2, 4, 20])), bool(rng.random() < 0.9), order


def random_plans(rng, count, plans=10):
    for _ in range(plans):
        shares = rng.dirichlet([0.7] * len(PLACEMENTS))
        codes = rng.choice(len(PLACEMENTS), size=count, p=shares).astype(np.int8)
        if rng.random() < 0.1:  # the embedding's host update among others
            codes[:] = PLACEMENTS.index("host")
        staged = int(np.isin(codes, STAGED).sum())
        slots = int(rng.integers(1, min(staged, 8) + 1)) if staged else 0
        yield codes, slots, *random_rest(rng, slots, count)


def steady_s(workload, machine, floor_s, *plan):
    """Return a plan's iteration time. If the plan seems to beat the lower bound, simulate hundreds of iterations."""
    seconds = float(PlanSweep(workload, machine).evaluate(*plan)[0])
    if floor_s <= seconds * (1 + 1e-8):
        return seconds
    longer = [PlanSweep(workload, machine, iterations=n) for n in (200, 400)]
    return max(seconds, settled_s(longer, *plan))


def floor_of_names(model, choices, slots):
    """Return the lower bound for a plan that updates each subgroup in a given way (an index into the model's
    ways).
    """
    low = 0.0
    for shared in (False, True):
        window = Window(model, {}, slots)
        if shared:
            Sharing(window, max(low, model.forward_s))
        for piece, way in enumerate(choices):
            window.rows.equal(1.0, (window.x[piece, way], 1.0))
        low, _ = window.rows.lowest(window.seconds)
    return model.rest_s + low


@pytest.mark.parametrize("most", [4, 7, 14])
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_beats_the_bound_of_its_own_placements_and_homes(seed, most):
    rng, near = np.random.default_rng([most, seed]), []
    for _ in range(5):
        work, on = random_workload(rng, most), random_machine(rng)
        count, away = len(work.subgroups), rng.choice([0.0, 0.0, 0.5])
        model = Model(work, on, plain_ways(), count)
        for codes, slots, *rest in random_plans(rng, count, 4):
            locations = ["host" if rng.random() < away else "device" for _ in codes]
            names = [Way(PLACEMENTS[code], location) for code, location in zip(codes, locations, strict=True)]
            floor_s = floor_of_names(model, [plain_ways().index(name) for name in names], slots)
            elsewhere = [way.code for way in names]
            plan = (np.array(elsewhere, dtype=np.int8), slots, *rest)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), plan
            near.append(seconds / floor_s)
    assert min(near) < 1.1  # else the bound would say little


def within_its_own_memory(work, codes, slots):
    """Return the bytes of GPU memory that a plan takes: the sum that `footprint` gives, and the activations."""
    placements = [PLACEMENTS[code] for code in codes]
    held = Holding.of_workload(work).bytes(tally(work.subgroups, placements), slots)
    activations = sum(layer.activation_bytes for layer in work.layers)
    return work.device_base_bytes + held["device"] + activations


@pytest.mark.parametrize(
    ("most", "seed"),
    # Of the last: 31 and 29 subgroups, 40 and 39, 36 and 37; looked at one by one up to 30. The
    # nearest plan takes 1.09 times the bound.
    [(4, 4), (9, 9), (40, 100), (40, 136), (40, 146)],
)
def test_no_plan_beats_the_bound_of_its_own_memory(most, seed):
    rng = np.random.default_rng(seed)
    for _ in range(4 if most < 40 else 2):
        work, on = random_workload(rng, most), random_machine(rng)
        slow = {name: on.rate(name) / 4 for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
        on = on.with_rates(**slow) if rng.random() < 0.5 else on
        for plan in random_plans(rng, len(work.subgroups), 2):
            room = within_its_own_memory(work, *plan[:2])
            floor_s = bound(work, on, room).iteration_s
            assert fluid_bound(work, on, room).iteration_s <= floor_s
            assert fluid_bound(work, on, room, None).iteration_s <= floor_s * (1 + 1e-4)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)
            if most < 40:  # whole subgroups, however long that takes
                floor_s = bound(work, on, room, enough_s=2 * seconds).iteration_s
                assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)


def test_more_work_proves_more_where_subgroups_are_whole_and_stops_at_what_is_enough():
    """Check that the lower bound rises if it may use more computing time, and stops rising at `enough_s`.

    The longer computation requires a whole number of subgroups per placement. Here subgroups have two sizes
    in turn, and the number is whole for each size.
    """
    sizes = (10**8, 17 * 10**7) * 8
    layers = tuple(Layer(params=n, forward_s=0.01, backward_s=0.02) for n in sizes)
    work = workload(16).model_copy(update={"layers": layers, "subgroups": sizes})
    on = machine(host_adam_params_per_s=1e9, h2d_bytes_per_s=3e9, d2h_bytes_per_s=3e9)
    room = work.device_base_bytes + 19 * 10**8
    low, high = bound(work, on, room), bound(work, on, room, enough_s=100.0)
    assert high.iteration_s > low.iteration_s * 1.003
    between_s = (low.iteration_s + high.iteration_s) / 2
    assert bound(work, on, room, enough_s=between_s).iteration_s == pytest.approx(between_s)


def alternating(rng, count, micro):
    """Return a workload of large subgroups in up to three sizes, whose gradients take longer to copy to the
    host than to compute, and a machine for it.
    """
    sizes = rng.choice(rng.integers(2 * 10**7, 4 * 10**8, size=3), size=count)
    ends = np.cumsum(sizes)
    if rng.random() < 0.5:
        ends = np.linspace(0, ends[-1], int(rng.integers(max(1, count // 4), count + 1)) + 1)[1:]
    params = np.diff([0, *ends.astype(int)]).tolist()
    pass_s = float(rng.uniform(0.05, 1)) * sum(params) * 2 / 10e9 / len(params)
    layers = tuple(Layer(params=n, forward_s=pass_s / 2, backward_s=pass_s) for n in params)
    work = Workload(
        name="w",
        layers=layers,
        subgroups=tuple(sizes.tolist()),
        device_base_bytes=10**9,
        gradient_accumulation_steps=micro,
    )
    both = Quantity.exact(float(rng.uniform(0.5, 1)))
    return work, machine(h2d_bytes_per_s=float(rng.uniform(5e9, 2e10)), duplex_factor=both, host_adam_params_per_s=5e9)


@pytest.mark.parametrize(  # of the last two: 30, 35 and 35 subgroups; 19 and 40
    ("most", "micro", "seed"), [(4, 1, 1), (4, 3, 3), (40, 1, 304), (40, 3, 209)]
)
def test_no_plan_beats_the_bound_where_backward_waits_for_gradients(most, micro, seed):
    rng, near = np.random.default_rng([most, seed]), []
    for _ in range(3 if micro == 1 else 2):
        work, on = alternating(rng, int(rng.integers(2, most + 1)), micro)
        count = len(work.subgroups)
        for codes, slots, *rest in [*random_plans(rng, count, 1), (np.zeros(count, int), 0, 0, 0, 1)]:
            plan = (codes.astype(np.int8), slots, *rest)
            room = within_its_own_memory(work, *plan[:2])
            floor_s = bound(work, on, room).iteration_s
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)
        floor_s = NumberedBounds(work, on, PLENTY).iteration_s({"host": count}, 0)
        if micro > 1:  # there is room for sums
            stay = with_sums(np.zeros(count, np.int8), np.ones(count, bool))
            seconds = steady_s(work, on, floor_s, stay, 0, 0, 0, True)
        assert floor_s <= seconds * (1 + 1e-6)
        near.append(seconds / floor_s)
    assert min(near) < (1.12 if micro == 1 else 1.4)  # else the bound would say little


def floor_of(work, on, host, device, resident, slots):
    numbers = {"host": host, "device": device, "resident": resident}
    return NumberedBounds(work, on, PLENTY).iteration_s(numbers, slots)


def test_a_memory_in_which_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="activations must fit into GPU memory, but"):
        bound(workload(), machine(), 10**9)
    assert np.isinf(NumberedBounds(workload(), machine(), 3e9).iteration_s({"resident": 4}, 0))


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
    assert floor_of(work, have, 4, 0, 0, 0) == pytest.approx(by_hand, rel=2e-5)


def test_gradients_that_come_home_slowly_are_a_chain_too():
    """Check the lower bound for a step that is a chain of slow gradient copies. A copy to the host takes
    0.2 s, the first layer's is last, and then its update, parameter copy and forward follow.
    """
    layer = Layer(params=10**7, forward_s=0.01, backward_s=0.02)
    work, have = workload(size=10**7, layers=(layer,) * 4), machine(d2h_bytes_per_s=1e8)
    plan = Plan(
        subgroup_size=10**7, placement=Plan.runs(["host"] * 4), staging_slots=0, order=UpdateOrder(host="arrival")
    )
    by_hand = 0.02 + 4 * 0.2 + 0.01 + 2e7 / 20e9 + 4 * 0.01
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    assert 0.9 * by_hand < floor_of(work, have, 4, 0, 0, 0) <= by_hand * (1 + 2e-5)


def test_backward_waits_until_the_gradient_before_is_home():
    """Check the lower bound if backward waits for gradient copies. Two of these gradients exceed the limit
    on gradients being copied, so backward ends when three of four copies of 0.4 s are complete.
    """
    layer = Layer(params=2 * 10**8, forward_s=0.01, backward_s=0.02)
    work = workload(size=2 * 10**8, layers=(layer,) * 4)
    have = machine(d2h_bytes_per_s=1e9, host_adam_params_per_s=1e12)
    plan = Plan(
        subgroup_size=2 * 10**8, placement=Plan.runs(["host"] * 4), staging_slots=0, order=UpdateOrder(host="arrival")
    )
    update_s = 2e8 / 1e12
    # The last layer's backward, three ways home; the first layer's way home, update, copy.
    by_hand = 0.02 + 3 * 0.4 + 0.4 + update_s + 4e8 / 20e9 + 4 * 0.01
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    window = Window(Model(work, have, plain_ways(), 4), {})
    for x in window.x[:, plain_ways().index(Way("host"))]:
        window.rows.equal(1.0, (int(x), 1.0))
    # Backward ends when three are home.
    assert window.rows.lowest(window.waited)[0] == pytest.approx(0.02 + 3 * 0.4 - 4 * 0.02)
    assert 0.9 * by_hand < floor_of(work, have, 4, 0, 0, 0) <= by_hand * (1 + 2e-5)


def test_a_sum_that_comes_back_is_under_way_longer_than_its_way_home_takes():
    """Check the lower bound on the time that backward waits for gradient copies, if there are two micro-batches.
    In the second one each gradient sum is copied to the GPU and back to the host, which takes 0.4 s.
    """
    layer = Layer(params=10**8, forward_s=0.01, backward_s=0.1)
    work = workload(8, layers=(layer,) * 8).model_copy(update={"gradient_accumulation_steps": 2})
    have = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, host_adam_params_per_s=1e12)
    window = Window(Model(work, have, plain_ways(), 8), {})
    for x in window.x[:, plain_ways().index(Way("host"))]:
        window.rows.equal(1.0, (int(x), 1.0))
    first_s, second_s = 8 * 0.2 - 0.7 - 0.2, (8 * 0.4 - 0.7 - 0.4) / 2
    found_s = window.rows.lowest(window.waited)[0]
    assert found_s >= (first_s + second_s) * (1 - 1e-6)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 8), staging_slots=0)
    spans = simulate(build_schedule(work, plan), have).spans
    passes = [s for s in spans if s.iteration == 1 and s.kind in (OpKind.FORWARD, OpKind.BACKWARD)]
    norm = next(s for s in spans if s.iteration == 1 and s.kind == OpKind.NORM)
    begun_s = min(s.start_s for s in passes if s.kind == OpKind.BACKWARD)
    behind = [s for s in passes if s.start_s >= begun_s]
    waited_s = norm.end_s - begun_s - sum(s.end_s - s.start_s for s in behind)
    assert found_s <= waited_s * (1 + 1e-6)


def test_any_sums_may_stay_on_the_device():
    """Check that the bound's model lets each subgroup choose alone whether its gradient sum stays on the GPU."""
    work = workload(3).model_copy(update={"gradient_accumulation_steps": 2})
    model = Model(work, machine(), [Way("host")], 3, sums=True)
    for stays in ([1, 1, 0], [0, 0, 0], [1, 0, 1]):
        window = Window(model, {})
        for x, stay in zip(window.x, stays, strict=True):
            window.rows.equal(1.0, (int(x[stay]), 1.0))
        assert window.rows.lowest(window.seconds) is not None


def test_a_tiny_gradient_lets_no_more_be_under_way_than_itself():
    """Check the lower bound on the time that backward waits for gradient copies, if the last layer is tiny. Its
    gradient is complete first, and must not let many more bytes of other gradients be copied at the same
    time.
    """
    large, tiny = 12 * 10**7, 1000
    sizes = (*[large] * 4, tiny)
    layers = tuple(Layer(params=n, forward_s=0.01, backward_s=0.02) for n in sizes)
    work = workload().model_copy(update={"layers": layers, "subgroups": sizes})
    have = machine(d2h_bytes_per_s=1e9, host_adam_params_per_s=1e12)
    window = Window(Model(work, have, plain_ways(), 5), {})
    for x in window.x[:, plain_ways().index(Way("host"))]:
        window.rows.equal(1.0, (int(x), 1.0))
    # The first large gradient is complete behind two passes; backward ends when three are home.
    by_hand = 2 * 0.02 + 3 * 0.24 - 5 * 0.02
    # To the bound the tiny one may be the oldest: beside it there is room for a bit more.
    least_s = by_hand - (GRADIENTS_UNDER_WAY_BYTES - 2 * large) / 1e9 - 1e-4
    assert least_s <= window.rows.lowest(window.waited)[0] <= by_hand
    plan = Plan(
        subgroup_size=large, placement=Plan.runs(["host"] * 5), staging_slots=0, order=UpdateOrder(host="arrival")
    )
    spans = simulate(build_schedule(work, plan), have).spans
    passes = [s for s in spans if s.kind == OpKind.BACKWARD and s.iteration == 1]
    norm = next(s for s in spans if s.kind == OpKind.NORM and s.iteration == 1)
    assert norm.end_s - passes[0].start_s - 5 * 0.02 == pytest.approx(by_hand, rel=1e-4)


def test_a_large_gradient_between_small_ones_may_be_the_one_that_is_left():
    """Check the lower bound on the time that backward waits for gradient copies, if one large gradient is copied
    to the host last.

    The bound's model counts subgroups of equal size together. Of the small ones, only one is updated on the
    host.
    """
    small, large = 14 * 10**7, 6 * 10**8
    sizes = (small, large, *[small] * 7)
    layers = tuple(Layer(params=n, forward_s=0.01, backward_s=0.02) for n in sizes)
    work = workload().model_copy(update={"layers": layers, "subgroups": sizes})
    have = machine(d2h_bytes_per_s=1e9, host_adam_params_per_s=1e12)
    model = Model(work, have, plain_ways(), 2)
    window = Window(model, {})
    sent, stays = (plain_ways().index(Way(name)) for name in ("host", "resident"))
    count, (first, lone) = model.pieces.count, np.flatnonzero(model.pieces.first < 2)
    for p, many in enumerate(count):
        here = {first: 1.0, lone: 1.0}.get(p, 0.0)
        window.rows.equal(here, (window.x[p, sent], 1.0))
        window.rows.equal(many - here, (window.x[p, stays], 1.0))
    placements = ["resident", "host", "host", *["resident"] * 6]
    plan = Plan(subgroup_size=large, placement=Plan.runs(placements), staging_slots=0)
    spans = simulate(build_schedule(work, plan), have).spans
    begun = min(s.start_s for s in spans if s.kind == OpKind.BACKWARD and s.iteration == 1)
    norm = next(s for s in spans if s.kind == OpKind.NORM and s.iteration == 1)
    waited_s = norm.end_s - begun - work.backward_s
    assert 0 < window.rows.lowest(window.waited)[0] <= waited_s * (1 + 1e-6)


def test_gradients_under_way_take_their_room_whatever_their_number():
    """Check that the lower bound reserves GPU memory for gradients that are being copied to the host. Three
    gradients of 100 MB fill that reserve, and a plan that needs 1 MB more than the rest does not fit.
    """
    work, have = workload(20, size=5 * 10**7), machine()
    placements = ["host"] * 3 + ["resident"] * 17
    plan = Plan(subgroup_size=5 * 10**7, placement=Plan.runs(placements), staging_slots=0)
    room = footprint(work, plan)["device"] - work.device_base_bytes
    for size, fits in ((room, True), (room - 10**6, False)):
        window = Window(Model(work, have, plain_ways(), 20), {"device": size})
        for subgroup, placement in enumerate(placements):
            way = plain_ways().index(Way(placement))
            window.rows.equal(1.0, (window.x[subgroup, way], 1.0))
        assert (window.rows.lowest(window.seconds, 100) is not None) == fits


def test_visits_beyond_the_slots_wait_for_a_write_back():
    slow = Layer(params=10**8, forward_s=0.01, backward_s=0.5)  # all can come in meanwhile
    work, have = workload(2, layers=(slow, slow)), machine()
    update_s, in_s, out_s = 1e8 / 50e9, 12e8 / 20e9, 12e8 / 10e9
    by_hand = 2 * 0.5 + update_s + out_s + in_s + update_s + 0.01
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["device"] * 2), staging_slots=1, prefetch=1)
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    assert floor_of(work, have, 0, 2, 0, 1) == pytest.approx(by_hand, rel=2e-5)
    both_s = 2 * 0.5 + 2 * update_s + 2 * 0.01
    assert floor_of(work, have, 0, 2, 0, 2) == pytest.approx(both_s, rel=2e-5)


def test_a_slot_holds_its_visits_one_after_the_other():
    """Check that the lower bound is exact for two staged updates in one staging buffer, if backward is too
    short to hide the next iteration's first wait for the buffer.
    """
    work, have = workload(2), machine()
    by_hand = 2 * (1e8 / 50e9 + 12e8 / 20e9 + 12e8 / 10e9)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["device"] * 2), staging_slots=1, prefetch=1)
    steady = simulate(build_schedule(work, plan, 12), have).iteration_s
    assert steady == pytest.approx(by_hand)
    assert floor_of(work, have, 0, 2, 0, 1) == pytest.approx(by_hand, rel=2e-5)


def test_the_last_visit_shares_the_link_with_the_one_before():
    """Check the lower bound for three staged updates in two staging buffers over a half-duplex link. The last
    one waits until the first has left, and shares the link with the second one's copy to the host.
    """
    slow = Layer(params=10**8, forward_s=0.01, backward_s=0.5)
    half = {"d2h_bytes_per_s": 20e9, "device_adam_params_per_s": 1e13}
    work = workload(3, layers=(slow,) * 3)
    have = machine(**half, duplex_factor=Quantity.exact(0.5))  # 20 GB/s both ways together
    alone_s = 12e8 / 20e9
    by_hand = 3 * 0.5 + alone_s + 2 * alone_s + 0.01
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["device"] * 3), staging_slots=2, prefetch=2)
    steady = simulate(build_schedule(work, plan, 6), have).iteration_s
    assert steady == pytest.approx(by_hand, rel=1e-3)
    # The bound lets the one between leave at another time.
    floor_s = floor_of(work, have, 0, 3, 0, 2)
    assert steady - alone_s - 1e-3 <= floor_s <= steady


def test_new_parameters_come_home_behind_all_fetched_gradients():
    """Check the lower bound for four micro-batches over a slow link, without gradient sums on the GPU. New
    parameters are copied after all gradient sums, and the third update waits for the first copy's buffer.
    """

    def hosts_s(on):
        return floor_of_names(Model(work, on, plain_ways(), 6), [plain_ways().index(Way("host"))] * 6, 0)

    work = workload(6, gradient_accumulation_steps=4)
    have = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    floor_s = hosts_s(have)
    # Of a micro-batch: backward, forward; then the first gradient is fetched.
    begin_s = (6 * 0.02 + 6 * 0.01 + 0.02) / 4
    fetched_s = begin_s + 3 * 6 * 0.2
    assert floor_s >= (fetched_s + 6 * 0.2) * (1 - 1e-4)
    plan = Plan(
        subgroup_size=10**8, placement=Plan.runs(["host"] * 6), staging_slots=0, order=UpdateOrder(host="arrival")
    )
    crossing_s = simulate(build_schedule(work, plan, 6), have).iteration_s
    assert floor_s <= crossing_s * (1 + 1e-9)
    staying = plan.with_bits(sum_on_device=True)
    assert floor_of(work, have, 6, 0, 0, 0) <= simulate(build_schedule(work, staying, 6), have).iteration_s
    # Updates that take longer than their copies follow one another, all but the first two.
    slow = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, host_adam_params_per_s=2e8)
    held_s = fetched_s + 0.2 + 4 * 0.5 + 0.2 + 0.01 / 4
    assert hosts_s(slow) >= held_s * (1 - 1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_wait_for_room_are_bounded_at_each_stage(stage):
    """Check the lower bound at each ZeRO stage, if gradient copies delay backward and the plan keeps all
    gradient sums on the GPU. Below ZeRO-3 the bound may then count the copies of one micro-batch only.
    """
    work = workload(6, gradient_accumulation_steps=4, zero_stage=stage)
    have = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    plan = Plan(
        subgroup_size=10**8,
        placement=Plan.runs(["host"] * 6),
        staging_slots=0,
        overlap_forward=stage == 3,
        device_sums=6,
    )
    took_s = simulate(build_schedule(work, plan, 6), have).iteration_s
    assert 0 < bound(work, have, PLENTY).iteration_s <= took_s * (1 + 1e-9)


def test_parameters_in_host_memory_leave_room_and_take_the_link():
    """Check that the lower bound counts both effects of parameters in host memory: more GPU memory for
    optimizer state, and copies of the parameters over the link in forward and backward.
    """
    work, have = (workload(16, device_base_bytes=10**9 + 2 * 16 * 10**8), machine(host_adam_params_per_s=1e8))
    room = work.device_base_bytes + 16 * 10**8 + 2 * 14 * 10**8
    here, anywhere = (bound(work, have, room, locations).iteration_s for locations in ((), None))
    away = bound(work, have, room, ("host",) * 16).iteration_s
    assert here > away * 1.05
    assert anywhere <= away * (1 + 1e-4)
    slow = machine(h2d_bytes_per_s=1e9)
    fetched_s = 2 * 16 * 2e8 / 1e9  # for forward and for backward
    assert bound(work, slow, PLENTY, ("host",) * 16).iteration_s >= fetched_s * (1 - 1e-4)


def test_host_memory_is_a_limit_too():
    work, have = workload(), machine(device_adam_params_per_s=1e9, host_adam_params_per_s=1e11)
    free, bound_s = bound(work, have, PLENTY), bound(work, have, PLENTY, (), 0).iteration_s
    assert free.params["host"] == pytest.approx(work.params)
    assert bound_s >= free.iteration_s + 0.3  # all updates are the device's


def test_what_is_promising_fits_and_is_near():
    work, have = workload(12), machine(host_adam_params_per_s=4e9)
    limit = 10**9 + 12 * 10**8 + 4 * 12 * 10**8
    found = bound(work, have, limit)
    numbers, slots = found.promising[0]
    assert sum(numbers.values()) == 12
    assert numbers["resident"] + slots <= 4
    floor_s = NumberedBounds(work, have, limit).iteration_s(numbers, slots)
    assert floor_s == pytest.approx(found.iteration_s, rel=1e-3)


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 10e9,
        "dram_bytes_per_s": 1e13,
        "host_adam_params_per_s": 1e9,
        "stock_host_adam_params_per_s": 1e9,
    }
    facts = {"host_memory_bytes": PLENTY, "device_memory_bytes": PLENTY, "copy_latency_s": 0.0, "launch_latency_s": 0.0}
    return node(**{**rates, **facts, **changes})


def workload(subgroups=4, size=10**8, **changes):
    layer = Layer(params=size, forward_s=0.01, backward_s=0.02, activation_bytes=10**8)
    fields = {"device_base_bytes": 10**9, "layers": (layer,) * subgroups} | changes
    return Workload(name="w", subgroups=(size,) * subgroups, **fields)


def test_a_half_duplex_link_slows_both_directions_alike():
    have = machine(duplex_factor=Quantity.exact(0.6))
    come = Op(0, OpKind.STATE_H2D, Lane.H2D, 10**9, "h2d_bytes_per_s", dram_bytes=10**9)
    leave = Op(0, OpKind.STATE_D2H, Lane.D2H, 10**9, "d2h_bytes_per_s", dram_bytes=10**9)
    alone = Op(0, OpKind.UPDATE_HOST, Lane.HOST, 10**9, "host_adam_params_per_s", cores=1.0)
    found = modes({Lane.H2D: [come], Lane.D2H: [leave], Lane.HOST: [alone]}, have, capacities(have, 1))
    assert [(m.lanes, m.speeds.round(9).tolist()) for m in found] == [
        ((Lane.HOST,), [[1.0]]),
        # 0.6 * (20 + 10) GB/s: not even one way at 20
        ((Lane.H2D, Lane.D2H), [[0.0, 1.0], [0.6, 0.6], [0.9, 0.0]]),
    ]


def test_no_plan_that_guesses_beats_the_bound_of_its_own_placements():
    rng, near, below = np.random.default_rng(1), [], 0
    for _ in range(10):
        work, on = balanced(rng)
        model = Model(work, on, plain_ways(), len(work.subgroups), early_updates=True)
        for codes, slots, prefetch, threads, *rest in random_plans(rng, len(work.subgroups), 2):
            chosen = codes if rng.random() < 0.5 else np.zeros_like(codes)  # all on the host
            early = with_early_updates(chosen, rng.random(codes.size) < rng.choice([0.5, 1.0]))
            updated_early = {
                PLACEMENT_CODES[way.placement]: len(plain_ways()) + n
                for n, way in enumerate(way for way in plain_ways() if way.can_be_early)
            }
            named = [updated_early[code - EARLY] if code >= EARLY else code for code in early.tolist()]
            floor_s = floor_of_names(model, named, slots)
            plan = (early, slots, prefetch, threads * int(rng.integers(2)), *rest)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), plan
            near.append(seconds / floor_s)
            below += seconds < floor_of_names(model, chosen.tolist(), slots) * (1 - 1e-3)
    assert below, "no plan with early updates was faster than the bound without"
    assert min(near) < 1.1  # else the bound would say little


def test_no_plan_that_guesses_beats_the_bound_of_its_own_memory():
    rng = np.random.default_rng(6)
    for _ in range(3):
        work, on = balanced(rng)
        for codes, slots, *rest in random_plans(rng, len(work.subgroups), 1):
            plan = (with_early_updates(codes, rng.random(codes.size) < 0.7), slots, *rest)
            sizes = np.array(work.subgroups, float)
            amounts, updated_early = totals(plan[0], sizes, len(plain_ways())).tolist()
            held = Holding.of_workload(work).bytes(amounts, slots, updated_early=updated_early)
            room = work.device_base_bytes + held["device"]
            room += sum(layer.activation_bytes for layer in work.layers)
            there = (work, on, room, (), held["host"], held["storage"])
            floor_s = bound(*there, True).iteration_s
            assert fluid_bound(*there, True).iteration_s <= floor_s
            assert floor_s <= bound(*there).iteration_s * (1 + 1e-4)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)


def balanced(rng):
    """Return a random workload whose backward takes about as long as its host updates, which therefore fit
    into backward, and a random machine without latencies.
    """
    work, on = random_workload(rng, int(rng.integers(3, 9))), random_machine(rng)
    on = on.model_copy(update={"copy_latency_s": 0.0, "launch_latency_s": 0.0})
    update_s = work.params / on.rate("host_adam_params_per_s") * work.ranks_per_node
    factor = update_s * rng.uniform(0.5, 2) / work.backward_s
    layers = [layer.model_copy(update={"backward_s": factor * layer.backward_s}) for layer in work.layers]
    return work.model_copy(update={"layers": tuple(layers)}), on


def with_early_updates(codes, early):
    able = np.isin(codes, [way.code for way in plain_ways() if way.can_be_early])
    return (codes + EARLY * (able & early)).astype(np.int8)


def test_all_on_the_host_guessed_is_a_chain_from_the_first_gradient_on():
    work, have = workload(), machine()
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 4), staging_slots=0, speculate=4)
    update_s = 0.1 / 0.8  # out of place
    by_hand = 0.02 + 2e8 / 10e9 + 4 * update_s + 2e8 / 20e9 + 4 * 0.01
    assert simulate(build_schedule(work, plan), have).iteration_s == pytest.approx(by_hand)
    slow = have.model_copy(update={"host_adam_out_of_place": Quantity.exact(0.5)})
    slower_s = simulate(build_schedule(work, plan), slow).iteration_s
    assert slower_s == pytest.approx(by_hand + 4 * (0.2 - update_s)), "early updates ignore the measured rate"
    model = Model(work, have, [Way("host")], 4, early_updates=True)
    assert model.ways == (Way("host"), Way("host", early=True))
    # The bound lets the last layer's update be the last one, and waits for its forward alone.
    assert 0.8 * by_hand < floor_of_names(model, [1] * 4, 0) <= (by_hand - 3 * 0.01) * (1 + 2e-5)
    quick = machine(host_adam_params_per_s=1e11, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    model = Model(work, quick, [Way("host")], 4, early_updates=True)
    assert 4 * 0.03 <= floor_of_names(model, [1] * 4, 0) < 4 * 0.03 * 1.02


def test_where_no_slot_fits_no_visit_is_guessed():
    setting = setting_of(Setting(), 2.0)  # updates on the host take twice as long as the passes
    work = setting.workload(*setting.given_s)
    floor_s = bound(work, setting.machine(), early_updates=True).iteration_s
    assert floor_s >= 2 * (work.forward_s + work.backward_s)


def accumulating(rng):
    """Return a random workload with several micro-batches, and a machine whose link is slow for gradient sums."""
    work, on = random_workload(rng, int(rng.integers(2, 9))), random_machine(rng)
    crossing_s = 2 * work.params * work.grad_bytes_per_param / work.backward_s
    slow = crossing_s * 10 ** rng.uniform(-0.7, 0.5)
    on = on.with_rates(h2d_bytes_per_s=slow, d2h_bytes_per_s=slow)
    return work.model_copy(update={"gradient_accumulation_steps": int(rng.integers(2, 5))}), on


def with_sums(codes, stay):
    able = np.isin(codes, [way.code for way in plain_ways() if way.can_sum_on_device])
    return (codes + SUMMED * (able & stay)).astype(np.int8)


def of_many_layers(rng, micro):
    """Return a random workload with few subgroups of many layers, and a machine whose link is slow for gradients."""
    params = [int(n) for n in 10 ** rng.uniform(6, 8.3, size=int(rng.integers(3, 25)))]
    if rng.random() < 0.5:
        params = [params[0]] * len(params)
    total, count = sum(params), int(rng.integers(1, 6))
    cuts = sorted({0, *rng.integers(1, total, size=count - 1).tolist(), total})
    backward_s = rng.uniform(0.5, 1.5, size=len(params)) * 1e-10 * total / len(params)
    layers = tuple(
        Layer(params=n, forward_s=s / 2, backward_s=float(s), activation_bytes=int(rng.integers(0, 10**8)))
        for n, s in zip(params, backward_s, strict=True)
    )
    work = Workload(
        name="of many layers",
        layers=layers,
        subgroups=tuple(int(n) for n in np.diff(cuts)),
        device_base_bytes=10**9,
        gradient_accumulation_steps=micro,
        grad_bytes_per_param=int(rng.choice([2, 4])),
        zero_stage=int(rng.choice([3, 3, 2])),
    )
    slow = 10 ** rng.uniform(-0.7, 0.5) * work.grad_bytes_per_param * micro * total / work.backward_s
    return work, random_machine(rng).with_rates(h2d_bytes_per_s=slow, d2h_bytes_per_s=slow)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_no_plan_beats_the_bound_where_subgroups_hold_many_layers(micro):
    rng, near = np.random.default_rng(micro), []
    for _ in range(6):
        work, on = of_many_layers(rng, micro)
        count = len(work.subgroups)
        model = Model(work, on, plain_ways(), count)
        for codes, slots, prefetch, threads, overlap, order in random_plans(rng, count, 3):
            codes = codes if rng.random() < 0.5 else np.zeros_like(codes)  # all on the host
            if work.zero_stage < 3:
                codes = np.where(codes == PLACEMENT_CODES["stored"], 0, codes).astype(np.int8)
            plan = (codes, slots, prefetch, threads, overlap and work.zero_stage == 3, order)
            of_names = floor_of_names(model, [plain_ways().index(Way(PLACEMENTS[code])) for code in codes], slots)
            room = within_its_own_memory(work, codes, slots)
            floor_s = max(of_names, bound(work, on, room).iteration_s)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)
            near.append(seconds / floor_s)
    assert min(near) < 1.1  # else the bound would say little


def test_no_plan_whose_sums_stay_beats_the_bound_of_its_own_placements():
    rng, near, below = np.random.default_rng(2), [], 0
    for _ in range(8):
        work, on = accumulating(rng)
        model = Model(work, on, plain_ways(), len(work.subgroups), sums=True)
        named = {
            (way.placement, way.sum_on_device): n for n, way in enumerate(model.ways) if way.parameters == "device"
        }
        for codes, slots, *rest in random_plans(rng, len(work.subgroups), 2):
            codes = codes if rng.random() < 0.5 else np.zeros_like(codes)  # all on the host
            first = rng.choice([rng.integers(codes.size + 1), codes.size])
            stay = with_sums(codes, np.arange(codes.size) < first)
            names = [named[PLACEMENTS[code % SUMMED], code >= SUMMED] for code in stay.tolist()]
            floor_s = floor_of_names(model, names, slots)
            plan = (stay, slots, *rest)
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), plan
            near.append(seconds / floor_s)
            crossing = [named[PLACEMENTS[code % SUMMED], False] for code in stay.tolist()]
            below += seconds < floor_of_names(model, crossing, slots) * (1 - 1e-3)
    assert below, "no plan with sums on the GPU was faster than the bound without"
    assert min(near) < 1.1  # else the bound would say little


def test_no_plan_whose_sums_stay_beats_the_bound_of_its_own_memory():
    rng, below = np.random.default_rng(7), 0
    for _ in range(4):
        work, on = accumulating(rng)
        for codes, slots, *rest in random_plans(rng, len(work.subgroups), 1):
            stay = with_sums(codes, rng.random(codes.size) < 0.7)
            sizes, plan = np.array(work.subgroups, float), (stay, slots, *rest)
            amounts, _ = totals(stay, sizes, len(plain_ways())).tolist()
            summed = float(sizes[stay >= SUMMED].sum())
            held = Holding.of_workload(work).bytes(amounts, slots, summed=summed)
            room = work.device_base_bytes + held["device"]
            room += sum(layer.activation_bytes for layer in work.layers)
            there = (work, on, room, (), held["host"], held["storage"])
            floor_s = bound(*there).iteration_s
            assert fluid_bound(*there).iteration_s <= floor_s
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)
            below += floor_s < seconds
    assert below


def test_the_bound_knows_what_sums_take_of_the_device():
    """Check that the lower bound counts the GPU memory of gradient sums that stay on the GPU. If memory holds
    all sums, the bound is below the time of such a plan. With 400 MB less, sums must cross the link, and the
    bound is above that time.
    """
    work, have = workload(gradient_accumulation_steps=4), machine(h2d_bytes_per_s=1e9)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 4), staging_slots=0, device_sums=4)
    seconds = simulate(build_schedule(work, plan), have).iteration_s
    room = footprint(work, plan)["device"] + sum(layer.activation_bytes for layer in work.layers)
    floor_s = bound(work, have, room).iteration_s
    assert 0.8 * seconds < floor_s <= seconds * (1 + 1e-6)
    assert bound(work, have, room - 4 * 10**8).iteration_s > seconds
