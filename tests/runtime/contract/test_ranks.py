"""A test of training under a plan on two ranks, which communicate through gloo."""

import json

import pytest
import torch

from tests.runtime.forked_ranks import launch
from tests.runtime.stock_builds import runs_here, stock_op

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL takes no two ranks on one GPU")


@pytest.mark.slow
def test_two_ranks_have_stocks_bits_and_one_that_fails_takes_the_other_with_it(deepspeed_ops, tmp_path):
    with_avx2 = runs_here("avx2")
    if with_avx2:
        stock_op("adam", "avx2")  # built once here, and not by both ranks at the same time
    done = launch("tests.runtime.contract.two_ranks", tmp_path)  # a process that hangs would reach its time limit
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        assert path.exists(), done.stderr[-3000:]
        found = json.loads(path.read_text())
        assert len(found) == 25 + with_avx2
        assert all(found.values()), found
    assert done.returncode != 0
    assert "planted on rank 1" in done.stderr
    assert not list(tmp_path.glob("trained*.json"))


SCRIPTS = 4
# In its first forward, a small parameter is read from another module than its own.
FIRST_FORWARD = 111


@pytest.mark.slow
def test_random_scripts_on_two_ranks_see_stocks_values(deepspeed_ops, tmp_path):
    done = launch("tests.runtime.contract.rank_scripts", tmp_path, "0", str(SCRIPTS), str(FIRST_FORWARD))
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"scripts{rank}.json").read_text()) == {}
