"""Tests of training with optimizer state on a failing drive, each in a process of its own.

Each run gives stock DeepSpeed's results, bit for bit, or ends with an error that says what happened. A
resumed run has stock DeepSpeed's results too.
"""

import json
import re

import pytest

from tests.prepared import run
from tests.runtime.storage.faulty_training import RESUMED_STEPS, STEPS

INTACT = "Checkpoints that were committed before this failure are intact"
SAID = {  # text in the error of the faulty run; empty if the run must succeed
    "full at begin": "No space left on device",
    "full": f"ENOSPC). {INTACT}",
    "read": f"failed: Input/output error (EIO). {INTACT}",
    "sync": f"failed: Input/output error (EIO). {INTACT}",
    "commit": "steps.json failed: Input/output error",
    "short": "",
    "stalls": "",
    "stall of a sync": "",
    "hang": "(limit: 2 s): the drive hangs",
    "torn, all reads checked": "is damaged: its hash is not the one that was written",
    "flipped, all reads checked": "is damaged: its hash is not the one that was written",
    "torn at the end": "",
    "flipped master": "",
    "read at resume": "",
}
# Text in the error of a resume that fails. A resume from the checkpoint before then succeeds.
THEN_SAID = {
    "torn, all reads checked": "is damaged: its hash",
    "torn at the end": "is damaged: its hash",
    "flipped master": "The newest whole checkpoint: ",
    "read at resume": "Input/output error (EIO)",
}
# Faults after which the drive holds damaged state.
DAMAGED = {"torn, all reads checked", "torn at the end", "flipped master"}


@pytest.fixture(scope="module")
def found(deepspeed_ops, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    done = run(["-m", "tests.runtime.storage.faulty_training", folder], timeout=800)
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
    assert all(life["status"] == 0 for life in lives), lives  # every process has ended by itself
    first, *later = lives
    for life in later if name == "torn at the end" else lives:  # a later read trusts the drive
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
    # The test accepts any subgroup in the message, because either a read or a write may meet the stall first.
    log = found[name][0]["log"]
    assert re.search(rf"waiting for storage: {what}.*rank_00000.extents made no progress", log)
