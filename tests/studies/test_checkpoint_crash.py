"""Tests of the study of crashes during checkpoint saves: real training is killed with SIGKILL, resumed,
and compared bit for bit.

Only a few kills are made here. The fast replay (tests/runtime/checkpoint/test_crash_replay.py) covers
every named point of a save, and the study's option `--kills` makes more kills.
"""

import json

import pytest

from tests import prepared

pytestmark = pytest.mark.slow


def test_kills(tmp_path, child_environment):
    record = tmp_path / "crash.json"
    command = ["-m", "studies.checkpoint_crash", "--kills", "3", "--json", record]
    done = prepared.run(command, env={**child_environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(record.read_text())
    assert found["fired"] == found["kills"] == 3
    assert found["lost_committed"] == found["torn_visible"] == found["not_bit_identical"] == 0
    assert set(found["kills_by_ranks"]) == {"1", "2"}
    assert found["kills_by_homes"] == {"no plan": 2, "host": 1}
    assert found["resumed_from_a_checkpoint"] > 0
    assert {"machine", "versions", "command"} <= set(found)


def test_every_named_point_comes_up():
    from itertools import islice

    from studies.bench.killed import POINTS, RARE_POINTS, STEP_POINTS, STORED_POINTS
    from studies.checkpoint_crash.__main__ import TRAINED, kills

    planned = list(islice(kills(0), 600))
    for homes in TRAINED:
        stored = (*STORED_POINTS, *STEP_POINTS) if homes == "stored" else ()
        assert {1, 2} == {ranks for _, ranks, trained in planned if trained == homes}
        points = {kill.point for kill, _, trained in planned if trained == homes}
        assert points == {"", *POINTS, *RARE_POINTS, *stored}
