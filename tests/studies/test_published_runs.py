"""Published runs: reading them, what physics must hold, and errors on rows left out."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from studies import published_runs
from studies.bench.offload_runs import RunError, family_of, read_runs, shape, subgroup_sizes
from studies.published.calibration import calibrate, completed
from studies.published.testbed import PASS_PRIORS, STEP_PRIORS, Testbed, hosted_elements, visits
from studies.published_runs import errors, predictions, ranking

CSV = Path(published_runs.__file__).parent / "data" / "published_offload_runs.csv"
Testbed.__test__ = False  # no test class
RATES = {name: prior[0] for name, prior in (STEP_PRIORS | PASS_PRIORS).items()}


@pytest.fixture(scope="module")
def runs():
    return read_runs(CSV)


@pytest.fixture(scope="module")
def split(runs):
    """Judged on a fourth that was not fitted (not a third: rows come in threes)."""
    kept = [run for i, run in enumerate(runs) if i % 4]
    return calibrate(kept), [run for i, run in enumerate(runs) if i % 4 == 0]


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
def test_errors_on_rows_not_fitted_meet_the_target(split, testbed):
    calibration, left_out = split
    pairs = predictions(calibration, [run for run in left_out if run.testbed == testbed])
    found = errors(pairs)
    assert found["iteration"]["median_abs_pct_error"] <= 8
    assert found["iteration"]["p90_abs_pct_error"] <= 20
    assert found["memory"]["median_abs_pct_error"] <= 8


def test_a_campaign_that_does_not_say_it_is_recognised_by_its_backward(split):
    assert split[0].testbeds["a100"].async_families == {"scale-subg-size-motivation"}


def test_what_is_predicted_does_not_depend_on_what_was_measured(split):
    calibration, left_out = split
    blind = [replace(run, measured={}) for run in left_out]
    assert [calibration.predict(r) for r in blind] == [calibration.predict(r) for r in left_out]


def test_intervals_hold_the_fitted_rate(split):
    for name, bed in split[0].testbeds.items():
        for rate, (low, high) in split[0].intervals[name].items():
            assert low < bed.rates[rate] < high


def test_rates_that_made_the_times_are_found_again(runs):
    """Times made from known rates: the fit recovers the rates that such rows identify."""
    rates = {**RATES, "flops_per_s": 1.5e14, "blocking_params_per_s": 1.2e9,
             "dram_bytes_per_s": 9e10, "forward_layer_s": 4e-3}  # fmt: skip
    truth = Testbed("a100", rates)
    made = []
    for run in runs:
        if run.testbed == "a100":
            said = replace(run, async_grads=bool(run.async_grads), family="one")
            made.append(replace(said, measured={**run.measured, **truth.predict(said)}))
    found = calibrate(made).testbeds["a100"]
    for name in ("flops_per_s", "blocking_params_per_s", "forward_layer_s"):
        assert found.rates[name] == pytest.approx(rates[name], rel=0.05)
    for run in made:
        assert found.predict(run)["iter_ms"] == pytest.approx(run.measured["iter_ms"], rel=0.03)


def test_subgroups_close_at_their_size_or_beyond():
    # One layer of hidden 1000 over 2 shards: 25.2 M and 1.0 M of embeddings, then 1.5, .5, 2, 2 M.
    sizes = subgroup_sizes(1.0, 1000.0, 2048, 2, 2_000_000)
    assert sizes == [25_152_000, 2_524_000, 2_500_000, 2_000_000]
    assert sum(sizes) == (12_000_000 + (50304 + 2048) * 1000) // 2


def test_a_contradicted_shape_moves_towards_its_label(runs):
    run = next(r for r in runs if r.params_b == 20)
    agreed = next(r for r in runs if r.params_b == 13)
    assert run.contradicted
    assert shape(run, 0.0) == (40, 5120)
    layers, hidden = shape(run, 1.0)
    assert 12 * layers * hidden**2 / (12 * 40 * 5120**2) == pytest.approx(20e9 / run.logged_params)
    assert shape(agreed, 1.0) == (agreed.layers, agreed.hidden)


def test_resident_and_visiting_subgroups_keep_their_gradients(runs):
    base = replace(runs[0], dp=4, prefetch=False, stride=0, offload_ratio=1.0)
    everything = hosted_elements(base, 0.5)
    visiting = replace(base, prefetch=True, stride=2)
    assert hosted_elements(visiting, 0.5) == pytest.approx(everything / 2, rel=0.07)
    assert hosted_elements(replace(base, offload_ratio=0.5), 0.5) == pytest.approx(
        everything / 2, rel=0.07
    )
    assert visits(replace(visiting, stride=1000), 0.5) == 0


def test_more_of_a_rate_is_never_slower(runs):
    run = replace(runs[0], dp=8, async_grads=False)
    base = Testbed("a100", RATES).predict(run)["iter_ms"]
    for name in ("flops_per_s", "dram_bytes_per_s", "blocking_params_per_s",
                 "network_bytes_per_s", "pageable_h2d_bytes_per_s"):  # fmt: skip
        faster = Testbed("a100", {**RATES, name: 1.5 * RATES[name]}).predict(run)["iter_ms"]
        assert faster < base


def test_regret_is_what_the_predicted_best_costs(runs):
    a = next(r for r in runs if r.prefetch and r.stride == 2)
    group = [
        (replace(a, stride=2, measured={"iter_ms": 110.0}), {"iter_ms": 1.0}),
        (replace(a, stride=3, measured={"iter_ms": 100.0}), {"iter_ms": 2.0}),
    ]
    found = ranking(group, "stride")
    assert found["regret_pct"] == pytest.approx(10.0)
    assert found["within_3_pct_share"] == 0.0


def test_campaigns_are_sources_without_model_sizes():
    assert family_of("act-output-13B-scale-DP") == family_of("act-output-8.3B-scale-DP")
    twin = "act-output-scale-models-twinflow-0.8/act-output-{}B"
    assert family_of(twin.format(7)) == family_of(twin.format(20)) == "scale-models-twinflow-0.8"


def test_the_command_writes_figures_and_a_picture(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--calibrate", str(CSV), "--predict", str(CSV), "--json", str(path), "--quick"]
    assert published_runs.main(arguments) == 0
    figures = json.loads(path.read_text())
    assert figures["predicted"]["a100"]["iteration"]["n"] == 73
    assert figures["predicted_rows_that_were_fitted"] == 91
    assert math.isfinite(figures["ranking"]["stride"]["regret_pct"])
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "91 of the 91 predicted rows were fitted" in capsys.readouterr().out


def test_a_testbed_without_calibration_is_an_error(tmp_path, capsys):
    rows = rows_of(CSV)
    a100 = written(tmp_path / "a.csv", [r for r in rows if r["testbed"] == "a100"])
    arguments = ["--calibrate", str(a100), "--predict", str(CSV), "--json", str(tmp_path / "x")]
    assert published_runs.main([*arguments, "--quick"]) == 2
    assert "'h100x4' has none (calibrated: a100)" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


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
    few = [r for r in read_runs(CSV) if r.testbed == "a100"][:2]
    with pytest.raises(RunError, match="at least 3 measured runs of each testbed, but has 2"):
        calibrate(few)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(RunError, match=r"--predict .*empty.csv must have the columns testbed"):
        read_runs(tmp_path / "empty.csv", "--predict")


def test_a_testbed_that_is_not_asked_for_needs_no_rates(runs):
    few = [r for r in runs if r.testbed == "h100x4"] + [r for r in runs if r.testbed == "a100"][:2]
    assert list(calibrate(few, ["h100x4"]).testbeds) == ["h100x4"]
    with pytest.raises(RunError, match=r"'b200' has none \(calibrated: a100, h100x4\)"):
        calibrate(few, ["b200"])


def blanked(tmp_path, **values):
    row = next(r for r in rows_of(CSV) if r["prefetch"] == "1" and r["testbed"] == "a100")
    return read_runs(written(tmp_path / "b.csv", [{**row, **values}]), "--predict", blanks=True)[0]


@pytest.mark.parametrize(
    "column", ["layers", "hidden", "seq", "micro_batch", "offload_ratio", "subgroup", "stride",
               "prefetch"]
)  # fmt: skip
def test_a_blank_is_predicted_between_what_it_may_have_been(split, tmp_path, column):
    calibration, _ = split
    run = blanked(tmp_path, **{column: "", "global_batch": ""})
    assert column in run.unknown
    cases = completed(run, calibration.fitted_on)
    assert not any(case.unknown for case, _ in cases)
    seconds = [calibration.predict(case)["iter_ms"] for case, _ in cases]
    assert min(seconds) <= calibration.predict(run)["iter_ms"] * (1 + 1e-9)
    assert calibration.predict(run)["iter_ms"] <= max(seconds) * (1 + 1e-9)
    if column == "stride":
        assert {case.stride for case, _ in cases} >= {2, 5, 10}


def test_blank_shapes_are_those_of_the_nearest_model_grown(split, tmp_path):
    calibration, _ = split
    like_13 = blanked(tmp_path, params_b="13", layers="", hidden="")
    assert {(c.layers, c.hidden) for c, _ in completed(like_13, calibration.fitted_on)} == {
        (40, 5120)
    }
    grown = completed(replace(like_13, params_b=26.0), calibration.fitted_on)[0][0]
    assert grown.logged_params / 12.85e9 == pytest.approx(2, rel=0.05)


def test_a_blank_micro_batch_follows_from_the_global_batch(tmp_path):
    run = blanked(tmp_path, micro_batch="", global_batch="32", dp="4")
    assert run.micro_batch == 8
    assert not run.unknown


def test_an_unknown_campaign_lies_between_the_known_ones(split, runs):
    bed = split[0].testbeds["a100"]
    known = [math.exp(f) for f, _ in bed.dram_of_micro_batch]
    run = next(r for r in runs if r.testbed == "a100" and r.dp == 4)
    new = [
        bed.dram_factor(replace(run, family="new", micro_batch=size)) for size in (1, 2, 4, 8, 64)
    ]
    assert all(min(known) <= factor <= max(known) for factor in new)
    assert new == sorted(new, reverse=True)  # the campaign with micro-batch 1 pinned its ranks
    silent = replace(run, family="new", async_grads=None)
    assert 0 < bed.asynchronous_probability(silent) < 0.5


def test_a_rank_draws_less_memory_bandwidth_beside_others():
    bed = Testbed("a100", RATES)
    shares = [bed.rank_dram_bytes_per_s(ranks, 1.0) for ranks in (1, 2, 4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] < RATES["rank_dram_bytes_per_s"]
    assert 4 * shares[2] < RATES["dram_bytes_per_s"]


def test_a_file_without_measurements_is_predicted(tmp_path):
    rows = [r for r in rows_of(CSV) if r["testbed"] == "h100x4"]
    bare = [{k: v for k, v in r.items() if not k.endswith(("_ms", "_gb"))} for r in rows[:2]]
    asked, path = written(tmp_path / "ask.csv", bare), tmp_path / "out.json"
    arguments = ["--calibrate", str(written(tmp_path / "fit.csv", rows)), "--predict", str(asked)]
    assert published_runs.main([*arguments, "--json", str(path), "--quick"]) == 0
    figures = json.loads(path.read_text())
    assert [row["predicted"]["iter_ms"] > 0 for row in figures["rows"]] == [True, True]
    assert figures["predicted"]["h100x4"] == {"rows": 2}


def test_before_and_after_stand_side_by_side():
    def crossed(median):
        found = {"median_abs_pct_error": median, "p90_abs_pct_error": 2 * median, "n": 3}
        return {"model": {"all": {"a100": {"rows": 3, "iteration": found}}}}

    assert published_runs.before_and_after(crossed(4.0), crossed(3.0)) == [
        {"left_out": "model", "testbed": "a100", "quantity": "iteration",
         "before": [4.0, 8.0], "after": [3.0, 6.0]}
    ]  # fmt: skip


def test_figures_that_are_none_are_refused_as_before(tmp_path, capsys):
    (tmp_path / "b.json").write_text("[]")
    arguments = ["--calibrate", str(CSV), "--predict", str(CSV), "--json", str(tmp_path / "x")]
    assert published_runs.main([*arguments, "--before", str(tmp_path / "b.json")]) == 2
    assert "--before must be figures" in capsys.readouterr().err
