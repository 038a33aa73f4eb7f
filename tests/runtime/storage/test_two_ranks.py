"""Tests of two ranks that keep optimizer state on one drive: training has stock DeepSpeed's results, bit for bit.

Each rank has its own file on the drive. The tests load checkpoints of stock DeepSpeed and export checkpoints for
it, change the plan during training, and use a DeepSpeed config for NVMe unchanged. State from another number of
ranks is refused. After a failed drive, training resumes from the last checkpoint before the failure.
"""

import json

import pytest
import torch
from ebbtide.runtime.storage.errors import StorageError

from tests.runtime.contract.training import DEVICES, attached, start, train
from tests.runtime.forked_ranks import launch

LAST = list(DEVICES)[-1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL does not allow two ranks on one GPU")
def test_two_ranks_store_and_resume_with_stocks_bits(deepspeed_ops, tmp_path, only_rank):
    alone = attached(start(), ["stored"], LAST, storage_dir=str(tmp_path / "one"))
    train(alone, 1)
    alone.save_checkpoint(tmp_path / "alone")
    alone.destroy()
    done = launch("tests.runtime.storage.two_ranks_stored", tmp_path)
    for rank in (0, 1):
        told = tmp_path / f"rank{rank}.json"
        assert told.exists(), done.stderr[-3000:]
        assert json.loads(told.read_text()) == {
            "trained": True,
            "adopted": True,
            "resumed": True,
            "gone back": True,
            "imported": True,
            "exported": True,
            "replanned": True,
            "on a drive": True,
            "stored on one": True,
            "refused": True,
            "failed": True,
            "went on": True,
        }
    names = {path.name for path in (tmp_path / "state").glob("*.extents")}
    assert names == {"rank_00000.extents", "rank_00001.extents"}
    before = {path: path.read_bytes() for path in (tmp_path / "state").glob("*.extents")}
    with pytest.raises(StorageError, match=r"world_size = 2 and this run wants 1"):
        attached(start(), ["stored"], LAST, storage_dir=str(tmp_path / "state"))
    assert all(path.read_bytes() == content for path, content in before.items())
