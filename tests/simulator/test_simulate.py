"""Tests of the reference simulator: timelines worked out by hand, and random ones against simpy."""

import random

import pytest
from ebbtide.simulator import Lane, Layer, OpKind, Plan, Quantity, Schedule, ScheduleBuilder, build_schedule, simulate
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.engines.reference import alone_s
from ebbtide.simulator.schedules.stock import OVERFLOW_CHECK_S, WIDENING_S, StockLoop, StockOptions
from ebbtide.simulator.schedules.strategies import build_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import machine, workload


def spans(timeline, kind, iteration=0):
    return [(s.start_s, s.end_s) for s in timeline.spans if s.kind == kind and s.iteration == iteration]


def plan_of(placements, slots=1, **fields):
    return Plan(subgroup_size=10, placement=Plan.runs(placements), staging_slots=slots, **fields)


def test_a_chain_and_a_branch():
    out = ScheduleBuilder()
    first = out.add(OpKind.FORWARD, Lane.COMPUTE, 2.0)
    copy = out.add(OpKind.STATE_H2D, Lane.H2D, 5.0, "h2d_bytes_per_s", [first])
    out.add(OpKind.BACKWARD, Lane.COMPUTE, 3.0)  # after forward on its lane
    out.add(OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, 1.0, "device_adam_params_per_s", [copy])
    timeline = simulate(Schedule(ops=tuple(out.ops)), machine())
    assert {s.kind: (s.start_s, s.end_s) for s in timeline.spans} == {
        OpKind.FORWARD: (0, 2),
        OpKind.BACKWARD: (2, 5),
        OpKind.STATE_H2D: (2, 7),
        OpKind.UPDATE_DEVICE: (7, 8),
    }
    assert timeline.makespan_s == 8


def test_a_lane_runs_its_ops_in_order_even_if_a_later_one_could_start():
    out = ScheduleBuilder()
    slow = out.add(OpKind.FORWARD, Lane.COMPUTE, 4.0)
    out.add(OpKind.STATE_H2D, Lane.H2D, 1.0, "h2d_bytes_per_s", [slow])
    out.add(OpKind.STATE_H2D, Lane.H2D, 1.0, "h2d_bytes_per_s", subgroup=1)
    timeline = simulate(Schedule(ops=tuple(out.ops)), machine())
    assert spans(timeline, OpKind.STATE_H2D) == [(4, 5), (5, 6)]


def test_both_directions_share_a_half_duplex_link():
    out = ScheduleBuilder()
    out.add(OpKind.STATE_H2D, Lane.H2D, 4.0, "h2d_bytes_per_s")
    out.add(OpKind.STATE_D2H, Lane.D2H, 2.0, "d2h_bytes_per_s")
    full = simulate(Schedule(ops=tuple(out.ops)), machine(duplex_factor=1.0))
    assert (spans(full, OpKind.STATE_H2D), spans(full, OpKind.STATE_D2H)) == ([(0, 4)], [(0, 2)])
    half = simulate(Schedule(ops=tuple(out.ops)), machine(duplex_factor=0.5))
    # Both run at half speed until the short one ends at 4. Then two of four bytes are left.
    assert spans(half, OpKind.STATE_D2H) == [(0, 4)]
    assert spans(half, OpKind.STATE_H2D) == [(0, 6)]


def test_host_update_and_copies_contend_for_dram():
    out = ScheduleBuilder()
    out.add(OpKind.UPDATE_HOST, Lane.HOST, 10.0, "host_adam_params_per_s", dram_bytes=100.0)
    out.add(OpKind.STATE_H2D, Lane.H2D, 10.0, "h2d_bytes_per_s", dram_bytes=50.0)
    # 10 + 5 bytes per second are demanded, and 12 are available. So all slow down to 12/15 until both end.
    timeline = simulate(Schedule(ops=tuple(out.ops)), machine(dram_bytes_per_s=12.0))
    assert spans(timeline, OpKind.UPDATE_HOST) == [(0, pytest.approx(12.5))]
    assert spans(timeline, OpKind.STATE_H2D) == [(0, pytest.approx(12.5))]


