"""Tests that DeepSpeed hands gradients to ebbtide when the simulator says: when a later gradient does not fit into its
bucket.
"""

import random
from itertools import product

import ebbtide.runtime
import pytest
import torch
from deepspeed import comm
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.simulator import Layer, Workload
from ebbtide.simulator.schedules.buckets import leavings
from torch import nn

from tests.runtime.contract.training import plan_for, start

WIDTH = 8
HANDED_OVER = {3: "partition_grads", 2: "copy_grads_in_partition"}


class Block(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, columns) * 0.1)

    def forward(self, x):
        return x + (x @ self.weight).mean(-1, keepdim=True)


class Model(nn.Module):
    """A model in which each block has one parameter, so that backward computes one gradient per layer."""

    def __init__(self, columns):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, columns))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def handed_over(stage, columns, bucket):
    """Train two steps under a plan, and record in which order DeepSpeed hands over gradients in the second step.

    Return a list with one pair for each gradient in this order: the gradient's layer, and the layer whose gradient
    backward had computed last by then.
    """
    engine = start(Model(columns), stage=stage, reduce_bucket_size=bucket, subgroup_size=10 * WIDTH)
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"], 10 * WIDTH))
    layers = {id(block.weight): number for number, block in enumerate(engine.module.blocks)}
    optimizer, made, found = engine.optimizer, [], []
    compute, hand_over = optimizer.reduce_ready_partitions_and_remove_grads, getattr(optimizer, HANDED_OVER[stage])

    def computed(param, *args):
        made.append(layers[id(param)])
        compute(param, *args)

    def handed(params, *args, **kwargs):
        some = [params] if stage == 2 else params
        found.extend((layers[id(param)], made[-1]) for param in some)
        return hand_over(params, *args, **kwargs)

    optimizer.reduce_ready_partitions_and_remove_grads = computed
    setattr(optimizer, HANDED_OVER[stage], handed)
    for _ in range(2):
        found.clear()
        engine.backward(engine(torch.randn(2, WIDTH).bfloat16()))
        engine.step()
    assert session_of(engine).engine.bucket_params() == bucket
    engine.destroy()
    return found


def simulated(stage, columns, bucket):
    layers = tuple(Layer(params=WIDTH * n, forward_s=1.0, backward_s=1.0) for n in columns)
    sizes = tuple(WIDTH * n for n in columns)
    work = Workload(name="w", layers=layers, subgroups=(sum(sizes),), parameters=(sizes,), zero_stage=stage)
    found = leavings(work, bucket)
    return [(left.layer, at) for at in reversed(range(len(found))) for left in found[at]]


@pytest.mark.parametrize(
    ("stage", "size"), [*product((2, 3), ("the largest", "a third", "all")), (3, "less than the largest")]
)
def test_gradients_leave_when_the_next_one_does_not_fit(only_rank, stage, size):
    rng = random.Random(size)
    columns = [rng.randint(1, 9) for _ in range(7)]
    sizes = {"the largest": max(columns), "a third": sum(columns) // 3, "all": sum(columns)}
    bucket = WIDTH * sizes.get(size, max(columns) // 2)
    found = handed_over(stage, columns, bucket)
    # A gradient that is larger than the bucket is sent alone, but not before the next one arrives.
    assert found == simulated(stage, columns, bucket)
    assert {layer for layer, _ in found} == set(range(7))


def test_a_bucket_of_one_layer_holds_each_gradient_for_one_layer(only_rank):
    assert handed_over(3, [5] * 4, 5 * WIDTH) == [(3, 2), (2, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 1), (2, 2)])
def test_one_rank_reduces_nothing_and_copies_each_layer_once(only_rank, monkeypatch, stage, accumulation):
    model, block = Model([]), WIDTH * (WIDTH + 1)
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))  # two parameters each
    held = 4 if accumulation == 1 else 2  # layers in a bucket
    engine = start(model, stage=stage, reduce_bucket_size=held * block, accumulation=accumulation)
    ebbtide.runtime.attach(engine, plan_for(engine, ["host"], 2 * block), device=EmulatedDevice())
    optimizer, buffers, gradients, collectives = engine.optimizer, set(), [], []
    copies, take = session_of(engine).executor.gradients, optimizer._take

    def taken(reduced):
        (bucket,) = optimizer.ipg_buckets.values()
        buffers.update(buffer.untyped_storage().nbytes() for buffer in bucket.buffer)
        gradients.append(sum(param.grad is not None for param in model.parameters()))
        take(reduced)

    optimizer._take = taken
    for _ in range(2 * accumulation):
        copies.take_parts()
        gradients.clear()
        loss = engine(torch.randn(2, WIDTH).bfloat16())
        with monkeypatch.context() as patched:
            patched.setattr(comm, "reduce", lambda *_, **__: collectives.append("reduce"))
            patched.setattr(comm, "all_reduce", lambda *_, **__: collectives.append("all_reduce"))
            engine.backward(loss)
        if accumulation == 1:  # else each sum of a parameter is fetched and sent back by itself
            sent = [op.subgroup for op, _ in copies.take_parts()]
            assert (sent if stage == 2 else sorted(sent, reverse=True)) == [1, 1, 0, 0], "the order of backward"
        if stage == 2:
            assert max(gradients) <= 2 * held + 1, "gradients stay after their bucket"
        assert buffers == {2}, "a bucket takes more memory than one element"
        assert not collectives
        engine.step()
    engine.destroy()
