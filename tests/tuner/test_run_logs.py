"""Tests of how `tune calibrate` reads logs and tables of runs: values read, values doubted, and files refused."""

import json
from dataclasses import replace

import pytest
from ebbtide.simulator import Machine, build_strategy, preset, workload_from_model
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.tuner.calibrate.calibration import CalibrationError, predicted_s
from ebbtide.tuner.calibrate.run_logs import FactsFromFlags, levels_s, read_log, read_observations

from tests.tuner.test_cli import run

GPT = {"layers": 8, "hidden": 2048, "heads": 16, "vocabulary": 32000}
OFFLOADED = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "sub_group_size": 3e7, "offload_optimizer": {"device": "cpu"}},
}
# From a run of DeepSpeed 0.19.8 with ZeRO-3, accumulation 2 and one sample each, without training_data, and with one
# second of other work after each step. By the clock, a step took 1.135 to 1.151 s.
REAL = """\
[Rank 0] time (ms) | optimizer_step: 16.03
[Rank 0] time (ms) | fwd_microstep: 31.66 | bwd_microstep: 57.96 | step_microstep: 22.91
[Rank 0] time (ms) | fwd: 88.96 | bwd: 130.87 | bwd_inner: 95.22 | bwd_allreduce: 35.54 | step: 22.95
[Rank 0] time (ms) | fwd: 50.53 | bwd: 94.03 | bwd_inner: 74.67 | bwd_allreduce: 19.27 | step: 9.58
"""
REAL += "".join(
    f"[2026-11-22 15:49:{at}] [INFO] [timer.py:264:stop] epoch=0/micro_step={2 * step}/global_step="
    f"{step}, RunningAvgSamplesPerSec=14.652641581280633, CurrSamplesPerSec={rate}, "
    "MemAllocated=0.61GB, MaxMemAllocated=0.61GB\n"
    "[Rank 0] time (ms) | fwd_microstep: 20.95 | bwd_microstep: 42.84 | step_microstep: 9.98\n"
    f"[Rank 0] time (ms) | fwd: {fwd} | bwd: {bwd} | bwd_inner: 68.09 | step: {ms}\n"
    for step, at, rate, fwd, bwd, ms in (
        (3, "15,096", 14.652534232114453, 42.61, 82.80, 10.01),
        (4, "16,231", 15.053980950498955, 42.36, 80.69, 8.81),
        (5, "17,382", 13.486980856920455, 48.46, 90.09, 8.84),
        (6, "18,519", 14.866164744928847, 42.62, 82.35, 8.60),
        (7, "19,653", 15.107961660932162, 41.17, 81.59, 8.74),
        (8, "20,788", 15.103745352947813, 41.46, 81.15, 8.93),
    )
)
TWO = FactsFromFlags(model="m", shape={"micro_batch": 1, "accumulation": 2})


def seen_in(tmp_path, text, described=TWO, name="train.log"):
    path = tmp_path / name
    path.write_text(text)
    return read_observations(path, described)


def test_the_lines_of_older_deepspeed_are_read():
    line = (
        "[2023-06-21 07:39:09,439] [INFO] [logging.py:96:log_dist] [Rank 0] rank=0 time (ms) | "
        "forward_microstep: 27.48 | backward_microstep: 73.59 | step_microstep: 72.59\n"
        "[2023-06-21 07:39:09,443] [INFO] [logging.py:96:log_dist] [Rank 0] rank=0 time (ms) | "
        "forward: 27.41 | backward: 73.44 | backward_inner: 50.99 | backward_allreduce: 22.40 | step: 72.82\n"
    )
    log = read_log(5 * line)
    assert log.iterations == 5
    assert [seconds[0] for seconds in log.phases_s.values()] == pytest.approx([0.02741, 0.07344, 0.07282])
    assert {len(seconds) for seconds in log.phases_s.values()} == {3}


def test_the_loop_is_what_the_times_of_day_show(tmp_path):
    (seen,) = seen_in(tmp_path, REAL)
    phases = {k: v for k, v in seen.measured_s.items() if k != "iteration"}
    assert phases == pytest.approx({"forward": 0.04249, "backward": 0.08197, "step": 0.008825}, rel=1e-3)
    assert seen.measured_s["iteration"] == pytest.approx(1.135, abs=0.003)
    (note,) = seen.notes  # a note is shown for ten times the time of the phases
    assert "1 s of an iteration are outside its phases" in note


