"""Tests that the two studies of checkpoint stalls run from start to end on a tiny model. The measured
stalls are not checked.
"""

import json

import pytest

from tests import prepared
from tests.conftest import without_a_rank

pytestmark = pytest.mark.slow

# One process, which forks one child for each writer. The test process cannot fork, because it has threads.
BOTH = """
import sys
from studies import checkpoint_stall, checkpointing
from studies.bench.many_engines import freeze_heap
from studies.checkpoints.interval_run import warm_up

warm_up()
freeze_heap()  # otherwise each fork's collections visit and copy all modules
folder = sys.argv[1]
status = checkpoint_stall.main(
    ["--quick", "--folder", folder, "--writers", "none", "torch", "ebbtide",
     "--json", f"{folder}/stall.json"]
)
sys.argv[1:] = ["--quick", "--json", f"{folder}/checkpointing.json"]
checkpointing.main()
sys.exit(status)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory, deepspeed_ops):
    """Run the studies `studies.checkpoint_stall` and `studies.checkpointing`. Return the folder with their results
    (JSON files) and plots.
    """
    folder = tmp_path_factory.mktemp("compared")
    done = prepared.run(["-c", BOTH, folder], env=without_a_rank())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_quick(compared):
    found = json.loads((compared / "stall.json").read_text())
    assert found["writers"]["ebbtide"]["last"]["payload_bytes"] > 1_000_000
    assert found["stall_below_synchronous"] > 0
    left = {path.name for path in compared.iterdir()}
    assert left == {"stall.json", "checkpointing.json"}


def test_a_writer_that_cannot_run_is_shown_not_hidden(tmp_path):
    from studies.checkpoint_stall import compare

    writers = {"none": {"failed": "x"}, "torch": {"failed": "no"}, "ebbtide": {"failed": "no"}}
    assert compare(writers, 1e9) == {}


def test_throughput_and_slowdown_over_model_and_interval(compared):
    found = json.loads((compared / "checkpointing.json").read_text())
    (row,) = found["measured"]
    assert row["bytes_per_s"] == pytest.approx(row["checkpoint_bytes"] / row["stall_s"])
    rare, often = found["simulated"][-1], found["simulated"][0]
    assert often["interval"] < rare["interval"]
    assert often["slowdown"] > rare["slowdown"] > 0
    assert all(r["slowdown"] < r["blocking_slowdown"] for r in found["simulated"])
