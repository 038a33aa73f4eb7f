"""Tests of ebbtide's commands in a new shell, as a newcomer runs them: no launcher, no rank in the environment, and
nothing configured.

`test_documents.py` also uses such a shell, to train with the commands that the documentation shows.
"""

import subprocess
import sys

import pytest
from ebbtide.runtime.hardware.launcher import VARIABLES, only_rank


def run(words, folder, environment):
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "variable", "alone"),
    [
        (["python", "train.py"], None, True),
        (["/usr/bin/python3.11", "-u", "train.py"], None, True),
        (["python", "-m", "my.training"], None, True),
        (["python", "-m", "torch.distributed.run", "train.py"], None, False),
        (["torchrun", "train.py"], None, False),
        (["bash", "start.sh"], None, False),
        *((["python", "train.py"], variable, False) for variable in sorted(VARIABLES)),
    ],
)
def test_only_a_bare_python_command_gets_a_rank(command, variable, alone):
    assert (only_rank({variable: "1"} if variable else {}, command).get("RANK") == "0") is alone


def test_a_script_that_starts_its_ranks_itself_gets_its_environment_back(new_shell, tmp_path):
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").touch()
    (tmp_path / "lightning" / "fabric.py").write_text("")
    script = "import os; a = 'LOCAL_RANK' in os.environ; import lightning.fabric; print(a, 'LOCAL_RANK' in os.environ)"
    done = run(["tune", "run", "--", "python", "-c", script], tmp_path, new_shell)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize(
    ("setup", "rank", "printed"),
    [
        ("", "0", True),
        ("", "1", False),
        ("logging.basicConfig()", "0", True),
        ("logging.getLogger('ebbtide').setLevel(logging.WARNING)", "0", False),
        ("logging.getLogger('ebbtide').setLevel(logging.INFO)", "0", True),
    ],
)
def test_the_log_is_shown_on_rank_0_unless_the_script_has_set_it(setup, rank, printed, new_shell, tmp_path):
    script = (
        f"import logging\n{setup}\nfrom ebbtide.runtime import log\nfrom ebbtide.runtime.hardware import launcher\n"
        "log.show(launcher.rank())\n"
        "logging.getLogger('ebbtide').info('a line')\n"
    )
    done = run([sys.executable, "-c", script], tmp_path, {**new_shell, "RANK": rank})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a line") == (1 if printed else 0)