TORCHRUN = """W1122 15:48:58.1 torch/distributed/run.py:803]
*****************************************
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed.
"""  # noqa: E501


@pytest.mark.parametrize("said", [TORCHRUN, "export OMP_NUM_THREADS=1\n", "'OMP_NUM_THREADS': '1'"])
def test_a_log_tells_its_ranks_threads(tmp_path, said):
    described = FactsFromFlags(model=GPT, ds_config=OFFLOADED, shape={"data_parallel": 4})
    on = preset("h200")
    (plain,), (seen,) = (seen_in(tmp_path, text, described) for text in (REAL, said + REAL))
    few, all_ = (predicted_s(run.build(on), on)["step"] for run in (seen, plain))
    assert few > 2 * all_
    assert any("run on 1 thread of each rank" in note for note in seen.notes)
    given = replace(described, shape={**described.shape, "omp_threads": 64})
    (told,) = seen_in(tmp_path, said + REAL, given)  # a time that the user gives is taken as it is
    assert predicted_s(told.build(on), on)["step"] == all_
    assert not any("OMP_NUM_THREADS" in note for note in told.notes)


@pytest.mark.parametrize("offload", [{"device": "cpu", "pin_memory": False}, {"device": "cpu", "ratio": 0.5}, None])
@pytest.mark.parametrize("stage", [2, 3])
def test_runs_are_those_of_the_offload_that_the_config_sets(tmp_path, offload, stage):
    if stage == 2 and offload is not None:
        offload = {"device": "cpu", "pin_memory": offload.get("pin_memory", True)}
    zero = {"stage": stage, **({} if offload is None else {"offload_optimizer": offload})}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    on = preset("h200")
    (run,) = seen_in(tmp_path, "step_ms\n9\n", FactsFromFlags(model=GPT, ds_config=config), "runs.csv")
    job = Job.of_deepspeed(GPT, config)
    name, options = job.offload.strategy(stage)
    expected = build_strategy(name, estimated(job, on), iterations=1, **options)
    assert predicted_s(run.build(on), on) == predicted_s(expected, on)


def test_a_row_tells_its_launcher(tmp_path):
    rows = "launcher,omp_threads,step_ms\ntorchrun,,9\n,2,9\n,,9\n"
    described = FactsFromFlags(model=GPT, shape={"data_parallel": 4})
    on = preset("h200")
    steps = [predicted_s(run.build(on), on)["step"] for run in seen_in(tmp_path, rows, described, "runs.csv")]
    assert steps[0] > steps[1] > steps[2]
    with pytest.raises(CalibrationError, match=r"launcher must be one of .* but got 'bash'"):
        seen_in(tmp_path, "launcher,step_ms\nbash,9\n", described, "runs.csv")


def without_times(text):
    return "\n".join(line.partition("[timer.py:264:stop] ")[2] or line for line in text.split("\n"))


def test_a_log_without_times_of_day_tells_no_loop(tmp_path):
    for text in (without_times(REAL), REAL.replace(", Curr", ", "), REAL.replace("global_", "")):
        (seen,) = seen_in(tmp_path, text)
        assert set(seen.measured_s) == {"forward", "backward", "step"}
        (note,) = seen.notes
        assert "does not contain the time between the phases" in note
        assert "steps_per_print 1" in note


def test_every_tenth_line_tells_the_loop_as_well(tmp_path):
    lines = REAL.splitlines(keepends=True)
    stamps = [line for line in lines if "global_step=" in line]
    for line in stamps[1:-1]:
        lines.remove(line)
    (seen,) = seen_in(tmp_path, "".join(lines))
    assert seen.measured_s["iteration"] == pytest.approx((20.788 - 15.096) / 5)


def test_a_restart_is_no_iteration(tmp_path):
    later = REAL.replace("15:49:", "19:12:")
    assert max(read_log(REAL + later).wholes_s) < 1.2


def test_times_of_day_that_cannot_be_are_told_and_left_out(tmp_path):
    slow = REAL.replace("fwd: 4", "fwd: 444")
    (seen,) = seen_in(tmp_path, slow)
    assert "iteration" not in seen.measured_s
    assert "by the times of day in the log an iteration takes 1.14 s, but forward" in seen.notes[0]


