"""Tests of early updates (started before the gradient norm is known) in a training engine of plain torch,
without DeepSpeed.

They check which memory an early update may write, and that its result is discarded once its input is written.
"""

import pytest
import torch
from ebbtide.runtime.checkpoint.protocol.inspect import verify

from tests.runtime.contract.test_plain_engine import assert_same, loss_of, model, planned, torch_alone, train
from tests.runtime.contract.training import delays
from tests.runtime.plain_engine import EmulatedTorch, PlainEngine

STEPS = 5


@pytest.fixture(params=["host", "device"])
def placement(request):
    return request.param


def pausing(placement, speculate=99, **settings):
    plan = planned([placement], speculate=speculate, speculate_visits=speculate)
    engine = PlainEngine(model(), plan, EmulatedTorch(), **settings)
    engine.session.executor.gradients.before_op = delays(1, 0.001)
    return engine


def backward(engine, number):
    """Run a backward pass. Return the loss, and the number of subgroups whose early update began before the step."""
    loss = loss_of(engine.model, number)
    engine.backward(loss)
    return loss, len(engine.session.executor.early_updates.begun)


def test_an_early_update_waits_for_the_checkpoint_that_reads_what_it_writes(tmp_path, placement):
    engine = pausing(placement)
    losses = train(engine, 2)
    job = engine.save(tmp_path, "two", bytes_per_s=100_000)
    losses += train(engine, STEPS - 2, 2)
    assert job.wait(60)
    assert job.failure is None
    assert_same(engine, losses, torch_alone(STEPS))
    assert verify(tmp_path, "two") == []
    resumed = pausing(placement, 0)
    resumed.load(tmp_path / "two")
    assert_same(resumed, train(resumed, STEPS - 2, 2), torch_alone(STEPS))


def steps_with_writes(engine):
    """Train with `write` called between backward and step, wait for all updates, and close the training session.

    Return the number of early updates begun before each step, the optimizer state, and the losses.
    """
    losses, begun = [], []
    for number in range(STEPS):
        loss, early = backward(engine, number)
        losses.append(loss)
        begun.append(early)
        write(engine, number)
        engine.step()
    engine.publish()
    state = [[t.clone() for t in engine.saved_state(i)] for i in range(len(engine.groups))]
    engine.session.close()
    return begun, state, torch.stack(losses)


def write(engine, number):
    """Halve a moment of one subgroup in host memory between backward and step, and report the change to the
    runtime's executor.

    An early update of this step has already read the moment. The result of the early update must therefore be
    discarded.
    """
    executor, subgroup = engine.session.executor, number % len(engine.groups)
    executor.wait_state(subgroup)
    executor.wait_under_way()
    executor.states[subgroup].state[1].mul_(0.5)
    executor.state_written([subgroup])


def test_an_early_update_counts_for_nothing_once_state_is_written(placement):
    engine = pausing(placement)
    engine.session.pausing.stepped = lambda right: None  # so that early updates never pause
    begun, state, losses = steps_with_writes(engine)
    assert begun == [len(state)] * STEPS, "each step must begin early updates, whatever became of the last ones"
    _, others, theirs = steps_with_writes(pausing(placement, 0))
    assert all(
        torch.equal(a, b) for mine, other in zip(state, others, strict=True) for a, b in zip(mine, other, strict=True)
    )
    assert torch.equal(losses, theirs)
