"""Tests of `tune run` with launchers that start ranks in their own way, with the real DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from studies.bench.rank import free_port

ROOT = Path(__file__).parents[3]
LAUNCHERS = (
    ["torchrun", "--nproc-per-node=2", "--master-port={port}"],
    ["deepspeed", "--hostfile=", "--num_gpus=1", "--master_port={port}"],
    [
        "accelerate",
        "launch",
        "--cpu",
        "--num_processes=1",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--main_process_port={port}",
    ],
)

NINJA = """
import shutil, sys
if sys.argv[-1] != "tune":
    import ebbtide
    ebbtide.enable()
import deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils import cpp_extension


def load(*args, **kwargs):
    open(sys.argv[-1], "w").write(shutil.which("ninja"))
    sys.exit(0)


cpp_extension.load = load
CPUAdamBuilder().load()
"""


@pytest.mark.slow
def test_every_way_in_builds_with_this_environments_ninja(child_environment, tmp_path):
    own = Path(sys.executable).parent
    if not (own / "ninja").exists():
        pytest.skip("this environment has no ninja of its own")
    (tmp_path / "train.py").write_text(NINJA)
    other = tmp_path / "other"
    other.mkdir()
    (other / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (other / "ninja").chmod(0o755)
    path = os.pathsep.join([str(other), str(own), os.environ["PATH"]])
    environment = {**child_environment, "PATH": path}
    ways = {
        "python": [sys.executable],
        "tune": [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--", sys.executable],
    }
    ways |= {words[0]: [word.format(port=free_port()) for word in words] for words in LAUNCHERS}
    started = [
        subprocess.Popen(
            [*words, "train.py", name],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, words in ways.items()
    ]
    for process in started:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    assert {name: (tmp_path / name).read_text() for name in ways} == dict.fromkeys(ways, str(own / "ninja"))


@pytest.mark.slow
def test_ranks_of_each_launcher_have_the_front_door(child_environment, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys\nfrom deepspeed import initialize\n"
        "file = f'{sys.argv[-1]}.{os.environ.get(\"RANK\", 0)}'\n"
        "open(file, 'w').write(str(hasattr(initialize, '_ebbtide_original')))\n"
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**child_environment, "PATH": path}
    started = []
    for words in LAUNCHERS:
        command = [word.format(port=free_port()) for word in words]
        command += ["train.py", command[0]]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--", *command],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in started:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    for name in ("torchrun.0", "torchrun.1", "deepspeed.0", "accelerate.0"):
        assert (tmp_path / name).read_text() == "True"
