"""Tests of builds of DeepSpeed's ops: stale lock files, messages about what a start waits for, and the choice of ninja.

A killed build leaves its lock file. ebbtide recognizes such a file as stale.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from ebbtide.runtime.hardware import builds, launcher
from torch.utils.file_baton import FileBaton


@pytest.fixture
def lock(tmp_path):
    """Create the lock file of a build of DeepSpeed's ops whose process was killed an hour ago, and return the
    file's path.
    """
    path = tmp_path / "py311_cpu" / "cpu_adam" / builds.LOCK
    path.parent.mkdir(parents=True)
    path.touch()
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def test_a_lock_is_stale_once_nobody_builds_there(lock, tmp_path):
    assert builds.locks(tmp_path) == builds.locks(tmp_path / "py311_cpu") == [lock]
    ninja = subprocess.Popen(["sleep", "60"], cwd=lock.parent)
    try:
        assert not builds.is_stale(lock)
        assert "The build is running" in builds.lock_text(lock)
    finally:
        ninja.kill()
        ninja.wait()
    assert builds.is_stale(lock)


BUILD = """
import sys
from torch.utils import cpp_extension
cpp_extension.load("slow", [sys.argv[1]], build_directory=sys.argv[2])
"""


def test_a_build_that_is_killed_leaves_a_lock_that_is_told_at_once(tmp_path, child_environment):
    source, folder = tmp_path / "slow.cpp", tmp_path / "slow"
    source.write_text("#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n")
    folder.mkdir()
    lock, words = folder / builds.LOCK, [sys.executable, "-c", BUILD, str(source), str(folder)]
    building = subprocess.Popen(words, env=child_environment, start_new_session=True)
    try:
        while not lock.exists():
            assert building.poll() is None
            time.sleep(0.01)
        assert not builds.is_stale(lock)
    finally:
        os.killpg(building.pid, signal.SIGKILL)
        building.wait()
    assert lock.exists()
    while builds._is_held(lock):  # ninja gives the compiler a process group of its own
        time.sleep(0.01)
    assert builds.is_stale(lock)
    tells = "from torch.utils import cpp_extension; from ebbtide.runtime.hardware.builds import tell_builds; "
    tells += "tell_builds(cpp_extension, lambda: 0)\n"
    waiting = [sys.executable, "-c", tells + BUILD, str(source), str(folder)]
    with subprocess.Popen(waiting, env=child_environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert f"delete the file (rm {lock})" in process.stderr.readline()
            assert process.poll() is None
        finally:
            process.kill()


class Heard(io.StringIO):
    """A replacement of stderr that sets an event when a text is printed."""

    def __init__(self, awaited):
        super().__init__()
        self.awaited, self.printed = awaited, threading.Event()

    def write(self, text):
        if self.awaited in text:
            self.printed.set()
        return super().write(text)


def test_a_start_that_waits_says_for_what_and_since_when(lock, monkeypatch):
    heard = Heard("rm ")
    monkeypatch.setattr("sys.stderr", heard)
    monkeypatch.setattr(builds, "QUIET_S", 0.01)
    threading.Thread(target=lambda: heard.printed.wait(30) and lock.unlink()).start()
    try:
        with builds.slow_builds_logged("cpu_adam", 0.01):
            FileBaton(str(lock)).wait()
    finally:
        lock.unlink(missing_ok=True)
    assert f"the build of the extension cpu_adam has held its lock file {lock} since" in heard.getvalue()
    assert f"rm {lock}" in heard.getvalue()


@pytest.mark.parametrize(("rank", "tells"), [("0", True), ("1", False)])
def test_an_op_that_is_compiled_is_told_on_rank_0(rank, tells, monkeypatch):
    heard = Heard("kernel cpu_adam is compiled")
    monkeypatch.setattr("sys.stderr", heard)
    monkeypatch.setenv("RANK", rank)
    torchs = SimpleNamespace(load=lambda name, sources: heard.printed.wait(30 if tells else 0))
    monkeypatch.setattr(builds, "QUIET_S", 0.01)
    builds.tell_builds(torchs, launcher.rank)
    once = torchs.load
    builds.tell_builds(torchs, launcher.rank)
    assert torchs.load is once
    assert torchs.load(name="cpu_adam", sources=[]) is tells


def test_the_ninja_of_this_python_comes_first(tmp_path, monkeypatch):
    # Check also that PATH stays as it is if this environment has no ninja, or if its ninja is first already.
    own, system = tmp_path / "venv" / "bin", tmp_path / "usr" / "bin"
    for folder in (own, system):
        folder.mkdir(parents=True)
    (system / "ninja").write_text("#!/bin/sh\n")
    (system / "ninja").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(system))
    builds.own_ninja_first()
    assert os.environ["PATH"] == str(system)
    (own / "ninja").write_text("#!/bin/sh\n")
    (own / "ninja").chmod(0o755)
    for _ in range(2):
        builds.own_ninja_first()
        assert os.environ["PATH"] == f"{own}:{system}"
