"""A test of training under a plan on two ranks, which communicate through gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

from tests.runtime.stock_builds import runs_here, stock_op

SCRIPT = Path(__file__).with_name("two_ranks.py")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL takes no two ranks on one GPU")
DEADLINE_S = 400  # a hang would run into it; compiling on a fresh machine does not


def launch(folder, environment):
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
        str(SCRIPT),
        str(folder),
    ]
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    finally:
        remove_shared_buffers(port)


@pytest.mark.slow
def test_two_ranks_have_stocks_bits_and_one_that_fails_takes_the_other_with_it(
    deepspeed_ops, tmp_path, child_environment
):
    with_avx2 = runs_here("avx2")
    if with_avx2:
        stock_op("adam", "avx2")  # built once, not by both ranks at once
    done = launch(tmp_path, child_environment)  # a hang would run into the deadline
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        assert path.exists(), done.stderr[-3000:]
        found = json.loads(path.read_text())
        assert len(found) == 15 + 1 + 4 + 4 + 2 + 3 + 2 + 2 * with_avx2  # of them 4 are of pieces
        assert all(found.values()), found
    assert done.returncode != 0
    assert "planted on rank 1" in done.stderr
    assert not list(tmp_path.glob("trained*.json"))
