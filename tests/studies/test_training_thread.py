"""A test of the study of the training thread's time, with a model of ten layers."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_plan_takes_measured_time_and_has_deepspeeds_bits(tmp_path, child_environment):
    out = tmp_path / "thread.json"
    command = [sys.executable, "-m", "studies.training_thread", "--json", str(out)]
    command += [
        "--turns",
        "1",
        "--iterations",
        "3",
        "--layers",
        "10",
        "--variants",
        "stock",
        "mixed",
        "ebbtide",
        "fetched",
    ]
    done = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["bit_identical"] is True
    (model,) = found["by_parameters"].values()
    assert found["ebbtide_over_stock"] == model["variants"]["ebbtide"]["total_ms"] / found["stock_ms"]
    assert found["fetched_over_stock"] > 0
    assert all(row["forward_ms"] > 0 for row in model["variants"].values())
    rows = model["variants"]
    for variant, phases in model["phases_over_stock"].items():
        assert phases == {name: rows[variant][f"{name}_ms"] / rows["stock"][f"{name}_ms"] for name in phases}
    assert set(model["phases_over_stock"]) == {"mixed", "ebbtide", "fetched"}
