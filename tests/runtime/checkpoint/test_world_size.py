"""Tests of checkpoints that two ranks save: at a load each rank gets its own state back, and one rank
alone can resume from such a checkpoint.
"""

import json
from argparse import Namespace

import pytest
import torch

from studies.bench.bits import differences, state_of
from tests.runtime.contract.training import DEVICES, attached, start, train
from tests.runtime.forked_ranks import launch

STAGES = (3, 2)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL: one rank per GPU")]


@pytest.fixture(scope="module")
def saved(deepspeed_ops, tmp_path_factory):
    """Save checkpoints with two ranks for all ZeRO stages in one launch. Return a dict from stage to folder."""
    folder = tmp_path_factory.mktemp("two_ranks")
    for stage in STAGES:
        (folder / f"stage{stage}").mkdir()
    two_ranks(folder)
    return {stage: folder / f"stage{stage}" for stage in STAGES}


def two_ranks(folder):
    done = launch("tests.runtime.checkpoint.two_rank_run", folder)
    assert done.returncode == 0, done.stderr[-3000:]


def to_universal(source, target, stage):
    """Convert a checkpoint to DeepSpeed's universal format, which any number of ranks can load. The conversion is
    done by DeepSpeed's own script.

    Below ZeRO-3 the script requires the entry ``universal_checkpoint_info``, which DeepSpeed expects the
    training script to save. The option ``inject_missing_state`` adds this entry.
    """
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=stage < 3,
        )
    )


def gone_on(folder, stage, *, plan):
    """Load a universal checkpoint on one rank, and train three steps. Return the state right after the load,
    and the losses of the three steps.
    """
    engine = start(stage=stage, extra={"checkpoint": {"load_universal": True}})
    if plan:
        attached(engine, ["device", "host", "resident"], list(DEVICES)[-1])
    path, _ = engine.load_checkpoint(str(folder), tag="universal")
    assert path is not None
    if not plan and stage < 3:
        engine.optimizer._hp_optimizer_states_linked = False  # the state after DeepSpeed's first step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    loaded = state_of(engine)
    losses, _ = train(engine, 3)
    engine.destroy()
    return loaded, torch.stack(losses)


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks(only_rank, saved, stage):
    folder = saved[stage]
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(rank["draws_alike"] for rank in told)
    assert told[0]["draws"] != told[1]["draws"], "each rank must have its own random generators"
    assert all(rank["apart_as_stock"] for rank in told), told
    assert {"latest", "rank0", "rank1"} < set(told[0]["apart"])
    assert (folder / "apart" / "latest").read_text() == "rank0"
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step3"
    to_universal(checkpoints / "global_step3", checkpoints / "universal", stage)
    expected = torch.load(folder / "state.pt", weights_only=True)
    stock, stock_losses = gone_on(checkpoints, stage, plan=False)
    ours, our_losses = gone_on(checkpoints, stage, plan=True)
    assert differences(stock, expected) == ()
    assert differences(ours, expected) == ()
    assert torch.equal(our_losses, stock_losses)
