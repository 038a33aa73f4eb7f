"""A test of training under a plan together with DeepSpeed's own activation checkpointing, which moves
activations to host memory.
"""

from dataclasses import replace

import pytest

from studies.bench import byte_gpt
from tests.runtime.contract.training import DEVICES, SUBGROUP, assert_same, attached, outcome, start

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture
def offloaded(monkeypatch):
    """Turn on DeepSpeed's activation checkpointing, with activations partitioned and in host memory. Return a list
    that gets one entry per checkpointed block.

    The activations must be partitioned, because without a GPU, DeepSpeed's code for unpartitioned activations
    empties the tensors before it reads them.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    calls = []

    def checkpoint(block, *inputs, use_reentrant):
        calls.append(use_reentrant)
        return checkpointing.checkpoint(block, *inputs)

    for name in ("CPU_CHECKPOINT", "PARTITION_ACTIVATIONS"):
        monkeypatch.setattr(checkpointing, name, True)
    monkeypatch.setattr(byte_gpt, "checkpoint", checkpoint)
    return calls


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_beside_activations_in_host_memory_has_stocks_bits(device, offloaded):
    def engine():
        size = replace(byte_gpt.SIZES["tiny"], checkpoint_activations=True)
        section = {"cpu_checkpointing": True, "partition_activations": True}
        return start(byte_gpt.ByteGPT(size), extra={"activation_checkpointing": section})

    stock = outcome(engine())
    assert offloaded, "DeepSpeed's activation checkpointing must run"
    ours = attached(engine(), ["host", "device", "resident"], device, subgroup=SUBGROUP)
    assert_same(outcome(ours), stock)
