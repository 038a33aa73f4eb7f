"""Tests of the studies `optimality`, `simulator_speed`, `update_phase` and `interleaving`, on small models and with few
cases.
"""

import importlib
import json
import sys

import pytest
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.placements.planning import quick_plan

STUDIES = {"optimality": "studies.optimality.__main__"}


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a study in this process, where imports and compiled kernels are ready."""

    def study(name, path, *arguments):
        monkeypatch.setattr(sys, "argv", [name, "--json", str(path), *arguments])
        importlib.import_module(STUDIES.get(name, f"studies.{name}")).main()
        return json.loads(path.read_text())

    return study


@pytest.mark.slow
def test_optimality(tmp_path, run):
    few = ("--pairs", "1", "--few", "2", "--seed", "2")  # pairs with quick searches
    found = run("optimality", tmp_path / "o.json", *few)
    assert len(found["rows"]) == 1
    assert len(found["few_subgroups"]["rows"]) == 2
    assert all(row["gap_pct"] >= -1e-6 for row in found["rows"]), "no plan beats the bound"
    assert 0 <= found["median_gap_pct"] <= found["max_gap_pct"]
    assert {"machine", "versions", "command"} <= found.keys()


@pytest.mark.slow
def test_simulator_speed(tmp_path, run):
    found = run("simulator_speed", tmp_path / "s.json", "--quick")
    assert found["iterations_per_s"] > 0
    assert set(found["seconds_per_iteration"]) == {"10", "30", "100"}
    assert set(found["wall_seconds_per_iteration"]) == {"10", "30", "100"}
    assert found["max_relative_difference"] <= 1e-9


@pytest.mark.slow
def test_update_phase(tmp_path, only_rank, run):
    words = "--size 4m --steps 2 --subgroup 500000 --kernel-elements 100000"
    found = run("update_phase", tmp_path / "u.json", *words.split())
    assert found["bit_identical"] is True
    assert found["ebbtide_host_bytes_per_param"] == 14.0
    assert found["stock_host_bytes_per_param"] == 18.0
    assert found["kernel_dram_fraction"] > 0


@pytest.mark.slow
def test_interleaving(tmp_path, run, monkeypatch):
    def even(work, machine, *, device_memory_bytes):
        return quick_plan(work, machine, Limits.of(work, machine, device_memory_bytes))

    monkeypatch.setattr("studies.interleaving.plan", even)
    found = run("interleaving", tmp_path / "i.json", "--quick")
    assert found["device_kind"] == "simulated"
    assert found["measured_here"] is None, "nothing is called measured without a GPU"
    for bed in found["testbeds"].values():
        for row in bed["models"]:
            assert row["ebbtide, fused kernel"] <= row["ebbtide, equal kernels"]
            assert row["stride 2"] < row["stock"]
            assert row["stock"] == pytest.approx(row["stock, published"], rel=0.25)
            slow, fast = row["stride 2, as bound"]
            assert fast < row["stride 2"] < slow
            assert row["stride 2, published"] == pytest.approx(fast, rel=0.12)
        strides = [row["iteration_s"] for row in bed["strides"]]
        assert strides == pytest.approx(sorted(strides), rel=1e-9), "the published best stride is 2"


def test_a_record_is_shown_with_units_rows_by_name_and_without_plans():
    from rich.console import Console

    from studies.bench.console import tables

    figures = {
        "stall_s": 0.25,
        "taken_bytes": 2 * 10**9,
        "same": True,
        "told": {"share": 0.5},
        "writers": {"torch": {"failed": "no"}, "ours": {"cost_pct": 3.0}},
        "rows": [{"a": 1, "b": 2}, {"a": 3, "c": None}],
        "many": [{"a": 7777}] * 41,
        "plan": {"schema_version": 2, "prefetch": 4321},
        "none": {},
        "numbers": [1, 2],
    }
    console = Console(width=100)
    with console.capture() as shown:
        console.print(*tables("study", figures))
    lines = [" ".join(line.replace("\u2502", " ").replace("\u2503", " ").split()) for line in shown.get().splitlines()]
    assert {"stall s 0.25", "taken GB 2", "same yes", "told.share 0.5", "torch ours"} <= {*lines}
    assert {"failed no", "cost % 3", "a 1 3", "b 2", "c"} <= {*lines}
    assert not any("7777" in line or "4,321" in line for line in lines)
