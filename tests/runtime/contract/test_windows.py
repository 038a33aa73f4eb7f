"""Tests of training loops that drop or repeat micro-batches within an optimizer step, for example by
`zero_grad` or by a second backward, in every ZeRO stage.
"""

import functools

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from ebbtide.runtime import session_of
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.windows import Windows

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.training import DEVICES, assert_same, attached, start

pytestmark = pytest.mark.usefixtures("only_rank")
MIX = ["host", "device", "resident", "stored"]

# b: backward, z: zero_grad, s: step. The loop has batches that are dropped after their backward (one, or two in a row),
# two backwards before one step, and both together.
LOOP = "bs bz bs bz bz bs bbs bs bz bbs bz bs"
DEVICE = list(DEVICES)[-1]


def follow(engine, actions):
    """Train a loop given as a string of letters: b for a backward, z for a `zero_grad` call, s for a step, and a number
    of micro-batches for the next steps. Return the engine's state, losses and norms.
    """
    losses, norms = loop_of(engine, actions)
    result = state_of(engine), torch.stack(losses), norms
    engine.destroy()
    return result


def loop_of(engine, actions):
    batches = Batches(2, SIZES["tiny"].sequence)
    losses, norms, number = [], [], 0
    for action in actions.replace(" ", ""):
        if action == "b":
            loss = engine(*batches.at(number, engine.device))
            engine.backward(loss)
            losses.append(loss.detach().clone())
            number += 1
        elif action.isdigit():
            engine.set_train_batch_size(int(action) * engine.train_micro_batch_size_per_gpu())
        elif action == "z":
            engine.zero_grad()
            engine.optimizer.zero_grad()
        else:
            engine.step()
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def reads_in_a_window():
    """Return whether the installed DeepSpeed can gather a ZeRO-3 parameter between the micro-batches of a step."""
    # A test needs such a gather to read the training state. DeepSpeed 0.18.6 raises an error: if a module's input needs
    # no gradient, the module's parameters stay marked as in use after backward.
    from deepspeed.runtime.zero import partitioned_param_coordinator as module

    return hasattr(module.PartitionedParameterCoordinator, "release_backward_leftovers")


WHERE = [(1, DEVICE), (2, DEVICE), (3, DEVICE), (2, next(iter(DEVICES)))]


@pytest.mark.parametrize(
    ("stage", "device", "accumulation"), [*((*where, 1) for where in WHERE), *((*where, 2) for where in WHERE[1:3])]
)
def test_loops_that_drop_or_repeat_a_backward(accumulation, stage, device):
    def new():
        return start(stage=stage, accumulation=accumulation)

    loop = LOOP
    if accumulation == 2 and stage == 3 and not reads_in_a_window():
        with pytest.raises(RuntimeError, match="Cannot free a ZeRO-3 parameter"):
            follow(new(), loop)
        loop += " bs"
    assert_same(follow(attached(new(), MIX, device, device_sums=2), loop), follow(new(), loop))


def sums_of(engine, micro_batches=8):
    """Train some micro-batches. Return a list with a copy of all DeepSpeed gradient sums, as a dict, after
    each backward and after each step.
    """
    batches, seen = Batches(2, SIZES["tiny"].sequence), []

    def look():
        shown = engine.optimizer.accumulated_grads_in_cpu
        seen.append({key: shown[key].clone() for key in shown})

    for number in range(micro_batches):
        engine.backward(engine(*batches.at(number, engine.device)))
        look()
        engine.step()
        look()
    engine.destroy()
    return seen


@pytest.mark.parametrize(("stage", "device"), [w for w in WHERE if w[0] < 3])
def test_sums_of_micro_batches_can_be_read_as_stocks_can(stage, device):
    stock = sums_of(start(stage=stage, accumulation=3))
    ours = sums_of(attached(start(stage=stage, accumulation=3), MIX, device, device_sums=2))
    assert [set(sums) for sums in ours] == [set(sums) for sums in stock]
    pairs = list(zip(ours, stock, strict=True))
    assert all(torch.equal(mine[k], its[k]) for mine, its in pairs for k in its)
    # A gradient of a single backward, which ZeRO-1 copies to the host, is no sum.
    assert [len(sums) > 0 for sums in stock] == [stage == 2] * len(stock)
    assert not any(torch.equal(stock[0][k], stock[-1][k]) for k in stock[0])