def test_ranks_divide_the_nodes_dram_but_not_their_own_links():
    out = ScheduleBuilder()
    out.add(OpKind.UPDATE_HOST, Lane.HOST, 10.0, "host_adam_params_per_s", dram_bytes=100.0)
    out.add(OpKind.GRADIENT_D2H, Lane.D2H, 10.0, "d2h_bytes_per_s")
    ops = tuple(out.ops)
    four = simulate(Schedule(ops=ops, ranks_per_node=4), machine(dram_bytes_per_s=10.0))
    assert spans(four, OpKind.UPDATE_HOST) == [(0, pytest.approx(40.0))]
    assert spans(four, OpKind.GRADIENT_D2H) == [(0, 10.0)]


def test_a_device_update_slows_the_forward_beside_it():
    out = ScheduleBuilder()
    out.add(OpKind.FORWARD, Lane.COMPUTE, 4.0, device_share=1.0)
    out.add(OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, 1.0, "device_adam_params_per_s", device_share=1.0)
    timeline = simulate(Schedule(ops=tuple(out.ops)), machine())
    assert spans(timeline, OpKind.UPDATE_DEVICE) == [(0, 2)]
    assert spans(timeline, OpKind.FORWARD) == [(0, 5)]


def test_latencies_are_added_once_per_op():
    out = ScheduleBuilder()
    for _ in range(3):
        out.add(OpKind.STATE_H2D, Lane.H2D, 2.0, "h2d_bytes_per_s")
    timeline = simulate(Schedule(ops=tuple(out.ops)), machine(copy_latency_s=0.5))
    assert timeline.makespan_s == pytest.approx(7.5)


def test_memory_is_taken_at_the_start_and_given_back_at_the_end():
    out = ScheduleBuilder()
    out.add(OpKind.FORWARD, Lane.COMPUTE, 1.0, device_alloc_bytes=5, host_alloc_bytes=1)
    out.add(OpKind.FORWARD, Lane.COMPUTE, 1.0, device_alloc_bytes=7)
    out.add(OpKind.BACKWARD, Lane.COMPUTE, 1.0, device_free_bytes=12, host_free_bytes=1)
    held = {"device": {"buckets": 100}, "host": {"state": 10}}
    schedule = Schedule(ops=tuple(out.ops), held=held)
    timeline = simulate(schedule, machine())
    assert [(m.t_s, m.device_bytes, m.host_bytes) for m in timeline.memory] == [
        (0, 100, 10),
        (0, 105, 11),
        (1, 112, 11),
        (3, 100, 10),
    ]
    assert (timeline.device_peak_bytes, timeline.host_peak_bytes) == (112, 11)


def test_parameters_on_the_host_come_in_for_each_pass():
    plan = plan_of(["host"] * 2, parameter_home=Plan.runs(["host"] * 2, "home"))
    found = simulate(build_schedule(workload((10, 10)), plan), machine())
    assert spans(found, OpKind.PARAMETER_FETCH) == [(0, 20), (20, 40), (40, 60), (60, 80)]
    assert spans(found, OpKind.FORWARD) == [(20, 21), (40, 41)]
    assert spans(found, OpKind.BACKWARD) == [(60, 62), (80, 82)]
    assert spans(found, OpKind.GRADIENT_D2H) == [(62, 82), (82, 102)]
    assert spans(found, OpKind.UPDATE_HOST) == [(102, 112), (112, 122)]
    assert not spans(found, OpKind.PARAMETER_H2D)
    assert spans(found, OpKind.PARAMETER_FETCH, 1)[:2] == [(112, 132), (132, 152)]
    assert spans(found, OpKind.FORWARD, 1) == [(132, 133), (152, 153)]


def test_what_the_device_updates_goes_to_the_host_in_two_buffers_in_turn():
    plan = plan_of(["resident"] * 3, parameter_home=Plan.runs(["host"] * 3, "home"))
    found = simulate(build_schedule(workload((10, 10, 10)), plan), machine())
    norm = spans(found, OpKind.NORM)[0][0]
    shown = [(a - norm, b - norm) for a, b in spans(found, OpKind.UPDATE_DEVICE)]
    assert shown == [(0, 10), (10, 20), (30, 40)]
    location = [(a - norm, b - norm) for a, b in spans(found, OpKind.PARAMETER_D2H)]
    assert location == [(10, 30), (30, 50), (50, 70)]
    mixed = plan_of(["resident"] * 3, parameter_home=Plan.runs(["device", "host", "host"], "home"))
    found = simulate(build_schedule(workload((10, 10, 10)), mixed), machine())
    assert [s.layer for s in found.spans if s.kind == OpKind.PARAMETER_FETCH][:4] == [1, 2, 2, 1]
    norm = spans(found, OpKind.NORM)[0][0]
    assert spans(found, OpKind.FORWARD, 1)[0][0] == norm + 10


