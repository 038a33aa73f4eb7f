"""The comparison runs end to end on a tiny model; no figure of it is asserted."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_quick(tmp_path, child_environment):
    record = tmp_path / "stall.json"
    done = subprocess.run(
        [sys.executable, "-m", "studies.checkpoint_stall", "--quick", "--folder", str(tmp_path),
         "--writers", "none", "torch", "ebbtide", "--json", str(record)],
        env=child_environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(record.read_text())
    assert found["writers"]["ebbtide"]["last"]["payload_bytes"] > 1_000_000
    assert found["stall_below_synchronous"] > 0
    assert record.with_suffix(".png").stat().st_size > 1000
    assert [p.name for p in tmp_path.iterdir()] in (
        ["stall.json", "stall.png"], ["stall.png", "stall.json"],
    )  # fmt: skip


def test_a_writer_that_cannot_run_is_shown_not_hidden(tmp_path):
    from studies.checkpoint_stall import compare

    writers = {"none": {"failed": "x"}, "torch": {"failed": "no"}, "ebbtide": {"failed": "no"}}
    assert compare(writers, 1e9) == {}


def test_throughput_and_slowdown_over_model_and_interval(tmp_path, child_environment):
    record = tmp_path / "checkpointing.json"
    done = subprocess.run(
        [sys.executable, "-m", "studies.checkpointing", "--quick", "--json", str(record)],
        env=child_environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(record.read_text())
    (row,) = found["measured"]
    assert row["bytes_per_s"] == pytest.approx(row["checkpoint_bytes"] / row["stall_s"])
    rare, often = found["simulated"][-1], found["simulated"][0]
    assert often["interval"] < rare["interval"]
    assert often["slowdown"] > rare["slowdown"] > 0
    assert all(r["slowdown"] < r["blocking_slowdown"] for r in found["simulated"])
    assert record.with_suffix(".png").stat().st_size > 1000
