import signal
import subprocess
import sys

import pytest

from studies.bench.deepspeed_ops import _own_lock, build_host_ops
from tests.conftest import own_extensions

# Takes torch's lock inside ours, reports it, and waits to be killed.
_BUILDER = """
import sys, time
from pathlib import Path
from studies.bench.deepspeed_ops import _own_lock
folder = Path(sys.argv[1])
with _own_lock(folder):
    (folder / "lock").touch()
    print("building", flush=True)
    time.sleep(600)
"""


def test_lock_of_a_killed_build_is_cleared(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", _BUILDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "building\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (tmp_path / "lock").exists()
    with _own_lock(tmp_path):
        assert not (tmp_path / "lock").exists()


def test_lock_of_somebody_else_stays(tmp_path):
    (tmp_path / "lock").touch()
    with _own_lock(tmp_path):
        assert (tmp_path / "lock").exists()


def test_missing_ninja_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"put \.venv/bin on PATH"):
        build_host_ops()


def test_an_environment_keeps_what_it_compiled_when_another_compiles(tmp_path):
    build = tmp_path / "torch_extensions" / "py311_cpu" / "op"
    build.mkdir(parents=True)
    (build / "build.ninja").write_text("cflags = -I/one/.venv/lib")
    assert own_extensions(tmp_path, "/one/.venv") is None  # another process compiles there
    for name in ("op.so", "lock"):
        (build / name).touch()
    one = own_extensions(tmp_path, "/one/.venv")
    assert sorted(path.name for path in (one / "op").iterdir()) == ["build.ninja", "op.so"]
    assert (one / "op/op.so").stat().st_mtime_ns == (build / "op.so").stat().st_mtime_ns
    (build / "build.ninja").write_text("cflags = -I/other/.venv/lib")
    assert own_extensions(tmp_path, "/one/.venv") == one
    third = own_extensions(tmp_path, "/third/.venv")
    assert third != one
    assert [path.name for path in third.iterdir()] == ["c++"]


def test_without_builds_ops_are_compiled_without_debug_information(tmp_path):
    compiler = own_extensions(tmp_path, "/one/.venv") / "c++"
    (tmp_path / "op.cpp").write_text("int op() { return 1; }")
    subprocess.run([compiler, "-O3", "-g", "-c", tmp_path / "op.cpp", "-o", tmp_path / "op.o"], check=True)
    assert b".debug_info" not in (tmp_path / "op.o").read_bytes()
    assert own_extensions(tmp_path, "/one/.venv") == compiler.parent