def test_all_on_the_host_with_overlap():
    found = simulate(build_schedule(workload((10, 10)), plan_of(["host"] * 2)), machine())
    assert spans(found, OpKind.FORWARD) == [(0, 1), (1, 2)]
    assert spans(found, OpKind.BACKWARD) == [(2, 4), (4, 6)]
    assert spans(found, OpKind.GRADIENT_D2H) == [(4, 24), (24, 44)]
    assert spans(found, OpKind.NORM) == [(6, 6)]
    # Subgroup 0 is first in forward order, although its gradient arrives last on the host.
    assert spans(found, OpKind.UPDATE_HOST) == [(44, 54), (54, 64)]
    assert spans(found, OpKind.PARAMETER_H2D) == [(54, 74), (74, 94)]
    assert spans(found, OpKind.FORWARD, 1) == [(74, 75), (94, 95)]


def test_without_overlap_the_step_holds_the_whole_update():
    found = simulate(build_schedule(workload((10, 10)), plan_of(["host"] * 2, overlap_forward=False)), machine())
    assert spans(found, OpKind.STEP_END) == [(94, 94)]
    assert spans(found, OpKind.FORWARD, 1) == [(94, 95), (95, 96)]
    assert found.phases(0)["step_s"] == pytest.approx(94 - 6)


def test_staged_updates_take_the_slot_in_turn():
    found = simulate(build_schedule(workload((10, 10)), plan_of(["device"] * 2)), machine())
    assert spans(found, OpKind.STATE_H2D) == [(6, 126), (256, 376)]
    assert spans(found, OpKind.UPDATE_DEVICE) == [(126, 136), (376, 386)]
    assert spans(found, OpKind.STATE_D2H) == [(136, 256), (386, 506)]


def test_a_second_slot_lets_the_copies_overlap():
    found = simulate(build_schedule(workload((10, 10)), plan_of(["device"] * 2, 2)), machine())
    assert spans(found, OpKind.STATE_H2D) == [(6, 126), (126, 246)]
    assert spans(found, OpKind.STATE_D2H) == [(136, 256), (256, 376)]


def test_prefetch_starts_behind_its_layer_and_only_for_so_many():
    plan = plan_of(["device"] * 2, 2, prefetch=1)
    found = simulate(build_schedule(workload((10, 10)), plan), machine())
    # Layer 1's backward ends at 4. The second staged update waits for the norm at 6, and for its lane.
    assert spans(found, OpKind.STATE_H2D) == [(4, 124), (124, 244)]


def test_a_second_micro_batch_fetches_the_sum_and_sends_it_to_the_host_again():
    work = workload((10, 10), forward_s=0.5, backward_s=1.0, gradient_accumulation_steps=2)
    found = simulate(build_schedule(work, plan_of(["host"] * 2)), machine())
    # Layer 1, layer 0, then both again, with their sums copied back to the GPU.
    assert spans(found, OpKind.BACKWARD) == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert spans(found, OpKind.GRADIENT_H2D) == [(22, 42), (42, 62)]
    assert spans(found, OpKind.GRADIENT_D2H) == [(2, 22), (22, 42), (42, 62), (62, 82)]
    assert spans(found, OpKind.UPDATE_HOST)[0] == (82, 92)


