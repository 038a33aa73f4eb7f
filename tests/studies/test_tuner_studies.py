"""The studies of the search and of the simulator's speed, at a small size."""

import json
import subprocess
import sys

import pytest


def run(study, path, *arguments):
    command = [sys.executable, "-m", f"studies.{study}", "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.slow
def test_optimality(tmp_path):
    found = run("optimality", tmp_path / "o.json", "--pairs", "2", "--few", "4")
    assert len(found["rows"]) == 2
    assert len(found["few_subgroups"]["rows"]) == 4
    assert all(row["gap_pct"] >= -1e-6 for row in found["rows"]), "no plan beats the bound"
    assert 0 <= found["median_gap_pct"] <= found["max_gap_pct"]
    assert {"machine", "versions", "command"} <= found.keys()


@pytest.mark.slow
def test_simulator_speed(tmp_path):
    found = run("simulator_speed", tmp_path / "s.json", "--quick")
    assert found["iterations_per_s"] > 0
    assert set(found["seconds_per_iteration"]) == {"10", "30", "100"}
    assert set(found["wall_seconds_per_iteration"]) == {"10", "30", "100"}
    assert found["max_relative_difference"] <= 1e-9


@pytest.mark.slow
def test_update_phase(tmp_path, deepspeed_ops, child_environment):
    path = tmp_path / "u.json"
    command = [
        sys.executable, "-m", "studies.update_phase", "--json", str(path), "--size", "4m",
        "--steps", "2", "--subgroup", "500000", "--kernel-elements", "100000",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=child_environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["bit_identical"] is True
    assert found["ebbtide_host_bytes_per_param"] == 14.0
    assert found["stock_host_bytes_per_param"] == 18.0
    assert found["kernel_dram_fraction"] > 0


@pytest.mark.slow
def test_interleaving(tmp_path):
    found = run("interleaving", tmp_path / "i.json", "--quick")
    assert found["device_kind"] == "simulated"
    assert found["measured_here"] is None, "nothing is called measured without a GPU"
    for bed in found["testbeds"].values():
        for row in bed["models"]:
            assert row["ebbtide, fused kernel"] <= row["ebbtide, equal kernels"]
            assert row["stride 2"] < row["stock"]
            assert row["stock"] == pytest.approx(row["stock, published"], rel=0.25)
            slow, fast = row["stride 2, as bound"]
            assert fast < row["stride 2"] < slow
            assert row["stride 2, published"] == pytest.approx(fast, rel=0.1)
        strides = [row["iteration_s"] for row in bed["strides"]]
        assert strides == sorted(strides), "the published best stride is 2"
    assert (tmp_path / "i.png").stat().st_size > 10_000
