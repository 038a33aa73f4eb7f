"""Tests of ebbtide's wheel, installed into an environment of its own with no checkout near it."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Saves seconds per process. The folder holds no module of ebbtide.
CHEAP_START = str(ROOT / "tests" / "cheap_start")


@pytest.mark.slow
def test_the_wheel_plans_trains_and_serves(deepspeed_ops, child_environment, tmp_path):
    # The script still compiles one kernel of the wheel. Compiling all kernels takes ten seconds, and other tests run
    # them.
    environment = {**child_environment, "PACKAGES": packages(), "STARTUP": CHEAP_START, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "check_wheel.sh"), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for line in ("first plan after", "tune serve answered", "check_wheel: done"):
        assert line in said


def packages():
    """Return the folder of packages in which torch is installed, in this environment or in the one that it extends."""
    import torch

    found = Path(torch.__file__).parents[1]
    assert found.name == Path(sysconfig.get_path("purelib")).name
    return str(found)
