"""Tests that `make setup` names the programs that a machine lacks before it installs anything."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup_venv.sh"
_OLD = '#!/bin/sh\n[ "$1" = --version ] && { echo "Python 3.9.2"; exit 0; }\nexit 1\n'


@pytest.fixture
def machine(tmp_path):
    """Make a folder with a few programs to use as the whole PATH, as on a machine with nothing else installed.
    Return the folder, and a function that runs a copy of the setup script. The copy cannot touch the real .venv.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "grep", "touch"):
        (programs / name).symlink_to(shutil.which(name))
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")

    def run(**variables):
        script = tmp_path / "scripts" / SCRIPT.name
        environment = {"PATH": str(programs), "HOME": str(tmp_path), **variables}
        done = subprocess.run(["/bin/sh", str(script)], env=environment, capture_output=True, text=True, check=False)
        assert not (tmp_path / ".venv").exists()
        return done

    return programs, run


def _program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_old_python_is_named_with_what_to_do(machine):
    programs, run = machine
    _program(programs / "python3", _OLD)
    done = run()
    assert done.returncode == 2
    assert "Python 3.11 or 3.12 with the venv module is needed, but python3 is Python 3.9.2" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_python_named_by_hand_is_checked_too(machine):
    programs, run = machine
    (programs / "python3").symlink_to(sys.executable)
    _program(programs / "python3.9", _OLD)
    done = run(PYTHON="python3.9")
    assert done.returncode == 2
    assert "but PYTHON=python3.9 is Python 3.9.2" in done.stderr


def test_missing_compiler_is_named(machine):
    programs, run = machine
    _program(programs / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = run(CXX="no-such-compiler")
    assert done.returncode == 2
    assert "a C++ compiler is needed, but no-such-compiler does not run" in done.stderr


def test_newer_python_beside_an_old_one_is_found(machine):
    programs, run = machine
    _program(programs / "python3", _OLD)
    _program(programs / "python3.11", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = run(CXX="no-such-compiler")  # so that it stops right after the choice
    assert "C++ compiler" in done.stderr


def test_python_that_pip_would_refuse_is_passed_over(machine):
    programs, run = machine
    newer = f'if [ "$1" = -c ]; then exec "{sys.executable}" -c "import sys; sys.version_info = (3, 13, 0); $2"; fi'
    _program(programs / "python3", f'#!/bin/sh\n{newer}\necho "Python 3.13.0"\n')
    done = run(CXX="no-such-compiler")
    assert "Python 3.11 or 3.12 with the venv module is needed, but python3 is Python 3.13.0" in done.stderr
    (programs / "python3.11").symlink_to(sys.executable)
    assert "C++ compiler" in run(CXX="no-such-compiler").stderr
