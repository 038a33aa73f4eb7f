"""Tests of the study of training runs that others have published.

They check the table of runs, and predictions by machine presets for runs to which no constant of the
simulator was fitted.
"""

import dataclasses
import math

import pytest
from ebbtide.simulator import preset_names
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.tuner.calibrate.interval import OFFLOAD_SPREAD

from studies.published_runs import families
from studies.published_runs.training import (
    FAMILIES,
    UNTOLD_VERSION,
    RunPrediction,
    predict_training,
    read_training_runs,
)


@pytest.fixture(scope="module")
def runs():
    return read_training_runs()


def test_every_row_has_a_source_and_a_preset(runs):
    assert len(runs) >= 60
    assert all(run.fields["source"].startswith("https://") for run in runs)
    assert {run.fields["preset"] for run in runs} <= set(preset_names())
    assert {run.family for run in runs} == set(FAMILIES)
    assert 0.4 <= sum(run.held_out for run in runs) / len(runs) <= 0.6
    keys = [tuple(v for k, v in run.fields.items() if k not in ("held_out", "note")) for run in runs]
    assert len(set(keys)) == len(keys), "a run is listed twice"


def quick(run):
    """Return the predicted iteration time and GPU memory of a published run, with a made-up interval, to save time."""
    machine = run.machine()
    result = simulate_fast(run.schedule(machine), machine)
    ends = result.iteration_s / 2, result.iteration_s * 2
    return RunPrediction(result.iteration_s, *ends, result.iteration_s, result.device_peak_bytes / 2**30)


@pytest.fixture(scope="module")
def judged(runs):
    return [(run, quick(run)) for run in runs]


@pytest.mark.parametrize("family", ["a100", "h100", "consumer_one", "consumer_several"])
def test_rows_that_no_constant_was_found_on_are_predicted(judged, family):
    figures = families.by_family(judged)[family]["held_out"]
    assert figures["rows"] >= 10
    assert figures["median_abs_pct_error"] <= 10
    assert figures["p90_abs_pct_error"] <= 25
    assert abs(figures["median_pct_error"]) <= 6


def test_offloaded_rows_are_simulated_with_the_build_that_they_ran(runs, judged):
    # By the behaviour of the newest version, the median error would be more than 1.5 times as large.
    figures = families.by_family(judged)["offloaded"]["held_out"]
    assert figures["median_abs_pct_error"] <= 10
    assert figures["p90_abs_pct_error"] <= 25
    assert abs(figures["median_pct_error"]) <= 5
    newest = [
        dataclasses.replace(run, fields={**run.fields, "deepspeed": "0.19.8", "optimizer": "", "pinned": "1"})
        for run in runs
        if run.family == "offloaded" and run.held_out
    ]
    before = families.errors(quick(run).seconds / run.measured_s - 1 for run in newest)
    assert before["median_abs_pct_error"] > 1.5 * figures["median_abs_pct_error"]


def test_rows_without_the_columns_of_the_build_are_read_as_runs_before_0_19_5(runs):
    run = next(run for run in runs if run.fields["zero_stage"] == "3" and run.family == "offloaded")
    bare = {k: v for k, v in run.fields.items() if k not in ("deepspeed", "optimizer", "buckets")}
    made = dataclasses.replace(run, fields=bare)
    told = dataclasses.replace(run, fields={**bare, "deepspeed": UNTOLD_VERSION})
    assert quick(made) == quick(told) != quick(dataclasses.replace(run, fields={**bare, "deepspeed": "0.19.5"}))


def test_the_spread_of_offloaded_rows_is_that_of_the_training_rows(judged):
    found = families.spread(judged)
    assert found["sources"] == 8
    assert found["needed"] == pytest.approx(OFFLOAD_SPREAD, abs=0.02)


def test_a_spread_by_hand(judged):
    own = {run.fields["source"].split("/blob/")[0]: run for run, _ in judged if run.family == "offloaded"}
    one, other = (dataclasses.replace(run, fields={**run.fields, "held_out": "0"}) for run in [*own.values()][:2])
    pair = [(run, RunPrediction(f * run.measured_s, 1, 1, 1, 1)) for run, f in ((one, 1.0), (other, 2.0), (other, 2.0))]
    expected = math.log(2) / math.sqrt(2) * 2.92 / 1.6449 * math.sqrt(1.5)
    assert families.spread(pair)["needed"] == pytest.approx(expected, rel=1e-3)


