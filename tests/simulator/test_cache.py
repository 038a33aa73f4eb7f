"""Tests of ebbtide's cache folder for compiled kernels and measured machines, also for a user without a
writable home directory.
"""

import os
import tempfile
from pathlib import Path

import pytest
from ebbtide.simulator.engines import cache
from ebbtide.simulator.engines.cache import cache_dir, takes_files


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.delenv("EBBTIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._temporary.cache_clear()


def test_it_is_below_the_home_folder(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / "home/.cache/ebbtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == tmp_path / "home/.cache/ebbtide", "an empty XDG_CACHE_HOME counts as not set"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x/ebbtide"
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path / "e"))
    assert cache_dir() == tmp_path / "e"


@pytest.mark.parametrize("home", ["/proc/nothing", "/dev/null", None])
def test_without_a_home_folder_that_takes_files_it_is_among_the_temporary_ones(tmp_path, monkeypatch, home):
    if home is None:  # a user without an entry in the password file
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", _unknown)
    else:
        monkeypatch.setenv("HOME", home)
    folder = cache_dir()
    assert folder == cache_dir() == tmp_path / f"ebbtide-{os.getuid()}"
    assert takes_files(folder)
    assert folder.stat().st_mode & 0o077 == 0, "others could put code there"


def _unknown():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("kind", ["link", "open to all"])
def test_a_folder_that_another_user_may_have_made_is_not_taken(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", "/proc/nothing")
    usual = tmp_path / f"ebbtide-{os.getuid()}"
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        usual.symlink_to(tmp_path / "theirs")
    else:
        usual.mkdir()
        usual.chmod(0o777)
    folder = cache_dir()
    assert folder == cache_dir() != usual
    assert folder.stat().st_mode & 0o077 == 0
