"""Tests of the study of the interval between checkpoints.

Its predictions are checked in small cases. A quick run on a tiny model kills training for real. In the results of this
run, no other rule for the interval may have a higher predicted goodput than ebbtide's.
"""

import json
import math

import pytest
from ebbtide.simulator.analysis.goodput import CheckpointCost, Failures

from studies.checkpoint_interval import __main__ as study
from studies.checkpoint_interval import kills
from tests import prepared

COST = CheckpointCost(0.1, 0.1, 0.5, 0.0, 0.0, 0.0, 0)


def test_useful_steps_are_those_that_were_committed():
    # 1 s to restart, 10 steps and 0.2 s of cost per interval, and durable 0.5 s later.
    assert kills.useful_steps(1.0 + 10.2 + 0.4, 10, 1.0, 1.0, COST) == 0
    assert kills.useful_steps(1.0 + 10.2 + 0.6, 10, 1.0, 1.0, COST) == 10
    assert kills.useful_steps(1.0 + 5 * 10.2 + 0.6, 10, 1.0, 1.0, COST) == 50
    assert kills.useful_steps(0.5, 10, 1.0, 1.0, COST) == 0


def test_predicted_kills_come_to_the_long_run_s_goodput():
    gaps = kills.failure_gaps(100.0, 20_000, seed=0)
    assert sum(gaps) / len(gaps) == pytest.approx(100.0, rel=1e-3)
    useful = sum(kills.useful_steps(gap, 7, 1.0, 3.0, COST) for gap in gaps)
    expected = kills.goodput_at(7, 1.0, COST, Failures(100.0, 3.0))
    assert useful / sum(gaps) == pytest.approx(expected, rel=0.01)


def test_all_intervals_meet_the_same_failures():
    assert kills.failure_gaps(20.0, 5, seed=1) == kills.failure_gaps(20.0, 5, seed=1)
    assert sorted(kills.failure_gaps(20.0, 5, seed=1)) == sorted(kills.failure_gaps(20.0, 5, 2))


def test_a_short_interval_waits_for_the_disk():
    slow = CheckpointCost(0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0)
    every_step = kills.goodput_at(1, 1.0, slow, Failures(1e9, 0.0))
    assert every_step == pytest.approx(1 / 5, rel=1e-3)
    assert math.isclose(kills.goodput_at(5, 1.0, slow, Failures(1e9, 0.0)), 1.0, rel_tol=1e-3)


@pytest.mark.slow
def test_the_study_runs_kills_and_records(tmp_path, child_environment):
    path = tmp_path / "interval.json"
    # In another process, because the study forks, which a process that has used OpenMP threads must not do.
    command = ["-m", "studies.checkpoint_interval", "--json", path, "--quick", "--mtbf", "4", "--folder", tmp_path]
    done = prepared.run(command, env={**child_environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    left = {item.name for item in tmp_path.iterdir()}
    assert left == {"interval.json"}  # the checkpoints are deleted
    assert found["kills"] == 1 == len(found["measured"])
    row = found["measured"][0]
    reached = row["failures"][0]["reached_step"]
    # A checkpoint may be committed just before its step is noted.
    assert reached is None or row["useful_steps"] <= reached + 1
    rules = found["predicted"]["rules"]
    assert set(rules) == {"ebbtide", "Young", "Daly", "CheckFreq"}
    assert all(r["goodput"] <= rules["ebbtide"]["goodput"] + 1e-9 for r in rules.values())


@pytest.mark.parametrize("bad", [["--mtbf", "0"], ["--mtbf", "nan"], ["--failures", "0"]])
def test_bad_figures_are_refused(tmp_path, bad, capsys):
    with pytest.raises(SystemExit):
        study.main(["--json", str(tmp_path / "x.json"), *bad])
    assert "--mtbf must be > 0" in capsys.readouterr().err
