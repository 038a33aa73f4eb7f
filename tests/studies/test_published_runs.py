"""Tests of the study of published step times of Deep Optimizer States: reading the files, comparing
ebbtide's predictions with the runs, and the command.
"""

import csv
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from ebbtide.simulator import preset
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.tuner.calibrate.calibration import MODEL_SPREAD
from ebbtide.tuner.calibrate.interval import CAMPAIGN_SPREAD, OFFLOAD_SPREAD, model_spread

from studies.bench.offload_runs import RunError, family_of, model_of, read_runs
from studies.published_runs import __main__ as published_runs
from studies.published_runs import judging, left_out
from studies.published_runs.left_out import cross_validation
from studies.published_runs.makers import between_makers
from studies.published_runs.shipped import as_logged, as_seen, fits, machine_of, predict, schedule_of, workload_of

CSV = Path(published_runs.__file__).parents[1] / "data" / "published_offload_runs.csv"


@pytest.fixture(scope="module")
def runs():
    return read_runs(CSV)


@pytest.fixture(scope="module")
def pairs(runs):
    return judging.predictions({name: machine_of(name) for name in ("a100", "h100x4")}, runs)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("testbed", ["a100", "h100x4"])
def test_the_shipped_path_with_nothing_fitted_meets_the_target(pairs, testbed):
    known = [p for p in pairs if p[0].testbed == testbed]
    figures = judging.errors(known)
    assert figures["iteration"]["median_abs_pct_error"] <= 12
    assert figures["iteration"]["p90_abs_pct_error"] <= 35
    assert figures["memory"]["median_abs_pct_error"] <= 8
    strategies = judging.pairs_by_testbed(known)[testbed]
    assert strategies["ranked_rightly_pct"] >= 97
    assert strategies["median_ratio_error_pct"] <= 7


def test_memory_errs_upward_or_within_the_margin(pairs):
    for pair in pairs:
        measured, predicted = judging.measured_and_predicted(pair, "memory")
        logged = 0.005  # GiB: half of the last digit in a log
        assert predicted >= (1 - UNKNOWN_MARGIN) * (measured - logged), pair[0]


def test_subgroups_are_those_of_fused_matrices(runs):
    # The gradients of these subgroups stay in GPU memory. So compared with a run that updates nothing on the GPU, the
    # published GPU memory after backward is larger by these gradients. This difference must be 2 bytes for each element
    # of ebbtide's subgroups with these numbers. ebbtide cuts the model into 21 subgroups.
    stock = _only(runs, params_b=13, micro_batch=1, dp=4, prefetch=False, async_grads=True)
    waiting = {stride: _left_by_backward_gb(_only(runs, params_b=13, stride=stride)) for stride in (2, 8, 10)}
    assert waiting[8] == waiting[10]
    subgroups = workload_of(stock, machine_of("a100")).subgroups
    assert len(subgroups) == 21
    for stride, measured_gb in waiting.items():
        gradients = 2 * sum(subgroups[stride - 1 :: stride]) / 2**30
        assert measured_gb - _left_by_backward_gb(stock) == pytest.approx(gradients, abs=0.02)


def _only(runs, **wanted):
    (run,) = [r for r in runs if r.testbed == "a100" and all(getattr(r, key) == value for key, value in wanted.items())]
    return run


def _left_by_backward_gb(run):
    return run.measured["mem_after_bwd_gb"] - run.measured["mem_before_fwd_gb"]


def test_what_is_predicted_does_not_depend_on_what_was_measured(runs):
    for run in runs[::9]:
        machine = machine_of(run.testbed)
        assert predict(replace(run, measured={}), machine) == predict(run, machine)