def test_the_host_issues_a_layer_once_it_has_waited_for_its_parameters():
    # In the simulator the host needs 3 s to issue a layer once the layer's parameters have arrived, so that the layer
    # starts 3 s later.
    work = workload((10, 10), module_issue_s=3.0)
    found = simulate(build_schedule(work, plan_of(["host"] * 2)), machine())
    assert spans(found, OpKind.ISSUE, 1) == [(79, 82), (99, 102)]
    assert spans(found, OpKind.FORWARD, 1) == [(82, 83), (102, 103)]
    early = workload((10, 10), module_issue_s=3.0, forward_s=50.0)
    found = simulate(build_schedule(early, plan_of(["host"] * 2)), machine())
    (begin, _), (second, end) = spans(found, OpKind.FORWARD, 1)
    assert (second - begin, end - begin) == (50, 100)
    serial = plan_of(["host"] * 2, overlap_forward=False)
    assert not [op for op in build_schedule(work, serial).ops if op.kind == OpKind.ISSUE]


@pytest.mark.parametrize("name", ["ebbtide", "zero3_offload", "no_offload", "superoffload"])
def test_the_time_to_start_the_updates_lengthens_a_step(name):
    options = {"plan": plan_of(["host"] * 2)} if name == "ebbtide" else {}
    on = machine(d2h_bytes_per_s=1e6)  # so that no update waits for its gradient
    without, found = (
        simulate(build_strategy(name, workload((10, 10), forward_s=50.0, step_issue_s=seconds), **options), on)
        for seconds in (0.0, 3.0)
    )
    *_, (begin_s, end_s) = spans(found, OpKind.NORM, 1)
    assert end_s - begin_s == pytest.approx(3)
    assert found.iteration_s == pytest.approx(without.iteration_s + 3)
    updates = [s for s in found.spans if s.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE) and s.iteration == 1]
    assert updates
    assert min(s.start_s for s in updates) >= end_s


