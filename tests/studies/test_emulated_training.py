"""The two studies that execute plans at given rates, small: real bits, figures that add up."""

import json
import subprocess
import sys

import pytest


def run(study, path, environment, *arguments):
    command = [sys.executable, "-m", f"studies.{study}", "--json", str(path), "--quick", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.slow
def test_overlap(tmp_path, deepspeed_ops, child_environment):
    found = run("overlap", tmp_path / "o.json", child_environment, "--steps", "2")
    assert found["bit_identical"] is True
    assert found["device_kind"] == "emulated"
    names = {row["name"] for row in found["rows"]}
    assert {"ebbtide", "stride 2", "all on the host"} <= names
    # No machine executes a plan faster than the floor of the times that are given.
    assert all(row["over_floor"] >= 1 - 1e-6 for row in found["rows"])
    assert found["iteration_over_floor"] == found["rows"][0]["over_floor"]
    assert (tmp_path / "o.trace.json").exists()


@pytest.mark.slow
def test_fidelity(tmp_path, deepspeed_ops, child_environment):
    found = run("fidelity", tmp_path / "f.json", child_environment, "--plans", "2", "--steps", "2")
    assert found["bit_identical"] is True
    assert found["device_kind"] == "emulated"
    assert len(found["rows"]) == 2
    assert found["rows"][0] != found["rows"][1], "two plans were drawn"
    assert (tmp_path / "f.png").stat().st_size > 5000
