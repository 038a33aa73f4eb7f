"""Tests of the README's first screen, links and commands. test_documents.py runs the README's code blocks."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_TARGETS = sorted(set(re.findall(r"^ {4}make (\w+)", README, re.MULTILINE)))


@pytest.mark.parametrize("target", _TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) >= 4
    for target in targets:
        assert (ROOT / target).exists(), target


def test_first_screen_has_the_commands_and_the_caveat():
    first_screen = "\n".join(README.splitlines()[:20])
    for words in ("make demo", "make test", "pip install", "Run on one GPU so far"):
        assert words in first_screen
    assert "demo" in _TARGETS
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