def test_the_model_is_what_the_logged_memory_shows(runs):
    # Growth of logged memory with the number of ranks: 11.0 GiB of 16-bit parameters for 7 B, 20.85 for 13 B.
    machine = preset("a100-node")
    for label, gib in ((7, 11.0), (13, 20.85)):
        run = next(r for r in runs if r.params_b == label and r.dp == 1)
        assert workload_of(run, machine).params * 2 / 2**30 == pytest.approx(gib, rel=0.01)
    twenty = next(r for r in runs if r.params_b == 20)
    assert twenty.contradicted
    assert model_of(twenty)["hidden"] == 6144


def test_accumulation_is_what_the_global_batch_says(tmp_path):
    row = next(r for r in rows_of(CSV) if r["testbed"] == "a100" and r["dp"] == "4")
    batch = int(row["micro_batch"]) * 4
    made = [{**row, "global_batch": str(n * batch)} for n in (1, 2, 8)]
    once, twice, often = read_runs(written(tmp_path / "a.csv", made))
    assert (once.accumulation, twice.accumulation, often.accumulation) == (1, 2, 8)
    machine = machine_of("a100")
    ms = [predict(run, machine) for run in (once, twice, often)]
    assert ms[1]["fwd_ms"] == pytest.approx(2 * ms[0]["fwd_ms"], rel=0.01)
    assert ms[1]["step_ms"] == pytest.approx(ms[0]["step_ms"], rel=0.01)
    # Each further micro-batch copies the sum to the GPU and back to the host. Only the last one copies fp32.
    further = ms[1]["bwd_ms"] - ms[0]["bwd_ms"]
    assert 0.4 * ms[0]["bwd_ms"] < further < ms[0]["bwd_ms"]
    assert ms[2]["bwd_ms"] == pytest.approx(ms[0]["bwd_ms"] + 7 * further, rel=0.01)
    with pytest.raises(RunError, match="global_batch must be a multiple of micro_batch x dp"):
        read_runs(written(tmp_path / "b.csv", [{**row, "global_batch": str(batch + 1)}]))


def test_every_published_row_is_readable_with_blanks_and_without(tmp_path):
    rows = rows_of(CSV)
    blank = (
        "layers",
        "hidden",
        "seq",
        "micro_batch",
        "offload_ratio",
        "subgroup",
        "prefetch",
        "async_grads",
        "stride",
        "global_batch",
        "heads",
    )
    for name in blank:
        emptied = written(tmp_path / "blank.csv", [{**row, name: ""} for row in rows])
        assert len(read_runs(emptied, blanks=True)) == len(rows)
    bare = [{k: v for k, v in row.items() if k not in ("heads", "global_batch")} for row in rows]
    assert len(read_runs(written(tmp_path / "bare.csv", bare))) == len(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefetch": "1", "stride": "0"}, "stride must be a whole number >= 1 if prefetch is 1"),
        ({"prefetch": "1", "stride": "-3"}, "stride must be a whole number >= 1"),
        ({"prefetch": "1", "stride": "2.7"}, "stride must be a whole number >= 1"),
        ({"prefetch": "0", "stride": "-3"}, "stride must be a whole number >= 0"),
        ({"prefetch": "-1"}, "prefetch must be 0, 1 or blank, but got '-1'"),
        ({"prefetch": "0.5"}, "prefetch must be 0, 1 or blank"),
        ({"async_grads": "7"}, "async_grads must be 0, 1 or blank, but got '7'"),
        ({"heads": "7"}, "heads must divide hidden .4096., but got 7"),
        ({"hidden": "32"}, "params_b must agree with layers, hidden and seq .* but params_b is 7, and"),
        ({"params_b": "0.1"}, "params_b must agree with layers, hidden and seq"),
        ({"params_b": "700"}, "params_b must agree with layers, hidden and seq"),
        ({"layers": "1000000", "hidden": ""}, "params_b must agree with layers, hidden and seq"),
        ({"offload_ratio": "-0.1"}, r"offload_ratio must lie in \[0, 1\], but got '-0.1'"),
        ({"offload_ratio": "1.1"}, r"offload_ratio must lie in \[0, 1\], but got '1.1'"),
    ],
)
def test_nonsense_in_a_row_is_refused(tmp_path, changes, message):
    row = next(r for r in rows_of(CSV) if r["testbed"] == "a100" and r["params_b"] == "7")
    with pytest.raises(RunError, match=f"one.csv, line 2: {message}"):
        read_runs(written(tmp_path / "one.csv", [{**row, **changes}]), blanks=True)