def test_backward_is_held_up_by_gradients_under_way():
    # Three subgroups have 200 MiB each at 1 MiB/s: the second gradient waits for the first one's copy, and the third
    # for the second's.
    n, mib = 100 * 2**20, 2**20
    on = machine(d2h_bytes_per_s=mib, h2d_bytes_per_s=mib, dram_bytes_per_s=1e12)
    found = simulate(build_schedule(workload((n, n, n)), plan_of(["host"] * 3)), on)
    assert spans(found, OpKind.GRADIENT_D2H) == [(5, 205), (205, 405), (405, 605)]
    assert spans(found, OpKind.BACKWARD) == [(3, 5), (5, 7), (205, 207)]
    assert spans(found, OpKind.NORM) == [(405, 405)]
    # 300 MiB exceed the limit of 256 as much as 200 do: one gradient is under way.
    small = simulate(build_schedule(workload((n // 2,) * 3), plan_of(["host"] * 3)), on)
    assert spans(small, OpKind.BACKWARD) == [(3, 5), (5, 7), (7, 9)]
    assert spans(small, OpKind.NORM) == [(9, 9)]


def test_residents_copy_nothing():
    found = simulate(build_schedule(workload((10, 10)), plan_of(["resident"] * 2)), machine())
    kinds = {s.kind for s in found.spans}
    assert not kinds & {
        OpKind.STATE_H2D,
        OpKind.STATE_D2H,
        OpKind.GRADIENT_D2H,
        OpKind.PARAMETER_H2D,
        OpKind.UPDATE_HOST,
    }
    # Both updates run during the next forward, at half speed while they overlap.
    assert found.phases(1)["step_s"] == 0


def test_what_lies_outside_the_phases_is_a_phase_of_its_own():
    def phases(**fields):
        work = workload((10, 10), **fields)
        schedule = build_schedule(work, plan_of(["host"] * 2))
        return simulate(schedule, machine()).phases(1), simulate_fast(schedule, machine())

    with_loop, compiled = phases(pipeline_idle_s=3.0)
    without, _ = phases()
    assert (with_loop["loop_s"], without["loop_s"]) == (3.0, 0.0)
    assert with_loop["forward_s"] == pytest.approx(without["forward_s"] - 3.0)
    assert compiled.loop_s == 3.0
    long = phases(pipeline_idle_s=1000.0)[0]
    assert (long["loop_s"], long["forward_s"]) == (1000.0, 2.0)  # its two layers, without a wait


def stock(**options):
    """Return the simulated timeline of stock DeepSpeed offload for two layers of 10 parameters each.

    Backward of layer 1 ends at 5 s. A copy of one layer's 10 parameters between host and GPU takes 20 s with 2 bytes
    per parameter, and 40 s with 4 bytes per parameter.
    """
    loop = StockLoop(workload((10, 10), backward_s=3.0), StockOptions(**options))
    loop.run(1)
    on = machine(device_memory_bytes_per_s=Quantity.exact(1e12))
    return simulate(loop.schedule(1, "stock"), on)


def rounded(timeline, kind):
    """Return the start and end of each simulated op of a kind, in seconds, rounded to microseconds."""
    # The rounding removes the picoseconds that simulated gradient kernels take, so that the times equal those worked
    # out by hand.
    return [(round(start, 6), round(end, 6)) for start, end in spans(timeline, kind)]


def test_stocks_gradients_queue_on_one_stream_beside_backward():
    # Check the simulated gradient copies of stock DeepSpeed. They run one after the other on a single stream, and
    # backward of the next layer does not wait for them. Before a layer's gradients are copied, GPU kernels compute
    # their norm and convert them to fp32. These kernels start 1 s late, because the GPU is still busy with matrix
    # products of backward. The simulator assumes that this delay is a third of the time that backward of the layer
    # takes, which is 3 s here.
    found = stock(measured_copies=False)
    assert rounded(found, OpKind.BACKWARD) == [(2, 5), (5, 8)]
    assert rounded(found, OpKind.GRADIENT_D2H) == [(6, 26), (46, 86), (87, 107), (127, 167)]
    assert rounded(found, OpKind.GRADIENT_H2D) == [(26, 46), (107, 127)]
    assert rounded(found, OpKind.NORM) == [(167, 167)]
    assert found.phases(0)["backward_s"] == pytest.approx(165)


def test_gradients_that_the_host_widens_hold_backward_up_and_residents_do_not():
    found = stock(async_gradients=False, host_ratio=0.5)
    # Layer 1: copied to the host, back, and again in 16 bits, and 40 bytes converted to fp32 before layer 0 may begin.
    assert rounded(found, OpKind.BACKWARD) == [(2, 5), (105, 108)]
    # Layer 0 is resident: copied to the host and back.
    assert rounded(found, OpKind.GRADIENT_D2H) == [(5, 25), (45, 65), (108, 128)]
    assert rounded(found, OpKind.NORM) == [(148, 148)]


def test_unpinned_gradients_cross_three_times_before_backward_goes_on():
    found = stock(pinned=False)
    assert rounded(found, OpKind.BACKWARD) == [(2, 5), (85, 88)]
    assert rounded(found, OpKind.NORM) == [(168, 168)]


def test_unpinned_gradients_of_older_builds_are_also_widened_on_the_host():
    found = stock(pinned=False, async_gradients=False)
    assert rounded(found, OpKind.BACKWARD) == [(2, 5), (105, 108)]
    assert rounded(found, OpKind.GRADIENT_D2H) == [(5, 25), (45, 65), (108, 128), (148, 168)]


@pytest.mark.parametrize(
    ("place", "wire_dtype", "checks"),
    [
        ("host", "bf16", True),
        ("host", "fp16", True),
        ("host_fp16", "bf16", False),
        ("host_fp16", "fp16", True),
        ("device", "fp16", False),
    ],
)
@pytest.mark.parametrize("threads", [1, 4, None])
def test_zero_3_may_check_gradients_for_an_overflow_on_the_host(place, wire_dtype, checks, threads):
    # If the number of CPU threads is given, the time of this check is the measured time of one thread divided by that
    # number.
    work = workload((10**9, 10**9)).model_copy(update={"wire_dtype": wire_dtype, "stock_threads": threads})
    loop = StockLoop(work, StockOptions(overflow_check=place))
    loop.run(1)
    (norm,) = [op for op in loop.out.ops if (op.kind, op.lane) == (OpKind.NORM, Lane.COMPUTE)]
    found = [op for op in loop.out.ops if (op.kind, op.lane) == (OpKind.NORM, Lane.HOST)]
    assert bool(found) == checks
    if checks:
        assert norm.after == (found[0].id,)
        assert set(found[0].after) >= set(loop.gradients_done)
        if threads is not None:
            assert alone_s(found[0], machine()) == pytest.approx(2e9 * OVERFLOW_CHECK_S[wire_dtype] / threads)


def test_one_thread_takes_longer_to_widen_bf16_than_to_copy_it():
    ends = []
    for dtype, threads in (("fp16", 1), ("bf16", None), ("bf16", 4), ("bf16", 1)):
        work = workload((10**9, 10**9)).model_copy(update={"wire_dtype": dtype, "stock_threads": threads})
        loop = StockLoop(work, StockOptions(async_gradients=False, overflow_check="device"))
        loop.run(1)
        on = machine(pageable_d2h_bytes_per_s=Quantity.exact(5e9), dram_bytes_per_s=Quantity.exact(1e12))
        widened = [op for op in loop.out.ops if (op.kind, op.lane) == (OpKind.GRADIENT_PASS, Lane.COMPUTE)]
        ends.append(sum(alone_s(op, on) for op in widened))
    assert ends[0] == ends[1] > ends[2]
    assert ends[3] == pytest.approx(4 * ends[2])
    assert ends[3] == pytest.approx(2e9 * WIDENING_S["bf16"])


def test_torchs_own_adam_takes_six_times_as_long_as_deepspeeds():
    own, torchs = (stock(torch_adam=on).busy_s(Lane.HOST) for on in (False, True))
    assert torchs / own == pytest.approx((16 + 6 * 28) / 44)


def test_not_offloading_copies_one_gradient_after_the_other_to_float64_for_the_norm():
    from ebbtide.simulator.schedules.stock import DeviceLoop

    work = workload((60, 1)).model_copy(update={"parameters": ((60, 1),)})
    loop = DeviceLoop(work)
    loop.run(1)
    (norm,) = [op for op in loop.out.ops if op.kind == OpKind.NORM]
    assert norm.device_alloc_bytes == norm.device_free_bytes == 60 * 8


def test_gathers_from_other_nodes_do_not_queue_behind_reductions():
    layers = tuple(
        Layer(params=10, forward_s=1.0, backward_s=20.0, network_gather_bytes=10, network_reduce_bytes=30)
        for _ in range(2)
    )
    work = workload((10, 10)).model_copy(update={"layers": layers})
    found = simulate(build_schedule(work, plan_of(["resident"] * 2)), machine())
    assert spans(found, OpKind.PARAMETER_GATHER) == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert spans(found, OpKind.BACKWARD) == [(30, 50), (50, 70)]
    assert spans(found, OpKind.GRADIENT_REDUCE) == [(50, 80), (80, 110)]


def test_backward_goes_on_beside_the_share_of_a_reduction_that_it_does_not_wait_for():
    layers = tuple(Layer(params=10, forward_s=1.0, backward_s=20.0, network_reduce_bytes=30) for _ in range(2))
    work = workload((10, 10)).model_copy(update={"layers": layers, "reduced_beside": 1 / 3})
    found = simulate(build_schedule(work, plan_of(["resident"] * 2)), machine())
    assert spans(found, OpKind.BACKWARD) == [(2, 22), (42, 62)]
    assert spans(found, OpKind.GRADIENT_REDUCE) == [(22, 42), (42, 52), (62, 82), (82, 92)]


def test_a_schedule_may_only_wait_for_earlier_ops():
    from ebbtide.simulator import Op

    with pytest.raises(ValueError, match="waits for \\[1\\]"):
        Schedule(ops=(Op(0, OpKind.NORM, Lane.COMPUTE, 0.0, after=(1,)), Op(1, OpKind.NORM, Lane.COMPUTE, 0.0)))
    with pytest.raises(ValueError, match=r"the id of each op must be its position in ops, but ops\[0\]\.id is 5"):
        Schedule(ops=(Op(5, OpKind.NORM, Lane.COMPUTE, 0.0),))


def test_a_missing_rate_is_named():
    out = ScheduleBuilder()
    out.add(OpKind.PARAMETER_GATHER, Lane.NETWORK, 1.0, "network_bytes_per_s")
    without = machine().model_copy(update={"network_bytes_per_s": None})
    with pytest.raises(ValueError, match="network_bytes_per_s"):
        simulate(Schedule(ops=tuple(out.ops)), without)


def simpy_ends(schedule):
    """Return the time in seconds at which each op of a schedule ends, as computed by simpy.

    simpy is a reference that is independent of ebbtide's simulator. Each lane (a queue of ops) runs one op at a time,
    in the order of the schedule, and no bandwidth is shared.
    """
    import simpy

    env = simpy.Environment()
    done = [env.event() for _ in schedule.ops]
    lanes = {lane: simpy.Resource(env, capacity=1) for lane in Lane}
    ends = [0.0] * len(schedule.ops)
    queue = {lane: [op for op in schedule.ops if op.lane == lane] for lane in Lane}

    def worker(lane):
        for op in queue[lane]:
            yield env.all_of([done[i] for i in op.after])
            with lanes[lane].request() as turn:
                yield turn
                yield env.timeout(op.work)
            ends[op.id] = env.now
            done[op.id].succeed()

    for lane in Lane:
        env.process(worker(lane))
    env.run()
    return ends


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(1, 60))
def test_random_schedules_without_contention_are_what_simpy_says(seed, count):
    rng = random.Random(seed)
    out = ScheduleBuilder()
    for number in range(count):
        waits = rng.sample(range(number), min(number, rng.randint(0, 3)))
        # Durations in seconds without demands, so that nothing is shared.
        out.add(
            rng.choice(list(OpKind)),
            rng.choice([Lane.COMPUTE, Lane.HOST, Lane.STORAGE, Lane.NETWORK]),
            rng.choice([0.0, rng.uniform(0, 5)]),
            after=waits,
        )
    schedule = Schedule(ops=tuple(out.ops))
    roomy = machine(storage_write_bytes_per_s=1e6, network_bytes_per_s=1e6)
    # Spans are sorted by their end. Durations and starts distinguish ops of a lane.
    expected = simpy_ends(schedule)
    timeline = simulate(schedule, roomy)
    for lane in Lane:
        ours = [s.end_s for s in timeline.spans if s.lane == lane]
        theirs = [expected[op.id] for op in schedule.ops if op.lane == lane]
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_stored_state_is_read_for_the_next_step_as_soon_as_a_host_slot_is_free():
    rates = {"d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "storage_write_bytes_per_s": 12.0}
    plan = plan_of(["stored"] * 2, slots=0, host_slots=1)
    found = simulate(build_schedule(workload((1, 1)), plan), machine(**rates))
    spans = [
        (span.kind, span.subgroup, span.start_s, span.end_s)
        for span in found.spans
        if span.lane in (Lane.STORAGE, Lane.STORAGE_READ, Lane.HOST)
    ]
    expected = [
        (OpKind.STATE_READ, 0, 0, 1),  # no other update needs the slot
        (OpKind.UPDATE_HOST, 0, 6, 7),  # after the norm
        (OpKind.STATE_WRITE, 0, 7, 8),
        (OpKind.STATE_READ, 1, 8, 9),  # the only slot is free again
        (OpKind.UPDATE_HOST, 1, 9, 10),
        (OpKind.STATE_WRITE, 1, 10, 11),
        (OpKind.STATE_READ, 0, 11, 12),  # read for the second step
    ]
    for one, (kind, subgroup, start_s, end_s) in zip(spans[: len(expected)], expected, strict=True):
        assert one[:2] == (kind, subgroup)
        assert one[2:] == pytest.approx((start_s, end_s), abs=1e-6)


@pytest.mark.parametrize(("factor", "end_s"), [(1.0, 1.0), (0.5, 2.0), (0.75, 4 / 3), (0.1, 2.0)])
def test_reads_and_writes_of_storage_get_into_each_others_way(factor, end_s):
    builder = ScheduleBuilder()
    builder.add(OpKind.STATE_READ, Lane.STORAGE_READ, 3.0, "storage_read_bytes_per_s")
    builder.add(OpKind.STATE_WRITE, Lane.STORAGE, 5.0, "storage_write_bytes_per_s")
    on = machine(
        storage_read_bytes_per_s=Quantity.exact(3.0),
        storage_write_bytes_per_s=5.0,
        storage_duplex_factor=Quantity.exact(factor),
    )
    found = simulate(Schedule(tuple(builder.ops)), on)
    assert [s.end_s for s in found.spans] == pytest.approx([end_s, end_s])
