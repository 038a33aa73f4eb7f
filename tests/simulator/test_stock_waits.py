"""Tests of simulated training with stock DeepSpeed on several ranks, in which ranks wait for each other's gradient
copies and for gathers of parameters.
"""

import pytest
from ebbtide.simulator import Layer, Workload, build_schedule, build_strategy, preset, simulate, workload_from_model
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.update.way import Way

MODEL = {"name": "toy", "layers": 8, "hidden": 2048, "heads": 16, "vocabulary": 32000}
FLAT = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "bf16": {"enabled": True},
}
HELD = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


def flat(ranks, machine=None, **zero):
    config = {**FLAT, "zero_optimization": {**FLAT["zero_optimization"], **zero}}
    options = {"sequence": 512, "micro_batch": 1, "data_parallel": ranks}
    return workload_from_model(MODEL, machine or preset("a100-80gb"), config, **options)


def seconds(strategy, work, machine, **options):
    schedule = build_strategy(strategy, work, iterations=1, **options)
    assert simulate_fast(schedule, machine).iteration_s == pytest.approx(simulate(schedule, machine).iteration_s)
    return simulate_fast(schedule, machine).iteration_s


def one_layer(own, others, beside=0.0, micro=1):
    layer = Layer(params=own, params_of_others=others, forward_s=0.0, backward_s=1.0)
    return Workload(
        name="w",
        layers=(layer, layer),
        subgroups=(2 * own,),
        zero_stage=2,
        reduced_beside=beside,
        gradient_accumulation_steps=micro,
    )


def test_a_rank_waits_while_others_copy_their_slices_of_a_layer(machine_by_hand):
    # In each layer other ranks own a billion gradient elements. Their copy in fp32 takes 4 s at 1 GB/s.
    alone = seconds("zero_offload", one_layer(1000, 0), machine_by_hand)
    waiting = seconds("zero_offload", one_layer(1000, 10**9), machine_by_hand)
    assert waiting - alone == pytest.approx(2 * 4.0, rel=1e-6)


def test_with_accumulation_others_copy_sixteen_bits_out_and_in_as_well(machine_by_hand):
    # In the first micro-batch, each gradient element is copied to the host (2 bytes). In the second one, this sum is
    # copied to the GPU (2 bytes), the new sum to the host (2 bytes), and the sum in fp32 to the host (4 bytes).
    alone = seconds("zero_offload", one_layer(1000, 0, micro=2), machine_by_hand)
    waiting = seconds("zero_offload", one_layer(1000, 10**9, micro=2), machine_by_hand)
    assert waiting - alone == pytest.approx(2 * (2.0 + 2.0 + 2.0 + 4.0), rel=1e-6)


def test_with_overlap_comm_others_copy_beside_backward(machine_by_hand):
    # In each layer, backward takes 1 s, and after it the other ranks' copies of this layer take 4 s. This rank's own
    # copy of a layer takes only microseconds, but starts after the other ranks' copies of the layer. If this rank has
    # gradients in both layers, backward waits for this rank's copy after each layer: 2 * (1 s + 4 s) = 10 s.
    waiting = seconds("zero_offload", one_layer(1000, 10**9, beside=1.0), machine_by_hand)
    # The thousand elements of its own in the last layer come after those of the other ranks in this layer, and backward
    # waits for them.
    assert waiting == pytest.approx(1.0 + 4.0 + 1.0 + 4.0, abs=0.1)
    apart = one_layer(1000, 10**9, beside=1.0)
    first, last = (apart.layers[0].model_copy(update={"params": n}) for n in (2000, 0))
    apart = apart.model_copy(update={"layers": (first, last)})
    assert seconds("zero_offload", apart, machine_by_hand) == pytest.approx(1.0 + 2 * 4.0, abs=0.1)


@pytest.fixture
def machine_by_hand():
    machine = preset("rtx4090")
    rate = Quantity.exact(1e9)
    return machine.model_copy(update={"d2h_bytes_per_s": rate, "copy_latency_s": 0.0, "launch_latency_s": 0.0})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_slices_are_the_whole_model_once(ranks):
    work = flat(ranks)
    whole = flat(1)
    held = [layer.params + layer.params_of_others for layer in work.layers[:-1]]
    assert held == [layer.params for layer in whole.layers[:-1]]
    assert not any(layer.params_of_others for layer in whole.layers)