def test_cells_beyond_the_header_are_refused_unless_blank(tmp_path):
    lines = CSV.read_text().splitlines()[:2]
    path = tmp_path / "long.csv"
    path.write_text(f"{lines[0]}\n{lines[1]},\n")
    assert len(read_runs(path)) == 1
    path.write_text(f"{lines[0]}\n{lines[1]},99\n")
    with pytest.raises(RunError, match=r"line 2: each cell must have a column, but \['99'\]"):
        read_runs(path)


@pytest.mark.parametrize(
    "changes", [{"hidden": "4100", "heads": "41"}, {"tp": "3"}, {"dp": "100000000", "micro_batch": "1"}]
)
def test_what_no_model_can_be_is_an_error_with_its_line(tmp_path, capsys, changes):
    row = next(r for r in rows_of(CSV) if r["testbed"] == "a100" and r["params_b"] == "7")
    row = {**row, "global_batch": "", **changes}
    if "hidden" in changes:  # 100 per head, but 41 is no multiple of tp
        row["tp"] = "2"
    path = written(tmp_path / "one.csv", [row])
    out = tmp_path / "o.json"
    assert published_runs.main(["--predict", str(path), "--json", str(out), "--quick"]) == 2
    assert "one.csv, line 2: " in capsys.readouterr().err
    assert not out.exists()


def test_each_stride_is_simulated(runs):
    run, machine = (next(r for r in runs if r.testbed == "a100" and r.stride == 2), machine_of("a100"))
    gradients = [predict(replace(run, stride=k), machine)["memory_gb"] for k in (1, 2, 3, 10)]
    assert gradients == sorted(gradients, reverse=True)
    assert gradients[0] > gradients[1] + 1


def test_strategies_are_the_named_ones(runs):
    machine = machine_of("a100")
    interleaved = next(r for r in runs if r.stride == 5)
    stock = next(r for r in runs if not r.prefetch)
    assert schedule_of(interleaved, machine).strategy == "deep_optimizer_states"
    assert schedule_of(stock, machine).strategy == "twin_flow"


def test_regret_is_what_the_predicted_best_costs(runs):
    a = next(r for r in runs if r.prefetch and r.stride == 2)
    group = [
        (replace(a, stride=2, measured={"iter_ms": 110.0}), {"iter_ms": 1.0}),
        (replace(a, stride=3, measured={"iter_ms": 100.0}), {"iter_ms": 2.0}),
    ]
    figures = judging.ranking(group, "stride")
    assert figures["regret_pct"] == pytest.approx(10.0)
    assert figures["within_3_pct_share"] == 0.0


def test_pairs_compare_strategies_of_one_configuration(runs):
    a = next(r for r in runs if r.async_grads is False)
    group = [
        (replace(a, async_grads=False, measured={"iter_ms": 200.0}), {"iter_ms": 220.0}),
        (replace(a, async_grads=True, measured={"iter_ms": 100.0}), {"iter_ms": 100.0}),
        (replace(a, dp=2, measured={"iter_ms": 1.0}), {"iter_ms": 1.0}),
    ]
    figures = judging.pairs_by_testbed(group)["a100"]
    assert figures == {"pairs": 1, "ranked_rightly_pct": 100.0, "median_ratio_error_pct": pytest.approx(10.0)}
    wrong = [group[0], (group[1][0], {"iter_ms": 300.0})]
    assert judging.pairs_by_testbed(wrong)["a100"]["ranked_rightly_pct"] == 0.0


