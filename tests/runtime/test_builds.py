"""Tests of the lock file that stays when a build of DeepSpeed's ops is killed. ebbtide recognizes such a file as stale,
and logs a warning while a process waits for a lock file.
"""

import logging
import os
import subprocess
import threading
import time

import pytest
from ebbtide.runtime.hardware import builds
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
        assert "The build is running" in builds.told(lock)
    finally:
        ninja.kill()
        ninja.wait()
    assert builds.is_stale(lock)
    lock.touch()
    assert not builds.is_stale(lock), "a new lock is not stale, because its compiler may not have started yet"


def test_a_start_that_waits_says_for_what_and_since_when(lock, caplog):
    told = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            told.set()

    handler = Heard()
    builds.logger.addHandler(handler)
    threading.Thread(target=lambda: told.wait(30) and lock.unlink()).start()
    try:
        with builds.waits_are_told(every_s=0.01), caplog.at_level(logging.WARNING, "ebbtide"):
            FileBaton(str(lock)).wait()
    finally:
        builds.logger.removeHandler(handler)
        lock.unlink(missing_ok=True)
    assert f"the build of the extension cpu_adam has held its lock file {lock} since" in caplog.text
    assert f"rm {lock}" in caplog.text
