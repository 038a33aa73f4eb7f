"""Every snippet of the README and of the tour is run, in the order of the pages, where the demo has
been.
"""

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.tuner.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHOWN = README + (ROOT / "docs" / "tour.md").read_text()
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)


def fenced(language):
    return [text for kind, text in _FENCED.findall(SHOWN) if kind == language]


def commands():
    """Shell lines, fenced or indented, without their comments."""
    plain = _FENCED.sub("", SHOWN)
    blocks = [*fenced("bash"), *fenced("console"), *_INDENTED.findall(plain)]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def test_only_languages_that_are_run_here():
    assert {kind for kind, _ in _FENCED.findall(SHOWN)} <= {"python", "bash", "console"}
    assert len(fenced("python")) >= 2
    assert ["make", "demo"] in commands()
    assert {command[0] for command in commands()} <= {"make", "tune"}


@pytest.mark.parametrize("target", sorted({c[1] for c in commands() if c[0] == "make"}))
def test_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tune_commands_run(quick_demo, monkeypatch):
    monkeypatch.chdir(quick_demo)
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    for command in [c for c in commands() if c[0] == "tune" and c[1] != "run"]:  # a user's script
        done = CliRunner().invoke(main, command[1:])
        assert done.exit_code == 0, f"{shlex.join(command)}: {done.output}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_python_snippets_run(quick_demo, only_rank, tmp_path, monkeypatch):
    """In one process, as a reader would who follows the page; its last checkpoint is committed."""
    monkeypatch.chdir(quick_demo)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(fenced("python")))
    runpy.run_path(str(script))
    assert Path("checkpoints/latest").read_text().strip() == "global_step5"


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
