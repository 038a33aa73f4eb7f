"""Every snippet of the README is run, in the order of the page, where the demo has been."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)


def fenced(language):
    return [text for kind, text in _FENCED.findall(README) if kind == language]


def commands():
    """Shell lines, fenced or indented, without their comments."""
    plain = _FENCED.sub("", README)
    blocks = [*fenced("bash"), *fenced("console"), *_INDENTED.findall(plain)]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def test_only_languages_that_are_run_here():
    assert {kind for kind, _ in _FENCED.findall(README)} <= {"python", "bash", "console"}
    assert len(fenced("python")) >= 2
    assert ["make", "demo"] in commands()
    assert {command[0] for command in commands()} <= {"make", "tune"}


@pytest.mark.parametrize("target", sorted({c[1] for c in commands() if c[0] == "make"}))
def test_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tune_commands_run(quick_demo):
    if not (quick_demo / "examples").exists():
        (quick_demo / "examples").symlink_to(ROOT / "examples")
    for command in [c for c in commands() if c[0] == "tune"]:
        done = subprocess.run(
            [sys.executable, "-m", "tuner.cli", *command[1:]], cwd=quick_demo, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_python_snippets_run(quick_demo, child_environment, tmp_path):
    """In one process, as a reader would who follows the page; its last checkpoint is committed."""
    script = tmp_path / "readme.py"
    # A launcher sets these; without one, a process has to.
    head = "from studies.bench.rank import become_only_rank\nbecome_only_rank()\n"
    script.write_text(head + "\n".join(fenced("python")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], cwd=quick_demo, capture_output=True,
        text=True, env={**child_environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (quick_demo / "checkpoints" / "latest").read_text().strip() == "global_step5"


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) >= 4
    for target in targets:
        assert (ROOT / target).exists(), target


def test_first_screen_has_the_two_commands():
    first_screen = "\n".join(README.splitlines()[:20])
    for command in ("make demo", "make test"):
        assert command in first_screen
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
