"""Training with state on a drive that fails, in processes of their own: the right bits, or an error
that says what happened and an end of the process; then a resume with stock's bits.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.runtime.storage.faulty_training import RESUMED_STEPS, STEPS

INTACT = "Checkpoints that were committed before are intact"
SAID = {  # of the faulty run: what its error says; nothing: there is none
    "full at begin": "No space left on device",
    "full": f"ENOSPC). {INTACT}",
    "read": f"failed: Input/output error (EIO). {INTACT}",
    "sync": f"failed: Input/output error (EIO). {INTACT}",
    "commit": "steps.json failed: Input/output error",
    "short": "",
    "stalls": "",
    "stall of a sync": "",
    "hang": "must make progress within 2 s, but no block arrived for",
    "torn, all reads checked": "is damaged: its hash is not the one that was written",
    "flipped, all reads checked": "is damaged: its hash is not the one that was written",
    "torn at the end": "",
    "flipped master": "",
    "read at resume": "",
}
# Of a run that resumes and cannot; who resumes from the checkpoint before can.
THEN_SAID = {
    "torn, all reads checked": "is damaged: its hash",
    "torn at the end": "is damaged: its hash",
    "flipped master": "The newest whole checkpoint: ",
    "read at resume": "Input/output error (EIO)",
}
DAMAGED = {"torn, all reads checked", "torn at the end", "flipped master"}  # on the drive


@pytest.fixture(scope="module")
def found(deepspeed_ops, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.storage.faulty_training", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert (folder / "found.json").exists(), done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def check_bits(life, stock):
    assert life["losses"].items() <= stock["losses"].items()
    if not life["error"]:
        end = str(life["from"] + len(life["losses"]))
        assert life["state"] == stock["states"][end]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_fault_is_told_and_costs_no_bit_and_no_committed_step(name, found):
    lives = found[name]
    assert all(life["status"] == 0 for life in lives), lives  # ended, and by itself
    first, *later = lives
    for life in later if name == "torn at the end" else lives:  # who reads then trusts the drive
        check_bits(life, found["stock"])
    assert SAID[name] in first["error"]
    assert bool(first["error"]) == bool(SAID[name])
    assert any(life["fired"] for life in lives) or name == "flipped master"
    errors = [life["error"] for life in later if life["error"]]
    assert len(errors) == (name in THEN_SAID)
    assert THEN_SAID.get(name, "") in "".join(errors)
    assert later[-1]["error"] == ""
    assert later[-1]["from"] >= first["committed"] - (name in DAMAGED)
    assert later[-1]["committed"] == STEPS + RESUMED_STEPS * (first["committed"] > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("stalls", r"subgroup \d"), ("stall of a sync", "sync")])
def test_a_stall_is_told_while_it_is_waited_for(name, what, found):
    """Which subgroup's block meets the stall is a race between the ways in and out."""
    log = found[name][0]["log"]
    assert re.search(rf"waiting for storage: {what}.*rank_00000.extents made no progress", log)
