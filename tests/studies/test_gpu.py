"""The GPU suite's smoke test on the emulated device, so that a GPU's time is not lost on a typo."""

import json
import subprocess
import sys

import pytest
import torch

PARTS = ["kernel_bits", "contract", "machine", "efficiency", "ablation"]


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
    plotted = subprocess.run(
        [sys.executable, "-m", "studies.gpu", "--plot", str(tmp_path)], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert sorted(plotted.stdout.split()) == [
        str(tmp_path / f"{part}.png") for part in ("ablation", "efficiency")
    ]
    assert (tmp_path / "ablation.png").stat().st_size > 5000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    command = [sys.executable, "-m", "studies.gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--device emulated" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --out DIR and --plot DIR must be given"),
        (["--out", "x", "--model-b", "2.5"], "--size (or --model-b) must be one of"),
        (["--out", "x", "--minutes", "0"], "--minutes must be > 0, but got 0.0"),
        (["--plot", "/nonexistent"], "--plot must be a folder with records of studies.gpu"),
    ],
)
def test_bad_input_is_told(arguments, message):
    command = [sys.executable, "-m", "studies.gpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr


def test_no_part_runs_beyond_the_time_that_is_given(tmp_path):
    import time

    from studies.gpu.parts import kernel_bits
    from studies.gpu.suite import OutOfTimeError, Suite

    late = Suite(tmp_path, "tiny", 1.0, 20_000, emulated=True, deadline_s=time.monotonic())
    with pytest.raises(OutOfTimeError, match="--minutes"):
        late.left_s()
    assert late.trial("stock", "--variant", "stock")["failed"] == "out of time (--minutes)"
    stopped = kernel_bits(late)
    assert stopped["values"] == 0
    assert stopped["correct"] is False, "nothing was compared"