@pytest.mark.parametrize(
    ("samples", "timed", "fits"),
    [
        (1, True, False),
        (2, True, True),
        (4, True, True),
        (20, True, False),  # 17 samples fit into 1.135 s
        (1, False, False),
        (2, False, True),
        (5, False, False),
    ],
)
def test_a_batch_that_the_log_contradicts_is_told(tmp_path, samples, timed, fits):
    # The batch size divided by the samples per second is the time of an iteration. This time must not be shorter than
    # forward, backward and step together. In this log, a batch of one sample gives too short a time. This time must
    # also not be longer than an iteration takes according to the log's clock times. If the log has no clock times, the
    # limit is twice the time of forward, backward and step together.
    described = FactsFromFlags(model="m", shape={"micro_batch": samples})
    (seen,) = seen_in(tmp_path, REAL if timed else without_times(REAL), described)
    notes = [note for note in seen.notes if "check --micro-batch" in note]
    assert len(notes) == (not fits)
    assert all("enough for about 1.99 samples" in note for note in notes)


def test_the_batch_may_stand_in_the_deepspeed_config(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}))
    assert FactsFromFlags(ds_config=str(config), shape={"data_parallel": 4}).samples() == 8
    assert FactsFromFlags(shape={"data_parallel": 4}).samples() == 4
    (seen,) = seen_in(tmp_path, without_times(REAL), FactsFromFlags("m", str(config)))
    assert not [note for note in seen.notes if "check --micro-batch" in note]
    (seen,) = seen_in(tmp_path, without_times(REAL), FactsFromFlags("m"))
    assert [note for note in seen.notes if "check --micro-batch" in note]


def test_numbers_that_were_cut_or_mixed_up_do_not_count():
    whole = read_log(REAL).iterations
    assert read_log(REAL.replace("step: 8.81", "step: 8e8.81")).iterations == whole - 1
    assert read_log(REAL.replace("fwd: 42.36", "fwd: 4[Rank")).iterations == whole - 1


def test_two_levels_in_one_log_are_told(tmp_path):
    slower = "".join(f"[Rank 0] time (ms) | fwd: {500 + i} | bwd: 900.00 | step: 100.00\n" for i in range(6))
    (seen,) = seen_in(tmp_path, slower + REAL)
    assert any("Does it hold two runs?" in note for note in seen.notes)
    (seen,) = seen_in(tmp_path, REAL)
    assert not any("two runs" in note for note in seen.notes)


@pytest.mark.parametrize(
    ("seconds", "split"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], None),  # the times drift
        ([1.0, 1.0, 1.0, 1.0, 1.0, 9.0], None),  # one stray time
        ([1.0, 2.0, 1.0, 2.0], 2),
        ([1.0, 1.02, 0.98, 1.3, 1.31], 3),
        ([], None),
    ],
)
def test_levels_are_apart_and_not_stray(seconds, split):
    levels = levels_s(seconds)
    assert (levels and len(levels[0])) == split


def test_files_that_tell_nothing_are_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"at least 5 lines .* holds 4"):
        seen_in(tmp_path, "".join(REAL.splitlines(keepends=True)[:10]))
    with pytest.raises(CalibrationError, match="--runs must be a readable file"):
        read_observations(tmp_path / "none.log", FactsFromFlags())
    with pytest.raises(CalibrationError, match="must be of `tune profile` or `tune search --measure`"):
        seen_in(tmp_path, "{}", name="w.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour,step_ms\nred,1\n", r"has \['colour', 'step_ms'\]"),
        ("step_ms\n-1\n", "line 2: step_ms must be a number > 0, but got '-1'"),
        ("micro_batch,step_ms\n1,2477,99\n", r"line 2: a row must have the header's 2 cells .* 3"),
        ("step_ms,step_s\n3,4\n", "line 2: only one of step_ms and step_s may be given, but got"),
        ("step_ms,ratio\n3,1.5\n", r"line 2: ratio must lie in \[0, 1\], but got '1.5'"),
        ("forward_ms,step_ms,iteration_ms\n300,2477,1000\n", "line 2: an iteration must take at"),
        ("step_ms,step_ms\n3,4\n", "the columns of c.csv must have different names, but got"),
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path, text, message):
    with pytest.raises(CalibrationError, match=message):
        seen_in(tmp_path, text, name="c.csv")