# Each step ends its window, with any number of backwards, because DeepSpeed does not count them.
UNMANAGED = "bs bbs bz bbz bbs"


@pytest.mark.parametrize(
    ("stage", "device", "micro"), [(s, d, 1) for s, d in WHERE[:3]] + [(s, d, 2) for s, d in WHERE[1:3]]
)
def test_accumulation_that_the_loop_manages(stage, device, micro):
    from deepspeed.runtime import constants

    if not hasattr(constants, "MANAGED_GRADIENT_ACCUMULATION"):
        pytest.skip("this DeepSpeed does not know managed_gradient_accumulation")

    def new():
        unmanaged = {"managed_gradient_accumulation": False}
        return start(stage=stage, accumulation=micro, extra=unmanaged)

    ours = follow(attached(new(), MIX, device, device_sums=2), UNMANAGED)
    assert_same(ours, follow(new(), UNMANAGED))


class Experts(torch.nn.Module):
    """A model with three experts, of which each micro-batch uses those named in ``routes``."""

    def __init__(self, routes):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(256, 32)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 150) for _ in range(3))
        self.back = torch.nn.Linear(150, 256)
        self.routes = routes.split()
        self.number = 0

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        names = self.routes[self.number % len(self.routes)]
        self.number += 1
        x = sum(self.experts[int(name)](x) for name in names)
        logits = self.back(torch.relu(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Experts that the last micro-batch of a window skips, that the first one skips, and that whole windows skip. One expert
# gets its first token in a late last micro-batch, and one never.
ROUTES = "012 012 012 01 12 012 02 12 0 1 12 20 1 012 2 0 2 1 01 0 02 1"
RARE = "0 01 1 0 02 1 012 0 1 0 2 1"


def test_the_gradient_of_what_nobody_uses_is_looked_at_once(monkeypatch):
    looks = []
    before = Windows._leftover

    def counted(self, piece):
        looks.append(id(piece))
        return before(self, piece)

    monkeypatch.setattr(Windows, "_leftover", counted)
    follow(attached(start(model=Experts("0")), ["host"], DEVICE), "bs" * 4)
    assert looks
    assert len(looks) == len(set(looks))


MASTERS_16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


@pytest.mark.parametrize(
    ("loop", "stage"), [("bs" * 22, 1), ("bbs bs bs bbs bs bs bs bbs", 2), ("bs bz bs bbs bz bs bs", 1)]
)
def test_masters_of_16_bits_add_up_in_the_gradient_that_is_applied(loop, stage):
    # DeepSpeed sums gradients in the tensor from which the optimizer reads them. The scaled gradient of an unused
    # parameter stays in this tensor, and the parameter's next gradient is added to it. A plan must do the same.
    def new():
        accumulation = 2 if loop.count("s") > 8 else 1
        return start(model=Experts(ROUTES), accumulation=accumulation, stage=stage, clipping=0.05, extra=MASTERS_16)

    sums = {"subgroup": 10**9, "device_sums": 9}
    ours = follow(attached(new(), ["host"], DEVICE, **sums), loop)
    assert_same(ours, follow(new(), loop))


def test_masters_of_16_bits_show_their_gradient_within_a_window():
    shown = []
    for plan in (False, True):
        engine = start(model=Experts(ROUTES), accumulation=2, stage=2, extra=MASTERS_16)
        if plan:
            attached(engine, ["host"], DEVICE, subgroup=10**9)
        batches = Batches(2, SIZES["tiny"].sequence)
        seen = []
        for number in range(8):
            engine.backward(engine(*batches.at(number, engine.device)))
            seen += [safe_get_full_grad(p) for p in engine.module.parameters()]
            engine.step()
        shown.append(torch.cat([gradient.flatten() for gradient in seen]))
        engine.destroy()
    assert torch.equal(*shown)


def test_sums_in_another_precision_than_the_parameters(monkeypatch):
    # Under ZeRO-1, stock DeepSpeed adds micro-batches in bf16 and keeps the sum in fp16 until the next micro-batch.
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    results = []
    for plan in (False, True):
        engine = start(
            stage=1, accumulation=2, precision="fp16", clipping=0.05, extra={"data_types": {"grad_accum_dtype": "bf16"}}
        )
        if plan:
            attached(engine, MIX, DEVICE, device_sums=2)
        results.append(follow(engine, "bs" * 6 + "bbs" + "bs"))
    assert_same(results[1], results[0])


def with_experts(routes, grad_dtype, stage):
    return start(
        model=Experts(routes),
        accumulation=2,
        subgroup_size=9000,
        stage=stage,
        clipping=0.05,
        extra={"data_types": {"grad_accum_dtype": grad_dtype}},
    )


@functools.cache
def stock_with_experts(routes, grad_dtype, stage):
    return follow(with_experts(routes, grad_dtype, stage), "bs" * len(routes.split()))


@pytest.mark.parametrize(("stage", "device"), WHERE[1:])
@pytest.mark.parametrize(
    ("routes", "grad_dtype", "sums"),
    [(ROUTES, "bf16", 99), (ROUTES, "fp32", 0), (RARE, "bf16", 0), (RARE, "fp32", 99)],
    ids=["often, on the device", "often, fp32", "rare", "rare, fp32, on the device"],
)
def test_experts_that_some_micro_batches_skip(routes, grad_dtype, stage, device, sums):
    # If an expert gets no gradient in a step, stock DeepSpeed applies the expert's gradient from an earlier step once
    # more. ebbtide must do the same.
    engine = with_experts(routes, grad_dtype, stage)
    ours = follow(attached(engine, MIX, device, subgroup=5_000, device_sums=sums), "bs" * len(routes.split()))
    assert_same(ours, stock_with_experts(routes, grad_dtype, stage))


@pytest.mark.parametrize(("stage", "device"), WHERE)
@pytest.mark.parametrize("first", [1, 2])
def test_steps_of_one_micro_batch_before_steps_of_several(stage, device, first):
    # The last micro-batch of the steps of two skips experts that got their only applied gradient in a step of one.
    def new():
        routes = "012 012 012 0 12 1 02 2 012 1"
        return start(model=Experts(routes), accumulation=first, subgroup_size=9000, stage=stage)

    loop = "1 bs bs 2 bsbs bsbs 1 bs bs 2 bsbs"  # DeepSpeed counts micro-batches from the first step on
    assert_same(follow(attached(new(), MIX, device, subgroup=5_000), loop), follow(new(), loop))


@pytest.mark.parametrize(("stage", "device"), WHERE)
def test_no_backward_allocates_host_memory(stage, device, monkeypatch):
    engine = attached(start(stage=stage, accumulation=3), MIX if stage == 3 else ["host", "device"], device)
    session = session_of(engine)
    allocated, inside, allocate = [], [False], type(session.device).host_empty

    def counted(own, elements, dtype):
        allocated.append((inside[0], elements))
        return allocate(own, elements, dtype)

    def backward(loss):
        inside[0] = True
        engine.backward(loss)
        inside[0] = False

    monkeypatch.setattr(type(session.device), "host_empty", counted)
    batches = Batches(2, SIZES["tiny"].sequence)
    for number in range(12):
        if number == 6:
            placements = ["host"] * session.plan.subgroup_count
            switch_plan(engine, session.plan.placed(placements, staging_slots=0, prefetch=0))
        backward(engine(*batches.at(number, engine.device)))
        engine.step()
    assert device == "unified" or any(not during for during, _ in allocated), "some allocation must be counted"
    assert [elements for during, elements in allocated if during] == []
    engine.destroy()
