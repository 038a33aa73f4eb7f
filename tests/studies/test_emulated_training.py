"""Tests of the studies `overlap` and `fidelity`, which execute plans on an emulated GPU.

Copies, updates and layers take prescribed times. Training must give the same bits as stock DeepSpeed, and the reported
numbers must agree with each other.
"""

import importlib
import itertools
import json
import sys
from contextlib import nullcontext

import pytest

from studies.trials.emulated_training import Kernels
from studies.trials.paced_device import PacedDevice


@pytest.fixture
def run(only_rank, monkeypatch):
    """Return a function that runs a study in this process, where DeepSpeed is imported already, to save time."""

    def study(name, path, *arguments):
        monkeypatch.setattr(sys, "argv", [name, "--json", str(path), "--quick", *arguments])
        importlib.import_module(f"studies.{name}").main()
        return json.loads(path.read_text())

    return study


def test_what_prepares_a_kernel_is_done_beside_the_one_before(monkeypatch):
    device, clock = PacedDevice(), itertools.count()
    given = []
    monkeypatch.setattr(device, "compute", lambda s: given.append(s) or nullcontext())
    monkeypatch.setattr("time.thread_time", lambda: float(next(clock)))  # each reading of the clock adds one second
    kernels = Kernels(device)
    for seconds in (5.0, 5.0, 0.5):
        with kernels.compute(seconds):
            next(clock)  # computation inside a kernel counts with the kernel's time
    kernels.synchronized()
    with kernels.compute(5.0):
        pass
    assert given == [5.0, 4.0, 0.0, 5.0]


@pytest.mark.slow
def test_overlap(tmp_path, run):
    found = run("overlap", tmp_path / "o.json", "--steps", "2", "--clipped-steps", "2")
    assert found["bit_identical"] is True
    assert found["device_kind"] == "emulated"
    names = {row["name"] for row in found["rows"]}
    assert {"ebbtide", "stride 2", "all on the host"} <= names
    # No machine can execute a plan faster than the given times allow.
    assert all(row["over_floor"] >= 1 - 1e-6 for row in found["rows"])
    assert found["iteration_over_floor"] == found["rows"][0]["over_floor"]
    assert (tmp_path / "o.trace.json").exists()
    [row] = found["guessed_rows"]
    assert found["guessed_bit_identical"] is True
    assert row["speculate"] > 0
    assert row["iteration_over_floor"] == found["guessed_iteration_over_floor"] >= 1 - 1e-6
    assert row["gain_over_barrier"] == found["gain_over_barrier"]
    assert set(row["slowdown_pct"]) == {"5%", "50%", "100%"}


@pytest.mark.slow
def test_fidelity(tmp_path, run):
    found = run("fidelity", tmp_path / "f.json", "--plans", "2", "--steps", "1")
    assert found["bit_identical"] is True
    assert found["device_kind"] == "emulated"
    assert len(found["rows"]) == 2
    assert found["rows"][0] != found["rows"][1], "two plans were drawn"


@pytest.mark.slow
def test_fidelity_of_subgroups_of_many_layers(tmp_path, run, monkeypatch):
    # With two rounds, two micro-batches and one size, this trains an eighth of the layers of the study.
    monkeypatch.setattr("studies.fidelity.LAYERS", (4,))
    monkeypatch.setattr("studies.fidelity.ROUNDS", 2)
    monkeypatch.setattr("studies.fidelity.ACCUMULATIONS", {1: 0.3, 2: 0.3})
    found = run("fidelity", tmp_path / "m.json", "--many-layers", "--plans", "2", "--steps", "1")
    assert found["bit_identical"] is True
    assert [(row["micro_batches"], row["layers_per_subgroup"]) for row in found["rows"]] == [(1, 4), (2, 4)]
    # All subgroups are on the host, and a subgroup's gradient that is sent as a whole arrives later.
    assert all(row["predicted_s"] < row["predicted_whole_s"] for row in found["rows"])
