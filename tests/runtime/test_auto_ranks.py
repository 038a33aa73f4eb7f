"""Tests of ``plan="auto"`` on two real ranks: both have the same plan, each has cores of its own, and the
plan keeps to the memory of their container.
"""

import json
import os

import pytest
import torch
from ebbtide.simulator.limits import UNKNOWN_MARGIN

from tests.runtime.forked_ranks import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks' devices are emulated")


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_come_to_one_plan(deepspeed_ops, tmp_path, stage):
    done = launch("tests.runtime.auto_two_ranks", tmp_path, stage)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for key in ("ways", "order", "expected_s"):
        assert first[key] == second[key], key
    assert first["agreed"] == pytest.approx(second["agreed"])
    assert first["agreed"][:2] == [2, 1], "ranks of the node, nodes"
    assert any(way[0] != "host" for way in first["ways"]), "a plan was made"
    # Every step clips. Four steps were counted before the plan was made, beside sixteen assumed ones.
    assert first["clip_rate"] == second["clip_rate"] == pytest.approx((4 + 1.6) / 20)
    assert first["steps"] == 6
    ((ranks, clip_rate, host_bytes),) = first["asked"]
    assert second["asked"] == [], "rank 0 plans for both"
    assert (first["told"], second["told"]) == (1, 0), "rank 0 names a faster setting"
    assert (ranks, clip_rate) == (2, first["clip_rate"])
    assert host_bytes == int(2**29 - UNKNOWN_MARGIN * 2**30) // 2, "of the container, for each of two ranks"
    assert first["finite"]
    assert second["finite"]
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        assert not {*first["cores"]} & {*second["cores"]}
        assert len(first["cores"]) == len(second["cores"])
