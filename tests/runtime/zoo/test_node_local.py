"""Tests of ``checkpoint.use_node_local_storage`` in a DeepSpeed config (the Trainer's save_on_each_node).

Training under a plan works with this key. The key is refused only if ebbtide itself is to write checkpoints of a job on
several nodes.
"""

import ebbtide.runtime
import pytest
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.simulator.plan import CheckpointPlan

from tests.runtime.contract.training import assert_same, outcome, plan_for, start, train

LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def under_a_plan(checkpoint=None):
    engine = start(extra=LOCAL)
    return ebbtide.runtime.attach(engine, plan_for(engine, ["host"]), checkpoint=checkpoint)


@pytest.mark.parametrize("nodes", [1, 2])
def test_it_trains_saves_and_resumes(only_rank, nodes, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("ebbtide.runtime.zero.attach.one_node", lambda: nodes == 1)
    expected = outcome(start(), 4)
    saving = under_a_plan()
    first = train(saving, 2)
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=2)
    saving.destroy()
    resumed = under_a_plan()
    resumed.load_checkpoint(str(tmp_path))
    state, losses, norms = outcome(resumed, 2, first=2)
    assert_same((state, losses, first[1] + norms), (expected[0], expected[1][2:], expected[2]))
    assert ("DeepSpeed alone saves and loads checkpoints" in caplog.text) == (nodes == 2)


def test_several_nodes_without_a_common_folder_are_refused_where_checkpoints_are_asked_for(
    only_rank, monkeypatch, tmp_path
):
    for module in ("ebbtide.runtime.zero.attach", "ebbtide.runtime.checkpoint.deepspeed.installation"):
        monkeypatch.setattr(f"{module}.one_node", lambda: False)
    with pytest.raises(CheckpointError, match="use_node_local_storage=true: set it to false"):
        under_a_plan(CheckpointPlan(dir=str(tmp_path), interval_steps=2))


def test_a_node_is_one_where_all_ranks_are_its_own(monkeypatch):
    from ebbtide.runtime.hardware.launcher import one_node

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert one_node()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not one_node()
