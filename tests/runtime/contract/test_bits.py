"""Tests of ebbtide's main contract: under any plan, on any device and with any timing of ops, training has
stock DeepSpeed's results, bit for bit.
"""

import functools
import tempfile

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.update.order import UpdateOrder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.training import DEVICES, all_state, assert_same, attached, outcome, same, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
MIX = ["host", "device", "resident", "stored"]
LOCATIONS = ["device", "host"]  # another length than the placements, so that six subgroups have all combinations


def l2_adam():
    betas = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {"optimizer": {"type": "Adam", "params": {**betas, "adam_w_mode": False}}}


def warm_up():
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}
    return {"scheduler": {"type": "WarmupLR", "params": schedule}}


def two_groups(model):
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.dim() > 1]
    plain = [p for n, p in named if p.dim() == 1]
    return [
        {"params": decayed, "weight_decay": 0.2, "lr": 2e-3},
        {"params": plain, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]


def frozen():
    model = ByteGPT(SIZES["tiny"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" in name or "widen" in name or "head" in name
    return model


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


# Parameters leave the GPU after each forward and backward, and are gathered ahead.
EVERY_PASS = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 60_000,
    "stage3_prefetch_bucket_size": 40_000,
    "stage3_param_persistence_threshold": 300,
}
CASES = {
    "clipping": {},
    "clips_hard": {"clipping": 0.001},
    "no_clipping": {"clipping": 0.0},
    "accumulation": {"accumulation": 3},
    "fp32": {"precision": "fp32"},
    "fp32_accumulation": {"accumulation": 2, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "no_persistent_parameters": {"stage3_param_persistence_threshold": 0},
    "small_buckets": {"reduce_bucket_size": 5_000, "stage3_prefetch_bucket_size": 10_000},
    "large_parameters": {"reduce_bucket_size": 500},
    "reduced_in_fp16": {"extra": {"communication_data_type": "fp16"}},
    "scaled_around_reduction": {"reduce_scatter": False, "extra": {"gradient_predivide_factor": 3.0}},
    "l2_adam": {"extra": l2_adam()},
    "learning_rate_schedule": {"extra": warm_up()},
    "parameter_groups": {"parameters": two_groups},
    "no_overlap": {"overlap_comm": False},
    "frozen_parameters": {"model": frozen, "parameters": trainable},
    "one_subgroup": {"subgroup_size": 10**9},
    "offloaded_parameters": {"offload_param": {"device": "cpu", "pin_memory": True}, "accumulation": 3, **EVERY_PASS},
    "offloaded_and_frozen": {
        "offload_param": {"device": "cpu", "buffer_count": 4, "max_in_cpu": 0},
        "model": frozen,
        "parameters": trainable,
        **EVERY_PASS,
    },
}


ZERO_3_ONLY = {
    "no_persistent_parameters",
    "frozen_parameters",
    "one_subgroup",
    "offloaded_parameters",
    "offloaded_and_frozen",
}
DEVICE = list(DEVICES)[-1]
UNIFIED = next(iter(DEVICES))
# Each case runs with ZeRO-3 and 2. Without copies between memories, and with ZeRO-1, only cases that differ there run.
EVERYWHERE = [
    *((case, 3, DEVICE) for case in CASES),
    *((case, 2, DEVICE) for case in CASES if case not in ZERO_3_ONLY),
    *((case, 3, UNIFIED) for case in ("clips_hard", "accumulation", "fp32", "offloaded_parameters")),
    ("accumulation", 2, UNIFIED),
    *((case, 1, DEVICE) for case in ("clipping", "accumulation", "fp32_accumulation")),
]


def engine_for(case, stage=3):
    options = dict(CASES[case])
    if "model" in options:
        options["model"] = options["model"]()
    if stage != 3:
        options |= {"stage": stage}
    return start(**options)


@functools.cache
def stock(case, stage=3):
    return outcome(engine_for(case, stage))


@pytest.mark.parametrize(("case", "stage", "device"), EVERYWHERE)
def test_every_configuration(case, stage, device):
    locations = LOCATIONS if stage == 3 and device == DEVICE else None
    ours = attached(engine_for(case, stage), MIX, device, locations=locations)
    # The trained part of the model is small, so there are few subgroups.
    few = {"one_subgroup": 1, "frozen_parameters": 2, "offloaded_and_frozen": 2}
    assert len(session_of(ours).executor.states) >= few.get(case, 3)
    assert_same(outcome(ours), stock(case, stage))


@pytest.mark.parametrize(("device", "overlap"), [(UNIFIED, True), (DEVICE, False)])
def test_all_on_the_host(device, overlap):
    ours = attached(engine_for("clipping"), ["host"], device, overlap_forward=overlap)
    assert_same(outcome(ours), stock("clipping"))


def test_offloaded_parameters_have_the_bits_of_those_that_are_not():
    config = {"offload_param": {"device": "cpu"}, **EVERY_PASS}
    ours = attached(start(**config), ["host"], DEVICE)
    states = session_of(ours).executor.states
    assert {state.parameter_location for state in states} == {"host"}
    assert session_of(ours).executor.parameter_slots == []
    result = outcome(ours)
    assert_same(result, stock("clipping"))
    assert_same(result, outcome(start(**config)))


def test_updates_go_in_the_order_in_which_forward_needs_them():
    # DeepSpeed's order puts a parameter group of norms and biases last, although layer 0 needs some of it first.
    ours = attached(engine_for("parameter_groups"), ["host"], DEVICE)
    groups = ours.optimizer.fp16_groups
    number = {p.ds_id: i for i, p in enumerate(ours.module.parameters())}
    needed = [min(number[p.ds_id] for p in group) for group in groups]
    assert needed != sorted(needed), "the test needs a group out of order"
    session = session_of(ours)
    assert [needed[i] for i in session.plan.issue_order] == sorted(needed)
    assert session.executor.issue.order == session.plan.issue_order
    ours.destroy()


STAGES = [*((3, device) for device in DEVICES), (2, DEVICE)]
STEPS = 8


@functools.cache
def stock_for_long(accumulation):
    return outcome(start(accumulation=accumulation), STEPS)


@st.composite
def plans(draw):
    pattern = draw(st.lists(st.sampled_from(MIX), min_size=1, max_size=5))
    slots = draw(st.integers(1, 4))
    return pattern, {
        "seed": draw(st.integers(0, 10**6)),
        "staging_slots": slots,
        "prefetch": draw(st.integers(0, slots)),
        "overlap_forward": draw(st.booleans()),
        "order_seed": draw(st.none() | st.integers(0, 10**6)),
        "locations": draw(st.lists(st.sampled_from(["device", "host"]), min_size=1, max_size=3)),
        "speculate": draw(st.integers(0, 6)),
        "speculate_visits": draw(st.integers(0, 3)),
        "speculate_among": draw(st.integers(0, 6)),
        "host_slots": draw(st.integers(1, 4)),
        "device_sums": draw(st.integers(0, 6)),
    }


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=plans(), after=plans(), accumulation=st.sampled_from([1, 2]), saved=st.integers(1, STEPS // 2 - 1))
def test_any_placement_and_timing_with_a_resume_in_between(before, after, accumulation, saved):
    device, saved_at = DEVICE, 2 * saved
    expected = stock_for_long(accumulation)

    def under(plan):
        return attached(start(accumulation=accumulation), plan[0], device, **plan[1])

    ours = under(before)
    losses, norms = train(ours, saved_at)
    with tempfile.TemporaryDirectory() as folder:
        ours.save_checkpoint(folder)
        train(ours, accumulation, first=saved_at)
        ours.destroy()
        ours = under(after)
        ours.load_checkpoint(folder)
    state, more, more_norms = outcome(ours, STEPS - saved_at, first=saved_at)
    if accumulation > 1:  # a checkpoint does not contain the norm of the previous step
        more_norms[0] = norms[-1]
    assert_same((state, torch.cat([torch.stack(losses), more]), norms + more_norms), expected)


@pytest.fixture
def fp16(monkeypatch):
    """Allow fp16, which DeepSpeed refuses on a CPU although torch computes it there."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


SCALED = {"precision": "fp16", "extra": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}}


def scaled(engine):
    losses, norms = train(engine, 8)
    result = state_of(engine), torch.stack(losses), norms
    skipped = engine.skipped_steps
    engine.destroy()
    return result, skipped


@functools.cache
def stock_scaled(stage):
    return scaled(start(stage=stage, **SCALED))


@pytest.mark.parametrize(("stage", "device"), STAGES)
def test_fp16_skips_the_step_on_overflow_and_goes_on(stage, device, fp16):
    expected, skipped = stock_scaled(stage)
    assert 0 < skipped < 8, "the test needs both kinds of step"
    engine = attached(start(stage=stage, **SCALED), MIX, device, locations=LOCATIONS if stage == 3 else None)
    ours, ours_skipped = scaled(engine)
    assert ours_skipped == skipped
    assert_same(ours, expected)


class Switching(torch.nn.Module):
    """A model that uses one of two branches per batch, so that the parameters of the other branch get no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(256, 32)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(32, 300) for _ in range(2))
        self.back = torch.nn.Linear(300, 256)
        self.number = 0

    def forward(self, inputs, targets):
        branch = self.branches[(self.number // 2) % 2]
        self.number += 1
        logits = self.back(torch.relu(branch(self.embed(inputs))))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def switching(**options):
    return start(model=Switching(), subgroup_size=9000, **options)


@functools.cache
def stock_switching(stage, clipping):
    return outcome(switching(stage=stage, clipping=clipping), 9)


@pytest.mark.parametrize(("stage", "device", "clipping"), [*((*where, 0.05) for where in STAGES), (3, DEVICE, 0.0)])
def test_unused_parameters_get_what_stock_gives_them(stage, device, clipping):
    ours = attached(switching(stage=stage, clipping=clipping), MIX, device, subgroup=5_000)
    assert_same(outcome(ours, 9), stock_switching(stage, clipping))


def overflowing(engine, boundaries=1, count=12):
    """Train some steps, one of which has a loss that overflows. Return the state, the losses and the number of
    skipped steps.

    An infinity that is left from a skipped step enters a later update of stock DeepSpeed, so that values become
    NaN. The returned tensors have 7 in place of NaN, because two NaNs do not compare as equal.

    Args:
        boundaries: Number of backward passes per step.
    """
    batches, losses = Batches(2, SIZES["tiny"].sequence), []
    for number in range(count):
        for again in range(boundaries):
            loss = engine(*batches.at(number + 100 * again, engine.device))
            engine.backward(loss * (1e30 if number == 5 and not again else 1.0))
            losses.append(loss.detach())
        engine.step()
    state = {name: value.nan_to_num(7.0) for name, value in all_state(engine).items()}
    skipped = engine.skipped_steps
    engine.destroy()
    return state, torch.stack(losses).nan_to_num(7.0), skipped


FP16 = {"precision": "fp16", "clipping": 0.0, "extra": {"fp16": {"enabled": True, "loss_scale": 16}}}


@functools.cache
def stock_switching_overflow(stage, accumulation):
    return overflowing(switching(stage=stage, accumulation=accumulation, **FP16))


@functools.cache
def stock_overflow_of_two_backwards(stage):
    return overflowing(start(stage=stage, **FP16), 2, 8)


@pytest.mark.parametrize(("stage", "device"), STAGES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_overflow_of_what_the_next_batches_do_not_reach(stage, device, accumulation, fp16):
    expected = stock_switching_overflow(stage, accumulation)
    assert expected[2] > 1
    ours = attached(switching(stage=stage, accumulation=accumulation, **FP16), MIX, device, subgroup=5_000)
    assert_same(overflowing(ours), expected)


@pytest.mark.parametrize(("stage", "device"), STAGES)
def test_an_overflow_of_the_first_of_two_backwards(stage, device, fp16):
    expected = stock_overflow_of_two_backwards(stage)
    assert expected[2] == 1
    assert_same(overflowing(attached(start(stage=stage, **FP16), MIX, device), 2, 8), expected)


@functools.cache
def stock_of_six_steps(stage):
    return outcome(engine_for("clipping", stage), 6)


@pytest.mark.parametrize(("stage", "device"), STAGES)
def test_save_and_resume_in_another_placement(stage, device, tmp_path):
    expected = stock_of_six_steps(stage)
    locations = LOCATIONS if stage == 3 else None
    saving = attached(engine_for("clipping", stage), MIX, device, locations=locations)
    train(saving, 3)
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=3)  # the checkpoint must hold the state from before these steps
    saving.destroy()
    offload = {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    resumed = attached(start(stage=stage, **offload), ["resident", "host"], device)
    path, _ = resumed.load_checkpoint(str(tmp_path))
    assert path is not None
    ours = outcome(resumed, 3, first=3)
    assert_same((ours[0], ours[1], ours[2]), (expected[0], expected[1][3:], expected[2][3:]))
    if stage == 3 and device == DEVICE:  # only state in memory, because state on a drive must be exported
        saving = attached(engine_for("clipping", stage), MIX[:3], device, locations=locations)
        train(saving, 3)
        saving.save_checkpoint(str(tmp_path))
        saving.destroy()
        stocks = start(**offload)
        stocks.load_checkpoint(str(tmp_path))
        # After a load, DeepSpeed computes powers of the betas in another way, so only the loaded state is compared.
        loaded = state_of(stocks)
        stocks.destroy()
        again = attached(start(**offload), ["host"], device)
        again.load_checkpoint(str(tmp_path))
        assert differences(state_of(again), loaded) == ()
        again.destroy()


@pytest.mark.parametrize(("stage", "device"), STAGES)
def test_a_checkpoint_of_stocks_from_before_the_first_update(stage, device, tmp_path):
    # The checkpoint has no moments yet. Those of the engine that loads the checkpoint belong to another run, and must
    # not be used.
    saving = start(stage=stage)
    saving.save_checkpoint(str(tmp_path))
    expected = outcome(saving, 2)
    ours = attached(start(stage=stage), ["host", "device"], device)
    train(ours, 2, first=5)
    ours.load_checkpoint(str(tmp_path))
    assert_same(outcome(ours, 2), expected)


class ReadsAnothersParameter(ByteGPT):
    """A byte GPT that reads a parameter of a module without calling the module's forward, as many models do."""

    def forward(self, inputs, targets):
        x = self.bytes_in(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_read_outside_of_their_module_after_a_load(overlap, tmp_path):
    def new():
        return start(model=ReadsAnothersParameter(SIZES["tiny"]))

    expected = outcome(new(), 5)
    saving = new()
    train(saving, 3)
    saving.save_checkpoint(str(tmp_path))
    saving.destroy()
    resumed = attached(new(), ["host"], next(iter(DEVICES)), overlap_forward=overlap)
    resumed.load_checkpoint(str(tmp_path))
    ours = outcome(resumed, 2, first=3)
    assert_same(ours, (expected[0], expected[1][3:], expected[2][3:]))


class ReadsOneOfThree(SmallModel):
    """A model that reads one of three small parameters of a list in each forward, as with one prompt per task."""

    def __init__(self):
        super().__init__()
        self.tasks, self.forwards = torch.nn.ParameterList(torch.ones(3, 256).unbind()), 0

    def forward(self, inputs, targets):
        self.forwards += 1
        logits = self.head(self.second(self.first(self.bytes_in(inputs)))) + self.tasks[self.forwards % 3]
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("overlap", [True, False])
def test_small_parameters_that_only_some_steps_read(overlap):
    # DeepSpeed keeps small parameters gathered after a step, and takes the read of a parameter that is not gathered for
    # a change of the recorded order.
    def new():
        return start(model=ReadsOneOfThree())

    expected = outcome(new(), 6)
    ours = attached(new(), MIX, DEVICE, overlap_forward=overlap)
    assert_same(outcome(ours, 6), expected)


def test_an_evaluation_in_inference_mode():
    def evaluated(engine):
        seen = []

        @torch.inference_mode()
        def evaluate(engine, number):
            seen.append(engine(*Batches(2, SIZES["tiny"].sequence).at(number, engine.device)).clone())

        return outcome(engine, each=evaluate), seen

    def new():
        return start(offload_param={"device": "cpu"})

    expected, losses = evaluated(new())
    ours, seen = evaluated(attached(new(), MIX, DEVICE))
    assert_same(ours, expected)
    assert all(map(torch.equal, seen, losses))


@pytest.mark.parametrize("case", ["clipping", "accumulation", "parameter_groups"])
def test_the_order_of_the_updates_changes_no_bit(case):
    device = "cuda" if "cuda" in DEVICES else "emulated"
    ours = attached(engine_for(case), MIX, device, order_seed=3)
    assert session_of(ours).plan.order != UpdateOrder()
    assert_same(outcome(ours), stock(case))


PLANTS = {  # lane without waits -> the op that comes too late
    "slot reused before its write-back": (Lane.H2D, OpKind.STATE_D2H),
    "update before its state has come": (Lane.DEVICE_UPDATE, OpKind.STATE_H2D),
    "write-back before the update": (Lane.D2H, OpKind.UPDATE_DEVICE),
}


@pytest.mark.parametrize(
    ("plant", "stage"), [*((plant, 3) for plant in PLANTS), ("update before its state has come", 2)]
)
def test_a_planted_race_is_caught(plant, stage):
    # The test makes one lane (a queue of ops that run one after the other) start its ops without waiting for other ops.
    # It also delays ops on which the ops of this lane depend. The results must then differ from stock DeepSpeed's.
    import time

    ours = attached(engine_for("clipping", stage), ["device"], DEVICE, seed=None, staging_slots=1, prefetch=1)
    executor = session_of(ours).executor
    name, slow = PLANTS[plant]
    lane = executor.lanes[name]
    submit = lane.submit
    lane.submit = lambda body, waits, completion: submit(body, [], completion)

    def delay(op):
        if op.kind == slow:
            time.sleep(0.02)

    executor.gradients.before_op = delay
    assert not same(outcome(ours), stock("clipping", stage))


def test_a_gate_removed_is_caught():
    import time

    ours = attached(engine_for("clipping"), ["host"], DEVICE, seed=None)
    ours.optimizer._gathers.open()
    session_of(ours).executor.gradients.before_op = lambda op: time.sleep(0.1)
    assert not same(outcome(ours), stock("clipping"))
