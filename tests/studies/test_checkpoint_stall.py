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