def test_round_robin_and_overlap_never_wait_longer():
    machine = preset("a100-80gb")
    plain = seconds("zero_offload", flat(8), machine)
    assert seconds("zero_offload", flat(8, round_robin_gradients=True), machine) < plain
    assert seconds("zero_offload", flat(8, overlap_comm=True), machine) < plain


def test_a_plan_does_not_wait_for_others_copies():
    # Under stock DeepSpeed the rank does wait: the other ranks join the next reduction only after their copies, which
    # use the stream of the reductions. A plan's copies have a stream of their own.
    work = flat(4)
    plan = Plan(subgroup_size=work.subgroup_size, ways=Way.each(["host"] * len(work.subgroups)), overlap_forward=False)
    bare = work.model_copy(update={"layers": tuple(x.model_copy(update={"params_of_others": 0}) for x in work.layers)})
    assert build_schedule(work, plan) == build_schedule(bare, plan)


def test_a_faster_link_never_makes_stock_offload_slower():
    machine = preset("a100-80gb")
    before = None
    for factor in (0.25, 0.5, 1.0, 1.25):
        rates = {name: getattr(machine, name).scaled(factor) for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
        now = seconds("zero_offload", flat(8), machine.model_copy(update=rates))
        assert before is None or now < before
        before = now


def held(ranks, machine, **fields):
    options = {"sequence": 2048, "micro_batch": 4, "data_parallel": ranks, **fields}
    return workload_from_model(MODEL, machine, HELD, **options)


def test_parameters_on_the_host_of_several_ranks_do_not_overlap_backward():
    # For a single rank it adds less than 2%. For parameters on the GPU, with stock DeepSpeed or under a plan, it adds
    # nothing.
    machine, options = preset("rtx4090-x4"), {"optimizer": "cpu"}
    for ranks in (1, 4):
        work = held(ranks, machine)
        bare = work.model_copy(update={"layers": tuple(x.model_copy(update={"unhidden_s": 0.0}) for x in work.layers)})
        longer = sum(layer.unhidden_s for layer in work.layers)
        assert (longer > 0.02 * work.backward_s) == (ranks > 1)
        made, alone = (seconds("zero_infinity", w, machine, parameters="cpu", **options) for w in (work, bare))
        assert made - alone == pytest.approx(longer, abs=0.3 * longer)
        on_device = [seconds("zero3_offload", w, machine) for w in (work, bare)]
        assert on_device[0] == on_device[1]
        plan = Plan(subgroup_size=work.subgroup_size, ways=Way.each(["host"] * len(work.subgroups)))
        assert build_schedule(work, plan) == build_schedule(bare, plan)


def test_without_wires_between_them_ranks_lose_most():
    lost = {}
    for name in ("a100-80gb", "rtx4090-x4"):
        machine = preset(name)
        options = {"optimizer": "cpu", "parameters": "cpu"}
        four = seconds("zero_infinity", held(4, machine), machine, **options)
        lost[name] = four / seconds("zero_infinity", held(1, machine), machine, **options)
    assert lost["rtx4090-x4"] > lost["a100-80gb"]


def test_the_copy_of_a_backwards_parameters_waits_for_the_backward_before(machine_by_hand):
    layer = Layer(params=10**8, forward_s=0.01, backward_s=0.01)
    made = {}
    for ranks in (1, 2):
        work = Workload(name="w", layers=(layer,) * 6, subgroups=(6 * 10**8,), ranks_per_node=ranks)
        slow = machine_by_hand.model_copy(update={"h2d_bytes_per_s": Quantity.exact(1e9), "gpus_per_node": 2})
        schedule = build_strategy("zero_infinity", work, iterations=1, optimizer="cpu", parameters="cpu")
        made[ranks] = simulate(schedule, slow).iteration_s
    assert made[2] > made[1]
