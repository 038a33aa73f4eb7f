"""Tests of training under plans with DeepSpeed's C++ CPU optimizer compiled as for other CPUs, such as CPUs
without AVX-512.
"""

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.kernels.rule import NO_VECTORS, UnknownRoundingError

from tests.runtime.contract.test_bits import MIX
from tests.runtime.contract.training import DEVICES, assert_same, attached, outcome, start, train
from tests.runtime.stock_builds import HERE, WIDTHS, RecountingOp, runs_here, stock_op, use_build, use_op

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]


class Odd(torch.nn.Module):
    """A model with 84,314 parameters: 10 more than a multiple of 16, and 2 more than a multiple of 8.

    16 and 8 are the numbers of elements in a vector of AVX-512 and of AVX2.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(256, 13)
        self.widen = torch.nn.Linear(13, 299)
        self.head = torch.nn.Linear(299, 256)

    def forward(self, inputs, targets):
        logits = self.head(torch.relu(self.widen(self.embed(inputs))))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.fixture(params=["avx2", "scalar"])
def build(request, monkeypatch):
    """Make all new engines, of stock DeepSpeed or under a plan, use the given build of DeepSpeed's CPU
    optimizer, for example with AVX2.
    """
    if not runs_here(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    use_build(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_engine(stage, build):
    def new():
        return start(model=Odd(), stage=stage, subgroup_size=9_001, clipping=0.01)

    expected = outcome(new(), 3)
    ours = attached(new(), MIX, DEVICE, None, subgroup=9_001)
    executor = session_of(ours).executor
    assert executor.rule.vector_width == WIDTHS.get(build, NO_VECTORS)
    assert any(s.elements % 16 >= 8 for s in executor.states), (
        "some subgroup must have a tail that the builds compute differently"
    )
    assert_same(outcome(ours, 3), expected)


@pytest.mark.parametrize("older", [False, True])
def test_an_older_deepspeeds_way_of_counting_steps(older, monkeypatch, tmp_path):
    # The training under the plan is resumed from a checkpoint after 5 of 8 steps. Stock DeepSpeed trains all 8 steps in
    # one run. DeepSpeed 0.18.6 counts Adam's steps differently from later versions, so the test runs with both ways of
    # counting.
    op = stock_op("adam", HERE)
    use_op(monkeypatch, RecountingOp(op) if older else op)

    def new():
        return start(model=Odd(), subgroup_size=9_001)

    steps = 8  # after this many steps, powers of beta and their running product differ
    expected = outcome(new(), steps)
    ours = attached(new(), MIX, DEVICE, None, subgroup=9_001)
    assert session_of(ours).executor.rule._bias.recounts is older
    train(ours, 5)
    ours.save_checkpoint(str(tmp_path))
    ours.destroy()
    resumed = attached(new(), MIX, DEVICE, None, subgroup=9_001)
    resumed.load_checkpoint(str(tmp_path))
    state, losses, norms = outcome(resumed, steps - 5, first=5)
    assert_same((state, losses, norms), (expected[0], expected[1][5:], expected[2][5:]))


def test_an_op_that_rounds_in_an_unknown_order_is_refused(monkeypatch):
    engine = start(model=Odd())
    stock = type(engine.optimizer)
    monkeypatch.setattr(engine.optimizer.optimizer, "ds_opt_adam", stock_op("adam", "unfused"))
    with pytest.raises(UnknownRoundingError, match=r"must round like exactly one of the builds .*AVX-512, AVX2"):
        attached(engine, MIX, DEVICE)
    assert type(engine.optimizer) is stock, "the engine must be left unchanged"
    engine.destroy()
