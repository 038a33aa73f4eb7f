"""Tests of the packages that are carried to a GPU machine without a network: together with those on the
machine, they are all that ebbtide needs.
"""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Packages that the GPU machine has, according to scripts/gpu_wheels.sh.
PRESENT = {"torch", "triton", "numpy", "scipy", "pandas", "matplotlib", "numba", "rich", "pytest"}


def _names(requirements):
    return {re.split(r"[<>=;\[ ]", text, maxsplit=1)[0].lower() for text in requirements}


def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_dependency_is_there_or_carried():
    project = _project()
    needed = _names(project["dependencies"]) | _names(project["optional-dependencies"]["tune"])
    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    carried = set(re.findall(r"[a-z0-9-]+", script.split("-d .whl")[1])) | {"deepspeed"}
    assert needed - PRESENT - carried == set()


def test_deepspeeds_own_dependencies_are_carried():
    from importlib import metadata

    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    for package in ("deepspeed", "optuna", "pydantic", "sqlalchemy", "alembic"):
        required = metadata.requires(package) or []
        plain = _names(text for text in required if "extra ==" not in text)
        lacking = {n for n in plain if n not in script and n.replace("_", "-") not in script}
        assert lacking - PRESENT - {"numpy", "tomli", "markupsafe"} == set()


def test_scripts_are_shell_and_say_how_they_are_used():
    for name in ("gpu_wheels.sh", "gpu_suite.sh"):
        subprocess.run(["sh", "-n", str(ROOT / "scripts" / name)], check=True)
    done = subprocess.run(["sh", str(ROOT / "scripts" / "gpu_suite.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_missing_modules_are_told_all_at_once(tmp_path):
    """Check that scripts/gpu_suite.sh names all missing Python modules before it runs anything."""
    import os
    import sys

    (tmp_path / ".ready").touch()
    bare = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "EBBTIDE_PACKAGES": str(tmp_path), "PYTHONHOME": ""}
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.base_prefix}/bin/python3" -S "$@"\n')
    wrapper.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "gpu_suite.sh"), str(tmp_path / "out")],
        env={**bare, "PYTHON": str(wrapper)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "these modules are needed, but are missing: torch, triton, deepspeed" in done.stderr
    assert not (tmp_path / "out").exists()