def test_a_row_may_say_either_unit_and_no_offload(tmp_path):
    text = "step_ms,step_s,ratio\n3000,,0\n,3,0.5\n"
    first, second = seen_in(tmp_path, text, name="c.csv")
    assert first.measured_s == second.measured_s == {"step": 3.0}


def predicted():
    machine = preset("h100-node")
    work = workload_from_model(GPT, machine, OFFLOADED)
    return predicted_s(build_strategy("zero3_offload", work, iterations=1), machine)


def calibrated(tmp_path, csv, *more):
    model, config, runs, out = (tmp_path / n for n in ("m.json", "ds.json", "r.csv", "out.json"))
    model.write_text(json.dumps(GPT))
    config.write_text(json.dumps(OFFLOADED))
    runs.write_text(csv)
    done = run("calibrate", "h100-node", "--runs", runs, "--model", model, "--ds-config", config, "-o", out, *more)
    return done, out


def test_another_unit_is_refused_by_what_the_machine_predicts(tmp_path):
    ms = 1e3 * predicted()["step"]
    for column, value in (("step_s", ms), ("step_ms", ms / 1e3)):
        done, out = calibrated(tmp_path, f"{column}\n{value}\n")
        assert done.exit_code == 2
        assert "step must lie within a factor of 100" in done.output
        assert "check its unit" in done.output
        assert not out.exists()


def test_what_is_left_is_told_as_a_ratio(tmp_path):
    ms = {phase: 1e3 * seconds for phase, seconds in predicted().items() if phase != "iteration"}
    rows = [[f * v for v in ms.values()] for f in (0.25, 4.0)]
    header = ",".join(f"{phase}_ms" for phase in ms)
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    done, _ = calibrated(tmp_path, text)
    assert "and is now a factor of 4.0" in done.output
    assert "runs contradict each other: step took 4.00 times" in done.output
    told = json.loads(calibrated(tmp_path, text, "--json")[0].stdout)
    assert told["left_pct"] == pytest.approx(300, rel=0.15)


def test_the_loop_is_among_the_changes_and_a_long_one_is_told(tmp_path):
    ms = {phase: 1e3 * seconds for phase, seconds in predicted().items()}
    ms["iteration"] *= 4
    text = ",".join(f"{p}_ms" for p in ms) + "\n" + ",".join(map(str, ms.values())) + "\n"
    done, out = calibrated(tmp_path, text)
    loop_s = Machine.load(out).loop_s.median
    assert loop_s == pytest.approx(3 * ms["iteration"] / 4e3, rel=0.05)
    assert f"{'loop_s':32} {0.0:10.4g} -> {loop_s:10.4g}" in done.output
    assert "times the phases themselves" in done.output


def test_the_phases_of_a_calibrated_machine_are_those_of_the_log(tmp_path):
    ms = {phase: 1e3 * seconds for phase, seconds in predicted().items()}
    ms["iteration"] += 500
    text = ",".join(f"{p}_ms" for p in ms) + "\n" + ",".join(map(str, ms.values())) + "\n"
    _, out = calibrated(tmp_path, text)
    about = ["--machine", out, "--model", tmp_path / "m.json", "--ds-config", tmp_path / "ds.json"]
    shown = json.loads(run("simulate", *about, "--json").stdout)
    assert shown["forward_s"] == pytest.approx(ms["forward"] / 1e3, rel=0.05)
    assert shown["loop_s"] == pytest.approx(0.5, rel=0.05)
    plan = tmp_path / "plan.json"
    said = run("plan", *about, "-o", plan).output
    made = json.loads(plan.read_text())
    stock = next(p for p in made["alternatives"] if p["strategy"].startswith("stock ZeRO-3 offload"))
    assert stock["forward_s"] == pytest.approx(ms["forward"] / 1e3, rel=0.1)
    assert made["prediction"]["forward_s"] < stock["forward_s"]  # without DeepSpeed's hooks
    for prediction in (made["prediction"], stock):
        assert prediction["loop_s"] == pytest.approx(0.5, rel=0.05)
    assert " loop " in said
    assert "loop" not in run("simulate", "--machine", "h100-node", *about[2:]).output
