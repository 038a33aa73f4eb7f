"""Tests of the plan search for plans whose subgroups are parts of DeepSpeed's subgroups: DeepSpeed keeps
its `sub_group_size`, and the plan is as fast as with a smaller `sub_group_size`.
"""

import json

import ebbtide.tuner
import pytest
from click.testing import CliRunner
from ebbtide.simulator import Plan, build_schedule, simulate
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.decision import PlanQuestion, decide

from tests.tuner.test_search import workload
from tests.tuner.test_speculation import machine

WHOLE = 10**9


def job(count=5, size=5 * 10**7):
    """Return a workload for the plan search with all parameters in one DeepSpeed subgroup."""
    work = workload(count, size=size, forward_s=0.012)
    parameters = ((size // 4,) * (4 * count),)
    return work.model_copy(update={"parameters": parameters, "subgroup_size": size}).recut(WHOLE)


def test_pieces_are_planned_for_and_deepspeed_keeps_its_size():
    work, have = job(), machine()
    assert len(work.subgroups) == 1
    kept = ebbtide.tuner.plan(work, have, subgroup_sizes=(), memory_margin=0)
    made = ebbtide.tuner.plan(work, have, pieces=True, memory_margin=0)
    other = ebbtide.tuner.plan(work, have, memory_margin=0)
    assert made.deepspeed_subgroup_size == WHOLE == made.config_subgroup_size
    assert made.subgroup_count > 1
    assert any(made.updated_early)
    assert any(f"DeepSpeed keeps sub_group_size {WHOLE}" in reason for reason in made.reasons)
    assert other.deepspeed_subgroup_size == 0
    assert made.prediction.iteration_s < 0.98 * kept.prediction.iteration_s
    # DeepSpeed's tensors still take host memory for state that lives on the GPU. This is the only cost of pieces.
    assert made.prediction.iteration_s <= 1.02 * other.prediction.iteration_s


def test_its_prediction_counts_the_room_that_deepspeeds_tensors_keep():
    work, have = job(), machine()
    made = ebbtide.tuner.plan(work, have, pieces=True, memory_margin=0)
    cut = work.cut_as(made)
    assert cut.subgroups == made.subgroups
    assert cut.state_stays
    assert simulate(build_schedule(work, made), have).host_peak_bytes == pytest.approx(made.prediction.host_peak_bytes)
    apart = footprint(cut.model_copy(update={"state_stays": False}), made)["host"]
    resident = sum(n for n, p in zip(made.subgroups, made.placements, strict=True) if p == "resident")
    assert footprint(cut, made)["host"] == apart + 12 * resident


def test_pieces_are_never_stored():
    with pytest.raises(ValueError, match="must not be given if optimizer state is stored"):
        PlanQuestion.of(job(), machine(), pieces=True, storage={"/nvme": 10**12})


def test_below_zero_3_deepspeeds_size_means_nothing():
    flat = job().model_copy(update={"zero_stage": 2}).recut(WHOLE)
    found = decide(PlanQuestion.of(flat, machine(20), pieces=True, effort=0.1))
    assert found.search.workload.deepspeed_subgroup_size == 0


def test_the_command_keeps_the_size_of_the_config_everywhere(tmp_path):
    work = job()
    work.save(tmp_path / "w.json")
    machine().save(tmp_path / "m.json")
    given = ["--machine", tmp_path / "m.json", "--workload", tmp_path / "w.json"]

    def run(*arguments):
        done = CliRunner().invoke(main, [str(a) for a in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    out, config = tmp_path / "plan.json", tmp_path / "ds.json"
    run("plan", *given, "--subgroup-size", "pieces", "-o", out, "--emit-deepspeed", config)
    made = Plan.load(out)
    assert made.deepspeed_subgroup_size == WHOLE
    assert json.loads(config.read_text())["zero_optimization"]["sub_group_size"] == WHOLE
    again = json.loads(run("simulate", *given, "--plan", out, "--json"))
    assert again["iteration_s"] == pytest.approx(made.prediction.iteration_s, rel=1e-6)
    refused = CliRunner().invoke(
        main, ["plan", *map(str, given), "--subgroup-size", "pieces", "--storage", "/nvme:1TB", "-o", str(out)]
    )
    assert refused.exit_code == 2
    assert "must not be given if optimizer state is stored on a drive" in refused.output
