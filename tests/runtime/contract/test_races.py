"""Interleavings that once gave other bits, hung or wrote to memory given away: each forced here."""

import time

import pytest
import torch

from simulator.schedule import OpKind
from tests.runtime.contract.training import DEVICES, assert_same, attached, outcome, start

pytestmark = pytest.mark.usefixtures("only_rank")


def late(kind, subgroup, by_s=0.1):
    """Holds this one op back, so that the training loop is steps ahead of it."""
    return lambda op: time.sleep(by_s) if (op.kind, op.subgroup) == (kind, subgroup) else None


class Rare(torch.nn.Module):
    """Its last parameters are used in the first three batches only."""

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
    """Nobody gathers what goes unused, so that nothing waits for its update before the next step
    scales the gradient that stock would apply again.
    """

    def new():
        return start(model=Rare(), clipping=0.05, subgroup_size=9000)

    expected = outcome(new(), 8)
    ours = attached(new(), [placement], device, seed=None)
    executor = ours.optimizer._ebbtide.executor
    kind = OpKind.UPDATE_HOST if placement == "host" else OpKind.UPDATE_DEVICE
    executor.before_op = late(kind, len(executor.states) - 1)
    assert_same(outcome(ours, 8), expected)
