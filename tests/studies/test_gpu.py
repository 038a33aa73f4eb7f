"""The GPU suite's smoke test on the emulated device, so that a GPU's time is not lost on a typo."""

import json
import subprocess
import sys

import pytest
import torch

PARTS = ["kernel_bits", "contract", "machine", "efficiency"]


@pytest.mark.slow
def test_parts_write_their_records_and_say_emulated(tmp_path, deepspeed_ops, child_environment):
    command = [sys.executable, "-m", "studies.gpu", "--out", str(tmp_path), "--device", "emulated",
               "--only", *PARTS]  # fmt: skip
    done = subprocess.run(
        command, env=child_environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "emulated: no GPU figures" in done.stdout
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PARTS}
    assert all(record["device_kind"] == "emulated" for record in found.values())
    assert not [name for name, record in found.items() if record.get("failed")]
    assert found["kernel_bits"]["differing"] == 0
    assert "passed" in found["contract"]["summary"]
    assert found["efficiency"]["row"]["variant"] == "ebbtide"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    command = [sys.executable, "-m", "studies.gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--device emulated" in done.stderr
    assert not list(tmp_path.iterdir())