def test_the_width_that_intervals_need_by_hand(judged):
    own = {run.fields["source"].split("/blob/")[0]: run for run, _ in judged if run.family == "h100"}
    one, other = [*own.values()][:2]
    measured_s = one.measured_s
    # Four runs of one source lie at the ends of their intervals, and one run of another source in the middle.
    made = [(one, RunPrediction(1, measured_s / 4, measured_s, 1, 1))] * 4
    made.append((other, RunPrediction(1, other.measured_s / 3, other.measured_s * 3, 1, 1)))
    expected = 1.6449 / math.sqrt(2) * 2.92 / 1.6449 * math.sqrt(1.5)
    assert families.interval_needed(made) == pytest.approx(expected, rel=1e-3)
    wider = [(run, dataclasses.replace(said, low_s=said.low_s / 2, high_s=said.high_s * 2)) for run, said in made]
    assert families.interval_needed(wider) < families.interval_needed(made)


def test_what_was_inferred_is_left_out_of_the_figures_beside(runs):
    run = next(run for run in runs if run.fields["buckets"].endswith("?") and run.measured_gib and run.held_out)
    said = predict_training(run)
    assert said.told_gib > said.gib, "DeepSpeed's own buckets are larger"
    found = families.memory([(run, said)])["held_out"]
    assert found["median_pct_error"] == pytest.approx(100 * (said.gib / run.measured_gib - 1))
    assert found["as_published"]["median_pct_error"] == pytest.approx(100 * (said.told_gib / run.measured_gib - 1))


def test_device_memory_of_rows_held_out_is_predicted_from_published_cells_alone(runs):
    # Some published runs report the memory in use on the whole GPU. For such a run, and for no other, the prediction
    # also includes memory that torch's allocator reserves without using it.
    seen = [(run, predict_training(run)) for run in runs if run.measured_gib]
    found = families.memory(seen)["held_out"]
    assert found["as_published"]["median_abs_pct_error"] <= 8 < found["without_slack"]["median_abs_pct_error"]
    assert abs(found["as_published"]["median_pct_error"]) <= 5
    for run, said in seen:
        slack = (said.told_gib - said.bare_gib) / said.bare_gib
        assert (slack > 0.2) == (run.fields["memory_kind"] == "device")


def test_every_family_has_its_row_and_intervals_that_hold(runs):
    wanted = [run for run in runs if run.family not in ("a100", "h100")]
    found = families.by_family([(run, predict_training(run)) for run in wanted])
    assert set(found) == set(FAMILIES)
    assert found["experts"]["fitted"]["interval_held_pct"] == 100
    for side in families.SIDES:
        assert found["superchip"][side]["interval_held_pct"] == 100
        assert found["superchip"][side]["median_abs_pct_error"] <= 10
    for family in ("offloaded", "consumer_one", "consumer_several"):
        assert found[family]["held_out"]["interval_held_pct"] >= 90
        assert found[family]["held_out"]["median_high_over_low"] < 3


def test_long_sequences_are_predicted_by_attentions_own_rate(judged):
    long = [(run, said) for run, said in judged if run.number("sequence") >= 8192 and run.family in ("a100", "h100")]
    found = families.errors(said.seconds / run.measured_s - 1 for run, said in long)
    assert found["rows"] >= 30
    assert found["median_abs_pct_error"] <= 12
    assert abs(found["median_pct_error"]) <= 8


def test_an_interval_holds_a_row_and_the_former_share_is_beside_it(runs):
    run = next(run for run in runs if run.fields["preset"] == "rtx4090" and run.number("gpus") == 1)
    said = predict_training(run)
    assert said.low_s < run.measured_s < said.high_s
    assert said.one_share_s > 1.3 * said.seconds, "0.57 of the sheet was far too slow on a GeForce card"
    (row,) = families.rows_of([(run, said)])
    assert row["source"] == run.fields["source"]
    assert families.by_family([(run, said)])["consumer_one"]


def test_families_and_memory_are_told_apart_by_side(runs):
    one = next(run for run in runs if run.measured_gib)
    other = dataclasses.replace(one, fields={**one.fields, "held_out": "1" if not one.held_out else "0"})
    said = RunPrediction(1.1 * one.measured_s, 1e-9, 2 * one.measured_s, 2 * one.measured_s, 0.9 * one.measured_gib)
    pair = [(one, said), (other, dataclasses.replace(said, seconds=0.8 * one.measured_s))]
    found = families.by_family(pair)[one.family]
    sides = sorted(found[side]["median_pct_error"] for side in families.SIDES)
    assert sides == pytest.approx([-20.0, 10.0])
    assert found["fitted"]["one_share"]["median_pct_error"] == pytest.approx(100.0)
    assert found["fitted"]["interval_held_pct"] == 100.0
    assert families.memory(pair)["held_out"]["median_pct_error"] == pytest.approx(-10.0)
