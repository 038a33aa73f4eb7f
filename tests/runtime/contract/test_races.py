"""Tests that force orders of concurrent ops that once gave wrong results, hung, or wrote to freed memory."""

import threading
import time

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.simulator.schedule import OpKind

from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.test_bits import EVERY_PASS
from tests.runtime.contract.training import DEVICES, EMULATED, assert_same, attached, outcome, start, train

pytestmark = pytest.mark.usefixtures("only_rank")


def late(kind, subgroup, by_s=0.1):
    """Return a function that delays one op of the runtime's executor, so that the training loop gets steps
    ahead of this op.
    """
    return lambda op: time.sleep(by_s) if (op.kind, op.subgroup) == (kind, subgroup) else None


class Rare(torch.nn.Module):
    """A model whose last layer is used in the first three batches only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(256, 64)
        self.back = torch.nn.Linear(64, 256)
        self.rare = torch.nn.Linear(64, 256)
        self.number = 0

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        logits = self.back(x)
        if self.number < 3:
            logits = logits + self.rare(x)
        self.number += 1
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("placement", ["host", "device", "resident"])
def test_an_unused_parameters_gradient_is_not_scaled_under_its_update(device, placement):
    # If a step does not use a parameter, stock DeepSpeed scales the parameter's old gradient again and applies it.
    # Normally the gather of a parameter in forward waits for the previous update, but an unused parameter is not
    # gathered.
    def new():
        return start(model=Rare(), clipping=0.05, subgroup_size=9000)

    expected = outcome(new(), 8)
    ours = attached(new(), [placement], device, seed=None)
    executor = session_of(ours).executor
    kind = OpKind.UPDATE_HOST if placement == "host" else OpKind.UPDATE_DEVICE
    executor.gradients.before_op = late(kind, len(executor.states) - 1)
    assert_same(outcome(ours, 8), expected)


@pytest.mark.skipif(not EMULATED, reason="on a GPU, hooks run when the forward is issued")
@pytest.mark.parametrize("location", ["host", "device"])
def test_a_gather_ahead_waits_for_no_update_and_is_not_dropped(location):
    # In this test the updates end only after the first module's forward. A prefetch that waited for them would block
    # this forward.
    config = {**EVERY_PASS, "stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**9}
    ours = attached(start(**config), ["host"], list(DEVICES)[-1], seed=None, locations=[location])
    train(ours, 3)
    batch = Batches(2, SIZES["tiny"].sequence).at(3, ours.device)
    executor, first = session_of(ours).executor, ours.module.bytes_in
    subgroup_of = ours.optimizer._gathers.partitions.subgroup_of
    at_once = {subgroup_of[p.ds_id] for p in first.parameters()}
    first_has_run, asked_for = threading.Event(), []

    def hold_back(op):
        if op.kind == OpKind.UPDATE_HOST and op.subgroup not in at_once:
            assert first_has_run.wait(20.0), "the first module waited for this update"

    def note(*_):
        asked_for.extend(p for p in ours.module.parameters() if p.ds_status.name == "INFLIGHT")
        first_has_run.set()

    ours.backward(ours(*batch))
    executor.gradients.before_op = hold_back
    ours.step()
    hook = first.register_forward_hook(note)
    ours(*batch)
    hook.remove()
    ahead = {subgroup_of[p.ds_id] for p in asked_for} - at_once
    assert bool(ahead) == (location == "host"), "some parameters must be requested ahead"
    ours.destroy()
