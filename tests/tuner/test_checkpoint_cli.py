"""Tests of the command `tune checkpoint` on real checkpoints."""

import json
import os
import re
import shutil

import pytest
from click.testing import CliRunner
from ebbtide.tuner.cli import main

from tests.runtime.checkpoint.conftest import Bench, some_state


@pytest.fixture
def folder(tmp_path):
    bench = Bench(tmp_path / "checkpoints")
    for number in range(3):
        bench.save(some_state(number), f"step{number}", step=number)
    return bench.folder


def tune(*arguments):
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def rows(*arguments):
    done = tune(*arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


def flip(path, at=5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_list_shows_the_newest_first_and_which_one_is_latest(folder):
    code, found = rows("list", folder)
    assert code == 0
    assert [(r["tag"], r["step"], r["latest"]) for r in found] == [
        ("step2", 2, True),
        ("step1", 1, False),
        ("step0", 0, False),
    ]
    assert all(r["size_bytes"] > 240_000 and r["status"] == "committed" for r in found)
    title, first, *_ = tune("list", folder).stdout.splitlines()
    assert title.split() == ["tag", "step", "size", "ranks", "committed", "latest", "status"]
    assert re.match(r"step2 +2 +0\.3 MiB +\d+ +20\d\d-\d\d-\d\d [\d:]{8} +latest +committed$", first), first


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 1000), lambda path: path.unlink()])
def test_list_tells_a_file_that_was_cut_or_lost(folder, change):
    change(next((folder / "step1").glob("*.pt")))
    status = {row["tag"]: row["status"] for row in rows("list", folder)[1]}
    assert [tag for tag, state in status.items() if state.startswith("damaged: ")] == ["step1"], status


def test_whole_ones_verify(folder):
    code, found = rows("verify", folder)
    assert code == 0
    assert [r["state"] for r in found] == ["whole"] * 3


def test_a_flipped_bit_is_found_with_file_and_bytes(folder):
    flip(folder / "step1" / "rank0_optim_states.pt")
    code, found = rows("verify", folder)
    assert code == 2
    states = {r["tag"]: r["state"] for r in found}
    assert states["step2"] == states["step0"] == "whole"
    assert "rank0_optim_states.pt: bytes 0 to 16384 of the file were altered" in states["step1"]
    assert tune("verify", folder, "--tag", "step0").exit_code == 0
    assert tune("verify", folder, "--tag", "step1").exit_code == 2


def test_a_truncated_manifest_is_listed_and_found(folder):
    manifest = folder / "step2" / "ebbtide.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    _, listed = rows("list", folder)
    assert [r["tag"] for r in listed] == ["step1", "step0", "step2"]
    assert listed[2]["status"].startswith("damaged")
    code, found = rows("verify", folder)
    assert code == 2
    assert next(r for r in found if r["tag"] == "step2")["state"].startswith("damaged")


def test_prune_leaves_the_newest_that_are_whole(folder):
    code, found = rows("prune", folder, "--keep", 1)
    assert code == 0
    assert {r["removed"].rpartition("/")[2] for r in found} == {"step0", "step1"}
    assert [r["tag"] for r in rows("list", folder)[1]] == ["step2"]
    assert rows("prune", folder, "--keep", 1) == (0, [])
    assert "nothing to delete" in tune("prune", folder, "--keep", 1).stderr
    assert rows("verify", folder) == (0, [{"tag": "step2", "state": "whole"}])


def test_several_folders_are_told_apart(folder, tmp_path):
    other = tmp_path / "durable"
    shutil.copytree(folder, other)
    shutil.rmtree(other / "step2")
    _, found = rows("list", folder, other)
    assert [(r["folder"], r["tag"]) for r in found if r["tag"] != "step0"] == [
        (str(folder), "step2"),
        (str(folder), "step1"),
        (str(other), "step1"),
    ]
    code, found = rows("verify", folder, other, "--tag", "step2")
    assert (code, [r["folder"] for r in found]) == (0, [str(folder)])
    assert tune("verify", folder, other, "--tag", "step9").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["list", "/nowhere"], "must be a folder of checkpoints, but got /nowhere"),
        (["verify", "{folder}", "/nowhere"], "must be a folder of checkpoints"),
        (["verify", "{folder}", "--tag", "step9"], "there is no checkpoint step9"),
        (["prune", "{folder}"], "--keep"),
        (["prune", "{folder}", "--keep", "0"], "--keep"),
        (["list"], "FOLDER"),
    ],
)
def test_bad_input_is_told_without_a_traceback(folder, arguments, told):
    done = tune(*(a.format(folder=folder) for a in arguments))
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output
    assert len(rows("list", folder)[1]) == 3