def test_a_campaign_that_does_not_say_it_is_recognised_by_its_backward(runs):
    campaign = [r for r in runs if r.family == "scale-subg-size-motivation"]
    other = next(r for r in runs if r.family == "scale-DP-motivation")
    unknown = [replace(r, family="another") for r in campaign]
    assert as_seen(unknown[0], unknown[1:]).async_grads is True
    assert as_seen(other, [other]).async_grads is False
    assert as_seen(unknown[0], [other]).async_grads is None


def test_a_known_builds_gradients_are_told_beside_what_the_log_says(runs):
    campaign = next(r for r in runs if r.family == "scale-subg-size-motivation")
    machine = machine_of("a100")
    blocking = predict(as_logged(campaign), machine)["bwd_ms"]
    assert predict(campaign, machine)["bwd_ms"] < 0.6 * blocking
    assert predict(replace(campaign, family="another"), machine)["bwd_ms"] == blocking


def test_left_out_runs_are_predicted_by_others(runs):
    few = [r for r in runs if r.testbed == "h100x4"]
    crossed = cross_validation(few)
    assert crossed["model"]["all"]["h100x4"]["rows"] == 18
    assert crossed["model"]["all"]["h100x4"]["iteration"]["median_abs_pct_error"] <= 8


def test_campaigns_are_sources_without_model_sizes():
    assert family_of("act-output-13B-scale-DP") == family_of("act-output-8.3B-scale-DP")
    twin = "act-output-scale-models-twinflow-0.8/act-output-{}B"
    assert family_of(twin.format(7)) == family_of(twin.format(20)) == "scale-models-twinflow-0.8"


def test_the_command_writes_figures(tmp_path, capsys):
    path = tmp_path / "out.json"
    rows = rows_of(CSV)
    fitted = written(tmp_path / "fit.csv", [rows[3], rows[10], rows[40], rows[-1], rows[-2]])
    some = [row for n, row in enumerate(rows) if n in (3, 10, 40) or n % 4 == 0 or n >= len(rows) - 2]
    asked = written(tmp_path / "some.csv", some)
    arguments = ["--calibrate", str(fitted), "--predict", str(asked), "--json", str(path), "--quick"]
    assert published_runs.main(arguments) == 0
    figures = json.loads(path.read_text())
    assert figures["predicted"]["a100"]["iteration"]["n"] == sum(row["testbed"] == "a100" for row in some)
    assert figures["predicted_rows_that_were_fitted"] == 5
    assert "device_flops_per_s" in figures["calibration"]["a100"]["changes"]
    assert figures["nothing_fitted"]["predicted"] != figures["predicted"]
    assert f"5 of the {len(some)} predicted runs were also used for the calibration" in capsys.readouterr().out


