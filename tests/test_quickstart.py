"""Tests that the two files of docs/quickstart.md train through every door, in an environment that sets nothing that a
user has not set.

`test_documents.py` runs the page's commands as written.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ebbtide
import pytest
from ebbtide.simulator import Workload

from studies.bench.rank import free_port
from tests.test_pages import DOCS, ROOT

pytestmark = pytest.mark.slow

PAGE = (DOCS / "quickstart.md").read_text()
CONFIG = json.loads(re.search(r"<<'JSON'\n(.*?)^JSON$", PAGE, re.MULTILINE | re.DOTALL)[1])
SCRIPT = re.search(r"^```python\n(# train\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
TOGETHER = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
LOCAL = ["--hostfile=", "--num_gpus=1", "--master_port={port}"]
ACCELERATE = ["--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
LAUNCHERS = {
    "python": ["python"],
    "torchrun": ["torchrun", "--master-port={port}"],
    "deepspeed": ["deepspeed", *LOCAL],
    "accelerate": [
        *re.search(r"`tune run -- (accelerate launch .*?) train\.py 8`", PAGE)[1].split(),
        "--main_process_port={port}",
    ],
}


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """Return the environment of a user who has activated the virtual environment, and set nothing else."""
    path = os.pathsep.join([str(Path(sys.executable).parent), *os.defpath.split(os.pathsep), "/usr/local/bin"])
    environment = {"HOME": os.environ["HOME"], "PATH": path}
    seen = subprocess.run(
        ["python", "-c", "import ebbtide; print(ebbtide.__file__)"],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=environment,
        capture_output=True,
        check=False,
    )
    if seen.stdout.decode().strip() != ebbtide.__file__:  # the installed ebbtide is another checkout
        environment["PYTHONPATH"] = str(ROOT)
    return environment


@pytest.fixture
def started(user, tmp_path):
    """Return a function that runs a command beside the quickstart's two files, and returns its code and output."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(command, key=CONFIG["ebbtide"], name="ebbtide"):
        config = {k: v for k, v in CONFIG.items() if k != "ebbtide"} | ({name: key} if key else {})
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = [word.format(port=free_port()) for word in command]
        done = subprocess.run(words, cwd=tmp_path, env=user, timeout=600, check=False, **TOGETHER)
        return done.returncode, done.stdout

    return start


def plans(said):
    return len(re.findall(r"ebbtide: \d+ subgroups on ", said))


# A start takes ten seconds of a core. So each launcher starts with the key, and each word of the key in one launcher.
STARTS = [
    *(pytest.param(launcher, CONFIG["ebbtide"], id=f"{launcher}-key") for launcher in LAUNCHERS),
    pytest.param("python", {"plan": "auto"}, id="python-auto"),
    pytest.param("python", None, id="python-none"),
]


@pytest.mark.parametrize(("launcher", "key"), STARTS)
def test_tune_run(launcher, key, started, tmp_path):
    code, said = started(["tune", "run", "--", *LAUNCHERS[launcher], "train.py", "5"], key)
    assert code == 0, said
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert plans(said) == (key is not None), said
    assert ('Add "ebbtide": {"plan": "automatic"}' in said) == (key is None), said


def test_accelerate_without_deepspeed_is_told_at_the_end(started, tmp_path):
    code, said = started(["tune", "run", "--", "accelerate", "launch", "--cpu", *ACCELERATE, "train.py", "2"])
    assert code == 0, said
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert "no DeepSpeed engine with an optimizer was started" in said, said


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_without_tune_run(launcher, started, tmp_path):
    # DeepSpeed refuses a bare python by itself.
    code, said = started([*LAUNCHERS[launcher], "train.py", "2"])
    assert (code == 0) == (launcher != "python"), said
    assert (tmp_path / "out" / "model" / "model.safetensors").exists() == (code == 0)
    if code:
        assert "No module named 'mpi4py'" in said
    assert "ebbtide" not in said


def test_a_misspelt_key_is_told_when_the_first_engine_starts(started):
    code, said = started(["tune", "run", "--", "python", "train.py", "2"], name="ebtide")
    assert code == 0, said
    told, trained = said.index('but "ebtide". Did you mean "ebbtide"?'), said.index("'loss': ")
    assert told < trained
    assert "no DeepSpeed engine" not in said


@pytest.mark.parametrize(
    ("launcher", "key"), [("torchrun", CONFIG["ebbtide"]), ("none", None)], ids=["torchrun-key", "none-none"]
)
def test_profile(launcher, key, started, tmp_path):
    words = ["--train-script", "train.py", "--launcher", launcher, "--iterations", "1", "-o", "wl.json", "--", "8"]
    code, said = started(["tune", "profile", *words], key)
    assert code == 0, said
    assert Workload.load(tmp_path / "wl.json").subgroups


def test_verify(started):
    words = ["--steps", "2", "--against", "stock", "--", *LAUNCHERS["torchrun"], "train.py", "8"]
    code, said = started(["tune", "verify", *words])
    assert code == 0, said
    assert "plan against stock: identical, every bit of 2 steps" in said


def test_doctor(started):
    _, said = started(["tune", "doctor", "--ds-config", "ds.json"])
    assert re.search(r"ok +DeepSpeed config", said), said


def test_a_script_that_enables_ebbtide_needs_no_launcher(started, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import ebbtide\n\nebbtide.enable()\n" + script.read_text())
    code, said = started(["python", "train.py", "2"])
    assert code == 0, said
    assert plans(said) == 1
