"""Tests of the study that kills a Trainer or a training loop while it saves and rotates checkpoints, and then
restarts it: no checkpoint is lost.
"""

import json

import pytest

from tests import prepared

pytestmark = pytest.mark.slow


def test_kills(tmp_path, child_environment, deepspeed_ops):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    record = tmp_path / "front_door.json"
    command = ["-m", "studies.front_door_kills", "--kills", "4", "--scripts", "trainer", "loop", "--json", record]
    done = prepared.run(command, env={**child_environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(record.read_text())
    assert found["resumed"] > 0
    assert found["fired"] == 4
    assert found["by_kill"] == {"on_save": 2, "rotation": 2, "random": 0}
    assert found["lost"] == found["older_than_stock"] == found["not_bit_identical"] == 0
    assert {"machine", "versions", "command"} <= set(found)


def test_kinds_of_kills_and_limits_come_up():
    from studies.front_door_kills.__main__ import KINDS, planned
    from studies.front_door_kills.scripts import SCRIPTS

    kills = planned(30, 0, list(SCRIPTS))
    assert {script.name for script, _ in kills} == set(SCRIPTS)
    assert {(kill.point, script.limit) for script, kill in kills if script.name == "trainer"} == {
        (kind, limit) for kind in KINDS for limit in (1, 2)
    }
