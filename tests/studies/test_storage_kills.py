"""Tests of the study that kills training with optimizer state on a drive: a few SIGKILLs lose no committed
step, and a broken store of state is detected.
"""

import json

import pytest

from tests import prepared

pytestmark = pytest.mark.slow

BROKEN = """
import sys
from ebbtide.runtime.storage.store import ExtentStore
from studies.storage_kills import __main__ as command

def careless(self, subgroup):  # the extent that the newest step names
    self._progress.raise_failure()
    return 0

ExtentStore._free_extent = careless
command.LIMIT_S = 10.0  # a run that reads what was written over may wait for ever
sys.exit(command.main(["--kills", "5", "--json", sys.argv[1]]))
"""


def run(command, folder, child_environment):
    record = folder / "kills.json"
    environment = {**child_environment, "OMP_NUM_THREADS": "1"}
    done = prepared.run([*command, record], cwd=folder, env=environment, timeout=200)
    assert record.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return done.returncode, json.loads(record.read_text())


def test_kills(tmp_path, child_environment):
    command = ["-m", "studies.storage_kills", "--kills", "8", "--json"]
    code, found = run(command, tmp_path, child_environment)
    assert found["fired"] == found["kills"] == 8
    assert (found["lost"], found["torn"], found["not_bit_identical"]) == (0, 0, 0), found
    assert found["steps_lost_max"] <= 1
    assert set(found["kills_by_point"]) == {
        "extents_synced",
        "steps_written",
        "steps_renamed",
        "steps_committed",
        "write",
        "random moment",
    }
    assert found["resumed_from_a_step"] > 0
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kills.json"]


def test_a_store_that_writes_over_committed_extents_is_found(tmp_path, child_environment):
    code, found = run(["-c", BROKEN], tmp_path, child_environment)
    assert found["torn"] > 0
    assert code == 1