def test_without_runs_to_calibrate_on_nothing_is_fitted(tmp_path):
    rows = [r for r in rows_of(CSV) if r["testbed"] == "h100x4"]
    bare = [{k: v for k, v in r.items() if not k.endswith(("_ms", "_gb"))} for r in rows[:2]]
    asked, path = written(tmp_path / "ask.csv", bare), tmp_path / "out.json"
    assert published_runs.main(["--predict", str(asked), "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert [row["predicted"]["iter_ms"] > 0 for row in figures["rows"]] == [True, True]
    assert figures["predicted"]["h100x4"] == {"rows": 2}
    assert figures["calibration"] == {}


def test_a_run_that_cannot_fit_is_predicted_and_said_not_to(tmp_path, capsys):
    row = next(r for r in rows_of(CSV) if r["testbed"] == "a100")
    rows = [dict(row, micro_batch=n, global_batch=n) for n in ("1", "32")]
    asked, path = written(tmp_path / "ask.csv", rows), tmp_path / "out.json"
    assert published_runs.main(["--predict", str(asked), "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert [r["fits"] for r in figures["rows"]] == [True, False]
    assert figures["predicted_rows_that_do_not_fit"] == 1
    predicted = figures["rows"][1]["predicted"]
    a100 = machine_of("a100")
    there = (a100.device_memory_bytes - a100.device_reserved_bytes) / 2**30
    assert predicted["missing_gb"] == pytest.approx(predicted["memory_gb"] - there)
    said = " ".join(capsys.readouterr().out.split())
    assert f"micro-batch 32 would need {predicted['missing_gb']:.1f} GiB more GPU memory" in said


def test_ninety_percent_intervals_hold_about_nine_in_ten(runs):
    # Nothing was fitted to these runs. Between 80% and 97% of all step times must lie in their intervals, and also
    # between 80% and 97% of those on the A100 node. This is not required of the H100 node alone, because nearly all of
    # its step times may lie in their intervals. The intervals must be narrow on both nodes.
    machines = {name: machine_of(name) for name in ("a100", "h100x4")}
    found = judging.intervals(machines, runs, [])
    assert sum(one["n"] for one in found.values()) == len(runs)
    held = sum(one["held_pct"] * one["n"] for one in found.values()) / len(runs)
    assert 80 <= held <= 97
    assert 80 <= found["a100"]["held_pct"] <= 97
    assert all(1.1 < one["median_high_over_low"] < 1.6 for one in found.values())


def test_what_differs_between_campaigns_is_taken_from_nodes_of_other_makers():
    # Check the constant `CAMPAIGN_SPREAD`, which widens ebbtide's prediction intervals. It is the assumed standard
    # deviation of speed (in log units) between nodes that have the same GPUs but come from different makers. The
    # constant must equal the standard deviation that is computed from MLPerf training times. It is not fitted to the
    # published runs that test the intervals.
    sigma, freedom = between_makers()
    assert round(sigma, 2) == CAMPAIGN_SPREAD
    assert freedom >= 40


def test_the_spread_between_two_nodes_by_hand(tmp_path):
    names = "gpus,benchmark,global_batch,maker,system,runs,s_per_epoch"
    rows = ["8 SXM4,bert,448,A,a,5,1.0", "8 SXM4,bert,448,B,b,5,1.1", "8 SXM4,bert,512,C,c,5,9.0"]
    path = tmp_path / "nodes.csv"
    path.write_text("\n".join([names, *rows]))
    sigma, freedom = between_makers(path)
    assert (sigma, freedom) == (pytest.approx(math.log(1.1) / math.sqrt(2)), 1)


def test_what_differs_between_campaigns_counts_for_a_preset_only():
    on = machine_of("a100")
    narrow = model_spread(on.model_copy(update={"measured_with": "tune profile"}))
    assert narrow == MODEL_SPREAD < model_spread(on)
    assert model_spread(on.model_copy(update={"unexplained_spread": 0.07})) == 0.07


def test_stock_offload_on_a_host_without_a_published_run_is_less_certain():
    # An ebbtide plan, or a machine that `tune profile` measured, gets no wider interval.
    known, unknown = machine_of("a100"), preset("a100-80gb")
    assert model_spread(known, "zero3_offload") == model_spread(known, "ebbtide") == model_spread(unknown, "ebbtide")
    wide = model_spread(unknown, "zero3_offload")
    assert wide == pytest.approx(math.hypot(model_spread(unknown), OFFLOAD_SPREAD))
    measured = unknown.model_copy(update={"measured_with": "tune profile"})
    assert model_spread(measured, "zero3_offload") == MODEL_SPREAD


def test_every_published_run_fits(pairs):
    assert all(fits(predicted) for _, predicted in pairs)


def test_a_testbed_without_calibration_is_an_error(tmp_path, capsys):
    rows = rows_of(CSV)
    a100 = written(tmp_path / "a.csv", [r for r in rows if r["testbed"] == "a100"][:3])
    arguments = ["--calibrate", str(a100), "--predict", str(CSV), "--json", str(tmp_path / "x")]
    assert published_runs.main([*arguments, "--quick"]) == 2
    assert "'h100x4' has none (calibrated: a100)" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_testbed_without_a_preset_is_an_error(tmp_path, capsys):
    row = {**rows_of(CSV)[0], "testbed": "b200"}
    asked = written(tmp_path / "a.csv", [row])
    assert published_runs.main(["--predict", str(asked), "--json", str(tmp_path / "x")]) == 2
    assert "testbed must be one of a100, h100x4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("hidden", "-1", "line 2: hidden must be > 0, but got '-1'"),
        ("dp", "", "line 2: dp must be a finite number, but got ''"),
        ("iter_ms", "nan", "line 2: iter_ms must be a finite number"),
        ("offload_ratio", "1.5", "line 2: offload_ratio must lie in"),
        ("layers", "32.5", "line 2: layers must be a whole number, but got '32.5'"),
        ("tp", "0.5", "line 2: tp must be a whole number, but got '0.5'"),
        ("testbed", " ", "line 2: testbed must be named"),
    ],
)
def test_bad_rows_say_where_and_what(tmp_path, column, value, message):
    rows = rows_of(CSV)[:3]
    rows[0][column] = value
    with pytest.raises(RunError, match=message.replace("(", r"\(")):
        read_runs(written(tmp_path / "bad.csv", rows))


def test_files_that_are_no_runs(tmp_path):
    with pytest.raises(RunError, match="readable CSV"):
        read_runs(tmp_path / "missing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RunError, match="lacks"):
        read_runs(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(RunError, match=r"--predict .*empty.csv must have the columns testbed"):
        read_runs(tmp_path / "empty.csv", "--predict")


def blanked(tmp_path, **values):
    row = next(r for r in rows_of(CSV) if r["prefetch"] == "1" and r["testbed"] == "a100")
    return read_runs(written(tmp_path / "b.csv", [{**row, **values}]), "--predict", blanks=True)[0]


@pytest.mark.parametrize(
    "column", ["layers", "hidden", "seq", "micro_batch", "offload_ratio", "subgroup", "stride", "prefetch"]
)
def test_a_blank_is_the_usual_setting_and_is_named(tmp_path, column):
    run = blanked(tmp_path, **{column: "", "global_batch": ""})
    assert column in run.unknown
    assert predict(run, machine_of("a100"))["iter_ms"] > 0


def test_blank_shapes_are_those_of_the_nearest_published_model(tmp_path):
    known = blanked(tmp_path, params_b="13", layers="", hidden="")
    assert (known.layers, known.hidden) == (40, 5120)
    grown = blanked(tmp_path, params_b="40", layers="", hidden="")
    assert grown.logged_params == pytest.approx(40e9, rel=0.2)


def test_a_blank_micro_batch_follows_from_the_global_batch(tmp_path):
    run = blanked(tmp_path, micro_batch="", global_batch="32", dp="4")
    assert (run.micro_batch, run.accumulation) == (8, 1)
    assert not run.unknown


@pytest.mark.parametrize("size", [1, 3, 8])
def test_random_draws_never_predict_what_they_were_calibrated_on(size):
    runs = [run for run in read_runs(CSV) if run.testbed == "h100x4"]
    rng = random.Random(1)
    for whence in left_out.FROM:
        drawn = list(left_out._draws(runs, whence, 5, size, rng))
        assert drawn, whence
        for picked, left in drawn:
            families = {run.family for run in left}
            assert len(picked) == size
            assert left
            assert not any(run is one for run in left for one in picked)
            if whence == "same campaign":
                assert {run.family for run in picked} == families
            elif whence == "other campaigns":
                assert not {run.family for run in picked} & families


def test_random_draws_are_judged_beside_a_machine_with_nothing_fitted():
    runs = [run for run in read_runs(CSV) if run.testbed == "h100x4"]
    (found,) = left_out.random_draws(runs, 1)["same campaign"].values()
    assert found["nothing_fitted"]["n"] == found["runs_left_out"]["n"]
    assert found["triples"] == 1
    assert found["runs_left_out"]["n"] == 6  # six of nine runs
    assert 0 <= found["intervals_held_pct"] <= 100
