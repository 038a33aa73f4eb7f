"""Tests of the code of `make demo`: comparisons, the kill during a save, tables and pictures."""

import io
import json
import os
from dataclasses import replace

import pytest
import torch
from ebbtide.simulator import Lane, OpKind, Plan, Prediction, Span, Timeline
from rich.console import Console

from studies.demo import __main__ as demo
from studies.demo import tables as demo_tables
from studies.demo.crash import CrashError, checkpointed_plan, disk_bytes, kill_in_the_middle
from studies.demo.measure import toggled
from studies.demo.pictures import last_iterations, typical
from studies.demo.results import DemoRun, predicted_phases, same_bits, same_losses
from studies.trials.phase_process import PhaseProcess
from tests.studies.checkpoint_saver import save


def _prediction(strategy, iteration_s):
    return Prediction(
        strategy=strategy,
        iteration_s=iteration_s,
        iteration_low_s=iteration_s * 0.9,
        iteration_high_s=iteration_s * 1.1,
        forward_s=iteration_s * 0.3,
        backward_s=iteration_s * 0.5,
        step_s=iteration_s * 0.2,
        update_s=0.1,
    )


def _plan():
    return Plan(
        subgroup_size=10,
        placement=Plan.runs(["host", "host", "device"]),
        prediction=_prediction("ebbtide", 0.4),
        alternatives=(_prediction("twin-flow 0.5", 0.7), _prediction("zero3_offload", 0.6)),
    )


def _save_run(folder, name, losses, first=0, iterations=(1.0,), weight=1.0):
    (folder / "runs").mkdir(exist_ok=True)
    rows = [{"forward": 0.2, "backward": 0.3, "step": 0.5, "iteration": s} for s in iterations]
    facts = {"first_step": first, "losses": losses, "phases": rows, "tensors": 1}
    (folder / "runs" / f"{name}.json").write_text(json.dumps(facts))
    torch.save({"w": torch.tensor([weight])}, folder / "runs" / f"{name}.pt")
    return DemoRun.load(folder, name)


def test_resumed_losses_are_compared_with_the_end_of_the_whole_run(tmp_path):
    whole = _save_run(tmp_path, "whole", [5.0, 4.0, 3.0, 0.1 + 0.2])
    assert same_losses(whole, _save_run(tmp_path, "resumed", [3.0, 0.1 + 0.2], first=2))
    assert not same_losses(whole, _save_run(tmp_path, "off", [3.0, 0.3], first=2))
    assert not same_losses(whole, _save_run(tmp_path, "short", [3.0], first=2))


def test_one_bit_of_one_parameter_is_a_difference(tmp_path):
    _save_run(tmp_path, "a", [1.0])
    _save_run(tmp_path, "b", [1.0])
    _save_run(tmp_path, "c", [1.0], weight=1.0 + 2**-23)
    assert same_bits(tmp_path, "a", "b") == ()
    assert same_bits(tmp_path, "a", "c") == ("w",)


def test_times_are_the_medians_of_the_timed_steps(tmp_path):
    timed = _save_run(tmp_path, "stock", [1.0] * 5, iterations=(1.0, 9.0, 3.0))
    assert timed.medians()["iteration"] == 3.0
    assert timed.medians()["forward"] == 0.2
    with pytest.raises(ValueError, match="at least one step"):
        _save_run(tmp_path, "resumed", [1.0] * 3, iterations=()).medians()


def test_predictions_come_from_the_plan():
    assert predicted_phases(_plan(), "plan")["plan, predicted"]["iteration"] == 0.4
    assert predicted_phases(_plan(), "stock")["stock, predicted"]["iteration"] == 0.6
    one_thread = _plan().alternatives[0].model_copy(update={"strategy": "stock ZeRO-3 offload, 1 thread a rank"})
    started = _plan().model_copy(update={"alternatives": (one_thread,)})
    assert predicted_phases(started, "stock"), "a launcher's threads in the label change no strategy"
    bare = _plan().model_copy(update={"alternatives": (), "prediction": None})
    assert predicted_phases(bare, "stock") == predicted_phases(bare, "plan") == {}


@pytest.fixture
def saver(tmp_path):
    (tmp_path / "ckpt").mkdir()

    def start(**arguments):
        return PhaseProcess(save, {"folder": tmp_path / "ckpt", **arguments}, tmp_path / "log")

    return start


@pytest.mark.parametrize("commits", [1, 2])
def test_the_kill_hits_a_checkpoint_that_is_not_committed(saver, tmp_path, commits):
    folder = tmp_path / "ckpt"
    with saver(commits=commits) as child:
        crash = kill_in_the_middle(child, folder)
        assert not child.running
    number = int(crash.committed.removeprefix("step"))
    assert (folder / "latest").read_text() == crash.committed
    half = folder / f"step{number + 1}" / "state"
    assert 0 < crash.written_bytes <= disk_bytes(half.parent)
    assert half.stat().st_size < 8 * 2**20


