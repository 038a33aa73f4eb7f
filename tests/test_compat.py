"""Tests of `make compat`, which runs tests with other versions of DeepSpeed."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_ops_are_compiled_before_the_tests(tmp_path):
    venv = tmp_path / "1.2.3"
    (venv / "bin").mkdir(parents=True)
    (venv / "ready").touch()
    recorder = venv / "bin" / "python"
    recorder.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    recorder.chmod(0o755)
    environment = os.environ | {"COMPAT_DIR": str(tmp_path), "COMPAT_TESTS": "tests/one.py"}
    subprocess.run(["sh", "scripts/compat.sh", "1.2.3"], env=environment, cwd=ROOT, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "-m studies.bench.deepspeed_ops",
        "-m pytest -q -p no:cacheprovider tests/one.py",
    ]
