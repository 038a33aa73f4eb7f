"""Tests of `tune calibrate`, which fits the bandwidths and compute speeds of a machine to the times of measured runs.

Here the measured times are simulated on machines with known speeds, so that the fitted speeds can be compared with the
known ones.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from ebbtide.simulator import Machine, Quantity, build_strategy, preset, workload_from_model
from ebbtide.simulator.engines.reference import rank_share
from ebbtide.simulator.estimates.presets import SHEETS, STOCK_UPDATE_BYTES
from ebbtide.tuner.calibrate import calibration
from ebbtide.tuner.calibrate.calibration import CalibrationError, Observation, calibrate, knobs_of, predicted_s, turned
from ebbtide.tuner.calibrate.interval import causes, interval_s, rates_sigma, workload_interval_s

from tests.tuner.test_cli import run

GPT = {"layers": 4, "hidden": 2048, "heads": 16, "vocabulary": 32000}


def build(micro_batch, machine, strategy="zero3_offload", ranks=4):
    # With DeepSpeed's own bucket, all gradients of this small model would leave the GPU at the end of backward.
    zero = {"stage": 3, "sub_group_size": 3e7, "reduce_bucket_size": 3e7}
    work = workload_from_model(
        GPT,
        machine,
        {"bf16": {"enabled": True}, "zero_optimization": zero},
        micro_batch=micro_batch,
        data_parallel=ranks,
    )
    return build_strategy(strategy, work, iterations=1)


def observed(truth, micro_batch, between_s=0.2, factors=None, **more):
    seconds = predicted_s(build(micro_batch, truth, **more), truth)
    seconds["iteration"] += between_s
    for phase, factor in (factors or {}).items():
        seconds["iteration"] += (factor - 1) * seconds[phase]
        seconds[phase] *= factor
    name = f"micro-batch {micro_batch}"
    return Observation(name, lambda machine: build(micro_batch, machine, **more), seconds)


def test_rates_that_made_the_times_are_found_again():
    machine = preset("h100-node")
    knobs = knobs_of(machine)
    turns = {"device_flops_per_s": 0.25, "pageable_h2d_bytes_per_s": -0.3}
    x = np.array([turns.get(knob.fields[0], 0.0) for knob in knobs])
    truth = turned(machine, knobs, x)
    runs = [observed(truth, n) for n in (1, 4, 16)]
    corrected = calibrate(machine, runs).machine
    for seen in runs:
        again = predicted_s(seen.build(corrected), corrected)
        for phase, seconds in seen.measured_s.items():
            assert again[phase] == pytest.approx(seconds, rel=0.08), phase  # the priors limit the correction
    assert corrected.loop_s.median == pytest.approx(0.2, rel=0.01)
    flops = corrected.device_flops_per_s
    assert flops.median == pytest.approx(truth.device_flops_per_s.median, rel=0.12)
    assert flops.median > 1.1 * machine.device_flops_per_s.median
    assert flops.source == "fitted"
    assert "calibrated on 3 runs; before" in flops.detail


@pytest.mark.parametrize("name", ["rtx4090", "a100-node", "h200"])
@pytest.mark.parametrize("count", [1, 3])
def test_one_phase_that_is_far_off_is_corrected(name, count):
    machine = preset(name)
    result = calibrate(machine, [observed(machine, 1, factors={"step": 1.6}, ranks=1) for _ in range(count)])
    assert "host updates" in {change.knob for change in result.changes}
    assert result.before_pct == pytest.approx(100 * (1.6 ** (1 / 3) - 1))
    assert result.left_pct < (0.75, 0.45)[count == 3] * result.before_pct


def test_what_the_runs_do_not_show_stays():
    machine = preset("h100-node")
    corrected = calibrate(machine, [observed(machine, 1, ranks=1)]).machine
    assert corrected.network_bytes_per_s == machine.network_bytes_per_s
    assert corrected.rank_shares == machine.rank_shares


def test_the_whole_of_a_run_does_not_count_beside_its_phases():
    # The bandwidths and compute speeds of the machine are fitted to the times of the phases. A longer iteration with
    # the same phases must not change them.
    machine = preset("h100-node")
    seen = observed(machine, 1)
    longer = Observation(seen.name, seen.build, {**seen.measured_s, "iteration": 9.0})
    first, second = (calibrate(machine, [one]).machine for one in (seen, longer))
    assert second.loop_s.median > first.loop_s.median + 1
    assert second.model_copy(update={"loop_s": None}) == first.model_copy(update={"loop_s": None})


def test_a_share_that_varies_between_campaigns_keeps_its_spread():
    machine = preset("a100-node")
    runs = [observed(machine, n, factors={"step": 1.3}) for n in (1, 2, 4)]
    (change,) = [c for c in calibrate(machine, runs).changes if c.field == "rank_shares.4.dram"]
    assert change.after < change.before
    assert math.log(change.high / change.low) > 1.349 * 0.18


def test_runs_that_contradict_each_other_are_named():
    machine = preset("h100-node")
    runs = [
        observed(machine, 1, factors={"step": 1.6}),
        observed(machine, 1),
        observed(machine, 1, factors={"step": 0.6}),
    ]
    told = calibrate(machine, runs).contradictions
    assert len(told) == 1
    assert "runs contradict each other: step took" in told[0]
    assert calibrate(machine, runs[1:2]).contradictions == ()


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("a100-node", {"step": 2.0}),
        ("h100-node", {"step": 3.0}),
        ("h100-node", {"forward": 2.0, "backward": 2.0, "step": 2.0}),
    ],
)
def test_a_machine_far_from_its_sheet_is_followed(name, factors):
    # The machine's bandwidths and compute speeds are changed until the predicted step time is close to the measured
    # one. The test leaves open which of them are changed, because several changes could explain the times.
    machine = preset(name)
    runs = [observed(machine, n, factors=factors) for n in (1, 2, 4)]
    result = calibrate(machine, runs)
    for seen in runs:
        step = predicted_s(seen.build(result.machine), result.machine)["step"]
        assert step == pytest.approx(seen.measured_s["step"], rel=0.12)
        low, high = interval_s(seen.build, result.machine)
        # No knob of calibration reaches the host's time to issue layers, which is part of the shortest passes.
        assert low < seen.measured_s["iteration"] < 1.02 * high
    assert result.unexplained == ()


@pytest.mark.parametrize(("wrong", "wider"), [(1.5, False), (2.0, True)])
def test_wider_corrections_are_tried_for_machines_far_from_their_sheet_only(monkeypatch, wrong, wider):
    machine, tried = preset("a100-node"), []
    monkeypatch.setattr(
        calibration,
        "_fit_within",
        lambda start, knobs, times, seen, within=calibration._fit_within: (
            tried.append(times) or within(start, knobs, times, seen)
        ),
    )
    calibrate(machine, [observed(machine, 1, factors={"step": wrong})])
    assert tried == [1.0, *calibration.WIDER] if wider else tried == [1.0]


def test_what_no_rate_explains_is_said_and_widens_the_interval():
    # No speeds within the physical limits of the machine explain such a short time. The calibration must report this
    # and widen the prediction interval.
    machine = preset("a100-node")
    runs = [observed(machine, n, factors={"step": 0.3}) for n in (1, 2, 4)]
    result = calibrate(machine, runs)
    assert result.contradictions == ()
    (said,) = (text for text in result.unexplained if text.startswith("step took 0."))
    assert "--strategy" in said
    plain = calibrate(machine, [observed(machine, n) for n in (1, 2, 4)])
    assert result.machine.unexplained_spread > 3 * plain.machine.unexplained_spread
    widths = [math.log(high / low) for low, high in (interval_s(runs[0].build, one.machine) for one in (result, plain))]
    assert widths[0] > widths[1]


@pytest.mark.parametrize("factors", [(1.0, 2.0), (1.0, 10.0), (1.0, 1.0, 2.0), (1.0, 1.0, 0.4)])
def test_the_same_run_with_two_times_is_a_contradiction(factors):
    # No machine can have both times. So the contradiction must be reported whichever of these times the calibrated
    # machine predicts.
    machine = preset("a100-node")
    runs = [observed(machine, 1, factors={"step": factor}) for factor in factors]
    result = calibrate(machine, runs)
    assert any("runs contradict each other: step took" in text for text in result.contradictions)
    low, high = interval_s(runs[0].build, result.machine)
    assert high / low > 1.5


@pytest.mark.parametrize("measured", [{}, {"forward": 0.0}, {"lunch": 1.0}])
def test_runs_without_a_phase_are_refused(measured):
    with pytest.raises(CalibrationError, match="of at least one of forward"):
        calibrate(preset("h100-node"), [Observation("r", lambda m: build(1, m), measured)])
    with pytest.raises(CalibrationError, match="at least one measured run"):
        calibrate(preset("h100-node"), [])


@pytest.mark.parametrize("name", ["a100-node", "h100-node"])
def test_no_rate_is_calibrated_beyond_its_physical_limit(name):
    machine = preset(name)
    knobs = knobs_of(machine)
    fast = turned(machine, knobs, np.full(len(knobs), 5.0))
    assert rank_share(fast, "dram", 4) == pytest.approx(1 / 4)  # the four ranks together have the whole bandwidth
    sheet = SHEETS[name]
    assert fast.device_flops_per_s.median == pytest.approx(sheet.flops)
    for field in ("h2d_bytes_per_s", "pageable_d2h_bytes_per_s"):
        assert fast.rate(field) == pytest.approx(sheet.link_raw_bytes_per_s)
    drawn = fast.rate("stock_host_adam_params_per_s") * STOCK_UPDATE_BYTES
    assert drawn == pytest.approx(fast.rate("dram_bytes_per_s"))


def test_a_rate_that_is_above_its_limit_already_stays():
    machine = preset("a100-node").with_rates(dram_bytes_per_s=5e10)
    knobs = knobs_of(machine)
    fast = turned(machine, knobs, np.full(len(knobs), 1.0))
    assert fast.host_adam_params_per_s.median == machine.host_adam_params_per_s.median


def test_what_runs_tell_in_part_moves_a_rate_in_part():
    machine = preset("a100-node")
    seen = observed(machine, 1, factors={"step": 1.15})
    corrected = calibrate(machine, [seen]).machine
    before, after = (predicted_s(seen.build(m), m)["step"] for m in (machine, corrected))
    assert 0.15 < math.log(after / before) / math.log(1.15) < 1.0


def test_a_fit_that_is_worse_than_none_changes_no_rate(monkeypatch):
    machine = preset("h100-node")
    seen = observed(machine, 1)
    found = calibration._fit(machine, knobs_of(machine), [seen])
    worse = replace(found, x=np.ones_like(found.x), identified=np.ones_like(found.identified))
    monkeypatch.setattr(calibration, "_fit", lambda *_: worse)
    result = calibrate(machine, [seen])
    assert result.changes == ()
    assert result.machine.device_flops_per_s == machine.device_flops_per_s
    assert result.left_pct == result.before_pct


@pytest.mark.parametrize(("wrong", "changes"), [(1.09, False), (0.92, False), (1.2, True), (0.8, True)])
def test_runs_that_are_predicted_well_change_no_rate(wrong, changes):
    machine = preset("h100-node")
    factors = {"forward": wrong, "backward": wrong}
    result = calibrate(machine, [observed(machine, n, factors=factors) for n in (16, 32)])
    assert bool(result.changes) == changes
    assert (result.machine.device_flops_per_s == machine.device_flops_per_s) != changes


def test_the_interval_is_as_wide_as_the_rates_that_bind():
    machine = preset("h100-node")
    low, high = interval_s(lambda m: build(1, m), machine)
    centre = predicted_s(build(1, machine), machine)["iteration"]
    assert low < centre < high
    assert all(cause.because for cause in causes(machine))
    exact = machine.model_copy(
        update={
            name: Quantity.exact(getattr(machine, name).median)
            for cause in causes(machine)
            for name in cause.knob.fields
            if name != "rank_shares"
        }
        | {
            "rank_shares": {
                ranks: {name: Quantity.exact(one.median, one.source) for name, one in shares.items()}
                for ranks, shares in machine.rank_shares.items()
            }
        }
    )
    assert not causes(exact)
    assert rates_sigma(lambda m: predicted_s(build(1, m), m)["iteration"], exact) == 0.0
    narrow = interval_s(lambda m: build(1, m), exact)
    assert math.log(narrow[1] / narrow[0]) < math.log(high / low)


def test_the_command_corrects_a_preset_and_says_what_changed(tmp_path):
    model, runs, out = (tmp_path / n for n in ("m.json", "runs.csv", "machine.json"))
    model.write_text(json.dumps(GPT))
    machine = preset("h100-node")
    slower = machine.model_copy(
        update={
            "device_flops_per_s": machine.device_flops_per_s.scaled(0.7),
            "pageable_h2d_bytes_per_s": machine.pageable_h2d_bytes_per_s.scaled(0.7),
            "pageable_d2h_bytes_per_s": machine.pageable_d2h_bytes_per_s.scaled(0.7),
        }
    )
    lines = ["name,micro_batch,data_parallel,sub_group_size,forward_ms,backward_ms,step_ms,iteration_ms"]
    for n in (1, 8):
        seconds = observed(slower, n, between_s=0.06).measured_s
        lines.append(f"run {n},{n},4,3e7," + ",".join(str(1e3 * s) for s in seconds.values()))
    runs.write_text("\n".join(lines) + "\n")
    arguments = ["calibrate", "h100-node", "--runs", runs, "--model", model, "-o", out]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "2 runs: the mean error of the predicted phase times was" in done.output
    corrected = Machine.load(out)
    assert corrected.loop_s.median == pytest.approx(0.06, rel=0.01)
    told = json.loads(run(*arguments, "--json").output)
    assert told["machine"] == str(out)
    assert all(change["low"] <= change["after"] <= change["high"] for change in told["changes"])
    loop = told["changes"][0]
    assert (loop["field"], loop["before"], round(loop["after"], 6)) == ("loop_s", 0.0, 0.06)
    assert told["warnings"] == []
    assert "loop_s" in done.output
    assert run("calibrate", "h100-node", "--runs", runs, "-o", out).exit_code == 2
    for flag, path in (("--runs", runs), ("--model", model)):
        before = path.read_text()
        refused = run(*arguments[:-1], path)
        assert (refused.exit_code, path.read_text()) == (2, before)
        assert f"--output must be another file than {flag}" in refused.output


@pytest.mark.parametrize(("name", "ranks"), [("a100-node", 4), ("a100-node", 8), ("h100-node", 4)])
def test_a_plan_has_the_interval_that_was_judged(name, ranks):
    machine = preset(name)
    # With DeepSpeed's own bucket, all gradients of this small model would leave the GPU at the end of backward.
    zero = {"stage": 3, "sub_group_size": 3e7, "reduce_bucket_size": 3e7}
    work = workload_from_model(
        GPT, machine, {"bf16": {"enabled": True}, "zero_optimization": zero}, micro_batch=4, data_parallel=ranks
    )
    judged = interval_s(lambda m: build(4, m, ranks=ranks), machine)
    shipped = workload_interval_s(lambda w: build_strategy("zero3_offload", w, iterations=1), work, machine)
    widths = [math.log(high / low) for low, high in (judged, shipped)]
    assert widths[1] == pytest.approx(widths[0], rel=0.02)
    known = work.model_copy(update={"provenance": "measured"})
    low, high = workload_interval_s(lambda w: build_strategy("zero3_offload", w, iterations=1), known, machine)
    assert math.log(high / low) < widths[1]


def test_the_threads_of_a_run_matter_beside_its_profiled_workload(tmp_path):
    work, runs, out = (tmp_path / n for n in ("work.json", "runs.csv", "machine.json"))
    workload_from_model(GPT, preset("h100-node"), {"zero_optimization": {"stage": 3}}).save(work)
    runs.write_text("step_ms\n5000\n")
    arguments = ("calibrate", "h100-node", "--runs", runs, "--workload", work, "-o", out, "--json")
    errors = [json.loads(run(*arguments, *more).output)["before_pct"] for more in ((), ("--omp-threads", "1"))]
    assert errors[0] > 2 * errors[1]
