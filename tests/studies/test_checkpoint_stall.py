"""Tests that the study of checkpoint stalls runs from start to end on a tiny model. The measured stalls are not
checked.
"""

import json

import pytest

from tests import prepared
from tests.conftest import without_a_rank

pytestmark = pytest.mark.slow

# One process, which forks one child for each writer. The test process cannot fork, because it has threads.
SCRIPT = """
import sys
from studies import checkpoint_stall
from studies.bench.many_engines import freeze_heap
from studies.checkpoints.interval_run import warm_up

warm_up()
freeze_heap()  # otherwise each fork's collections visit and copy all modules
folder = sys.argv[1]
status = checkpoint_stall.main(
    ["--quick", "--folder", folder, "--writers", "none", "torch", "ebbtide",
     "--json", f"{folder}/stall.json"]
)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory, deepspeed_ops):
    folder = tmp_path_factory.mktemp("compared")
    done = prepared.run(["-c", SCRIPT, folder], env=without_a_rank())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_quick(compared):
    found = json.loads((compared / "stall.json").read_text())
    assert found["writers"]["ebbtide"]["last"]["payload_bytes"] > 1_000_000
    assert found["stall_below_synchronous"] > 0
    assert [path.name for path in compared.iterdir()] == ["stall.json"]


def test_a_writer_that_cannot_run_is_shown_not_hidden(tmp_path):
    from studies.checkpoint_stall import compare

    writers = {"none": {"failed": "x"}, "torch": {"failed": "no"}, "ebbtide": {"failed": "no"}}
    assert compare(writers, 1e9) == {}