def test_a_run_that_ends_too_early_is_no_crash(saver, tmp_path):
    with saver(commits=1, stop=True) as child, pytest.raises(CrashError, match="the run ended before that"):
        kill_in_the_middle(child, tmp_path / "ckpt")


def test_what_goes_while_it_is_counted_is_left_out(tmp_path, monkeypatch):
    for name in ("kept", "going"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").write_bytes(bytes(8192))
    whole = disk_bytes(tmp_path)
    scandir = os.scandir

    def scan(path):
        if os.fspath(path).endswith("going"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert 0 < disk_bytes(tmp_path) < whole


def test_checkpointed_plan_spreads_the_write_over_half_an_interval(tmp_path):
    plan = checkpointed_plan(_plan(), tmp_path, 4, checkpoint_bytes=800, iteration_s=2.0)
    assert plan.checkpoint.write_bytes_per_s == 200.0
    assert (plan.checkpoint.interval_steps, plan.checkpoint.dir) == (4, str(tmp_path))
    assert plan.placements == _plan().placements


def test_times_have_a_column_of_predictions_and_a_speedup():
    row = {"forward": 0.2, "backward": 0.3, "step": 0.5, "iteration": 1.0}
    columns = {"stock": row, "plan": {k: v / 2 for k, v in row.items()}} | predicted_phases(_plan(), "plan")
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(demo_tables.times(columns, "desk"))
    line = next(x for x in console.export_text().splitlines() if x.startswith("iteration"))
    assert line.split() == ["iteration", "1000", "ms", "500", "ms", "400", "ms", "2.00x"]


def _timeline(source):
    spans = []
    for i in range(3):
        spans += [
            Span(OpKind.FORWARD, Lane.COMPUTE, i, i + 0.3, layer=0, iteration=i),
            Span(OpKind.BACKWARD, Lane.COMPUTE, i + 0.3, i + 0.8, layer=0, iteration=i),
            Span(OpKind.UPDATE_HOST, Lane.HOST, i + 0.8, i + 1.0, subgroup=0, iteration=i),
            Span(OpKind.STEP_END, Lane.COMPUTE, i + 1.0, i + 1.0, iteration=i),
        ]
    spans.append(Span(OpKind.FORWARD, Lane.COMPUTE, 3, 3.2, layer=0, iteration=3))  # an iteration without a step
    return Timeline(spans=tuple(spans), source=source)


def test_last_iterations_are_complete_ones():
    cut = last_iterations(_timeline("measured"), 2)
    assert {s.iteration for s in cut.spans} == {1, 2}
    assert cut.source == "measured"
    assert min(s.start_s for s in cut.spans) == 0.0
    assert cut.makespan_s == 2.0


def test_the_turn_that_somebody_disturbed_is_not_the_one_that_is_shown():
    plain = last_iterations(_timeline("measured"), 2)
    slow = [replace(s, end_s=s.end_s + 5) for s in plain.spans]
    disturbed = replace(plain, spans=tuple(slow))
    assert typical([disturbed, plain, plain]) == plain
    assert typical([plain, disturbed]) == plain


def test_an_impossible_number_of_rounds_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--rounds", "0"])
    assert stopped.value.code == 2
    assert "--rounds must be >= 1, but got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo_on_a_small_model(quick_demo):
    left = {path.name for path in (quick_demo / "runs" / "demo").iterdir()}
    pictures = {"timeline.png", "memory.png", "stock_vs_plan.png"}
    assert left >= {"machine.json", "workload.json", "plan.json", "trace.json"} | pictures
    printed = (quick_demo / "printed.txt").read_text()
    assert printed.count("bit-identical") >= 2
    assert "NOT bit-identical" not in printed
    assert "of the next checkpoint on disk" in printed
    summary = json.loads((quick_demo / "runs" / "demo" / "summary.json").read_text())
    assert summary["bit_identical"] is True
    early = summary["early_updates"]
    assert early["early_subgroups"] > 0
    assert 0 <= early["clipped_steps"] <= early["steps"]
    assert "early updates (before the gradient norm is known)" in printed
    trace = json.loads((quick_demo / "runs" / "demo" / "trace.json").read_text())
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in processes] == ["predicted", "measured"]


@pytest.mark.parametrize("early", [False, True])
def test_the_plan_to_compare_with_has_early_updates_where_the_plan_has_none(early):
    plan = _plan()
    ways = tuple(way._replace(early=early).fitted() for way in plan.ways)
    other = toggled(plan.model_copy(update={"ways": ways}))
    assert other.updated_early == (not early,) * 3
    assert [way.placement for way in other.ways] == [way.placement for way in plan.ways]
    assert other.prediction is None
