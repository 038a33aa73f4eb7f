"""Tests of the GPU suite (`studies.gpu`) on machines without a GPU.

They rehearse the suite: it runs on the emulated device, so that no GPU time is lost to mistakes.
"""

import argparse
import json
import math
import os
import tarfile
import threading

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.hardware import builds

from studies.gpu import __main__ as command
from studies.gpu import contract
from studies.gpu.parts import BUDGET_S, PARTS, SECTIONS, sections_of
from studies.gpu.smoke import Synchronisations, _unequal, kernel_bits, one_step, ops, overlap
from studies.gpu.speed import against_control
from studies.gpu.suite import OutOfTimeError, Suite
from studies.trials import offload_trial
from studies.trials.offload_trial import make_engine, same_sums

REHEARSED = ["ablation"]  # `python -m studies.gpu --rehearse` runs every part


@pytest.mark.slow
def test_a_rehearsal_writes_its_records_and_says_emulated(tmp_path, deepspeed_ops, capsys):
    # Every result file must say that the device was emulated, so that nobody takes its numbers for a GPU's.
    arguments = ["--rehearse", "--out", str(tmp_path), "--part", *REHEARSED]
    try:
        command.main(arguments)
    except SystemExit as failed:
        logs = "".join(log.read_text()[-800:] for log in tmp_path.glob("logs/*.stderr"))
        pytest.fail(f"{failed}\n{logs}")
    assert "emulated: no GPU figures" in capsys.readouterr().out
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in REHEARSED}
    assert all(record["device_kind"] == "emulated" for record in found.values())
    assert not [name for name, record in found.items() if record.get("failed")]
    rows = found["ablation"]["rows"]
    assert [row["name"] for row in rows] == ["whole", "no_overlap", "no_prefetch", "all_host"]
    assert not [row for row in rows if "failed" in row]
    with tarfile.open(tmp_path / command.ARCHIVE) as tar:
        kept = tar.getnames()
    assert {"ablation.json", "logs/ablation.stderr", "tiny/trials/ablation.json"} <= set(kept)
    _goes_on_where_it_was(tmp_path, REHEARSED)
    assert [picture.name for picture in command.draw_parts(tmp_path)] == ["ablation.png"]
    assert (tmp_path / "ablation.png").stat().st_size > 5000


def _goes_on_where_it_was(folder, names):
    # Check that no section runs again: the result file of each section must keep its modification time.
    before = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in names}
    command.main(["--rehearse", "--out", str(folder), "--part", *REHEARSED])
    assert before == {name: (folder / f"{name}.json").stat().st_mtime_ns for name in names}


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path, "tiny", 1.0, 20_000, emulated=True)


def test_what_comes_first_on_a_new_machine(suite, only_rank, monkeypatch):
    monkeypatch.setattr("studies.gpu.smoke.settle", lambda: None)
    assert ops(suite)["correct"] is True
    compared = kernel_bits(suite)
    assert compared["values"] >= 100_000
    assert compared["differing"] == 0
    trained = one_step(suite)
    assert trained["correct"] is True
    assert trained["lanes_busy_s"] > 0


def test_host_memory_may_be_said_where_the_system_shows_less(tmp_path, monkeypatch):
    from ebbtide.simulator.estimates.presets import preset, preset_names

    monkeypatch.setattr("ebbtide.profiler.measure_machine", lambda *_, **__: preset(preset_names()[0]))
    suite = Suite(tmp_path, "tiny", 1.0, 20_000, emulated=True, host_gib=123.0)
    assert suite.machine().host_memory_bytes == 123 * 2**30
    assert suite.machine().host_memory_bytes == 123 * 2**30, "the machine differs from the saved one"


def test_every_way_to_wait_for_the_device_is_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    stock = torch.cuda.synchronize, torch.cuda.Event.synchronize
    with Synchronisations() as counted:
        torch.cuda.synchronize()
        torch.cuda.Event.synchronize(None)
    assert [place.split(" at ")[0] for place in counted.places] == ["synchronize", "Event.synchronize"]
    assert all("test_gpu.py:" in place for place in counted.places)
    assert stock == (torch.cuda.synchronize, torch.cuda.Event.synchronize)


def test_bits_are_compared_where_every_sum_has_one_order():
    before = torch.are_deterministic_algorithms_enabled()
    same_sums()
    try:
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("variant", "pinned"), [("ebbtide", False), ("stock", True)])
def test_a_plans_trial_begins_without_memory_that_torch_has_pinned(monkeypatch, variant, pinned):
    # A plan pins memory of its own. Memory that torch pins for DeepSpeed would be wasted, because torch never releases
    # it and rounds its size up to a power of two.
    configs = []

    def initialize(*, config, **_):
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr("deepspeed.initialize", initialize)
    args = argparse.Namespace(
        variant=variant,
        size="tiny",
        stage=3,
        micro_batch=1,
        accumulation=1,
        subgroup=1000,
        clipping=1.0,
        offload_param=False,
        plan=None,
        keep=0,
        device=None,
    )
    with pytest.raises(InterruptedError):
        make_engine(args)
    assert configs[0]["zero_optimization"]["offload_optimizer"]["pin_memory"] is pinned


def test_forked_studies_leave_the_driver_alone(monkeypatch):
    from studies.checkpoints.run import warm_up

    # So that the value that `warm_up` sets is restored after the test.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    warm_up()
    assert torch.cuda._nvml_based_avail()


def test_trials_run_side_by_side_where_nobody_times_them(tmp_path, monkeypatch):
    both = threading.Barrier(2)

    def trial(self, name, *arguments):
        both.wait(30)
        return {"name": name, "arguments": arguments}

    monkeypatch.setattr(Suite, "trial", trial)
    suite = Suite(tmp_path, "tiny", 1.0, 20_000, emulated=True, at_once=2)
    rows = suite.trials({"a": ["x"], "b": []})
    assert list(rows.items()) == [("a", {"name": "a", "arguments": ("x",)}), ("b", {"name": "b", "arguments": ()})]


def test_what_a_process_prints_is_kept_and_its_failure_is_a_line(suite):
    failed = suite.run("broken", ["no_such_module"], 30.0)
    assert "No module named no_such_module" in failed
    assert "logs/broken.stderr" in failed
    assert "no_such_module" in (suite.out / "logs" / "broken.stderr").read_text()


def test_what_takes_too_long_is_ended_with_its_children(suite):
    assert suite.run("endless", ["http.server", "0"], 0.3) == "took longer than 0 s"


def test_a_compilation_that_was_killed_before_blocks_no_process(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock = tmp_path / "ops" / "cpu_adam" / builds.LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    assert suite.run("any", ["this"], 30.0) is None
    assert not lock.exists()


def test_a_trial_is_not_measured_twice(suite, monkeypatch):
    ran = []

    def run(self, name, command, limit_s):
        ran.append(command)
        self.out.joinpath("tiny/trials/stock.json").write_text('{"variant": "stock"}')

    monkeypatch.setattr(Suite, "run", run)
    for _ in range(2):
        assert suite.trial("stock", "--variant", "stock")["name"] == "stock"
    assert len(ran) == 1
    suite.trial("stock", "--variant", "stock", "--clipping", "0")
    assert len(ran) == 2, "a trial with other arguments must run again"


def test_a_trial_clips_at_its_rate_and_tells_what_became_of_early_updates(tmp_path, only_rank):
    rows = {}
    for variant in ("stock", "ebbtide"):
        arguments = ["--json", str(tmp_path / "row.json"), "--device", "emulated", "--subgroup", "20000"]
        args = offload_trial.arguments().parse_args([*arguments, "--variant", variant, "--clip-rate", "0.5"])
        if variant == "ebbtide":
            engine = make_engine(args)
            plan = session_of(engine).plan.with_bits(early=True)
            engine.destroy()
            args.plan = tmp_path / "plan.json"
            plan.save(args.plan)
        rows[variant] = offload_trial.trial(args)
    stock, ours = rows.values()
    assert "early_updates_kept" not in stock
    assert ours["hash"] == stock["hash"]
    assert ours["steps_that_clipped"] == 5  # of 3 and 8
    assert ours["early_updates_kept"] > 0 < ours["early_updates_redone"]
    told = [ours[f"early_updates_{name}"] for name in ("kept", "redone", "paused")]
    assert sum(told) == 11


def test_plans_that_a_process_did_not_reach_are_rows_that_say_so(suite, monkeypatch):
    from ebbtide.simulator import Plan

    def run(self, name, command, limit_s):
        rows = {"rows": [{"name": "a", "iteration_s": 1.0}]}
        self.out.joinpath("tiny/trials/some.json").write_text(json.dumps(rows))
        return "took longer than 9 s"

    monkeypatch.setattr(Suite, "run", run)
    plan = Plan(subgroup_size=10, placement=Plan.runs(["host"]))
    rows = suite.plans("some", {"a": plan, "b": plan})
    assert [row.get("failed") for row in rows] == [None, "took longer than 9 s"]


def test_a_failed_section_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    def run(self, name, arguments, limit_s):
        if name == "ops":
            return "no compiler (exit status 1)"
        figures = {"correct": True, "size": self.size}
        self.out.joinpath(f"{name}.json").write_text(json.dumps(figures))
        return None

    monkeypatch.setattr(Suite, "run", run)
    with pytest.raises(SystemExit, match="failed or with other bits: ops"):
        command.main(["--rehearse", "--out", str(tmp_path), "--part", "smoke"])
    told = json.loads((tmp_path / "ops.json").read_text())
    assert told["failed"] == "no compiler (exit status 1)"
    assert (tmp_path / "one_step.json").exists()
    assert "no compiler" in capsys.readouterr().out


def test_every_section_has_its_part_and_its_time():
    assert {s for sections in PARTS.values() for s in sections} == set(SECTIONS) == set(BUDGET_S)
    assert [part for part, _ in sections_of(["machine", "smoke"])] == ["smoke"] * 4 + ["baseline"]
    assert sections_of([]) == [(p, s) for p, sections in PARTS.items() for s in sections]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--rehearse"):
        command.main(["--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --out DIR and --plot DIR must be given"),
        (["--out", "x", "--model-b", "2.5"], "--size (or --model-b) must be one of"),
        (["--out", "x", "--host-gib", "-1"], "--host-gib must be > 0, but got -1.0"),
        (["--out", "x", "--minutes", "0"], "--minutes must be > 0, but got 0.0"),
        (["--out", "x", "--part", "speeed"], "invalid choice: 'speeed'"),
    ],
)
def test_bad_input_is_told(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_a_folder_without_records_has_no_pictures(tmp_path):
    with pytest.raises(SystemExit, match="--plot must be a folder with result files"):
        command.main(["--plot", str(tmp_path)])


def test_no_part_runs_beyond_the_time_that_is_given(tmp_path):
    import time

    late = Suite(tmp_path, "tiny", 1.0, 20_000, emulated=True, deadline_s=time.monotonic())
    with pytest.raises(OutOfTimeError, match="--minutes"):
        late.left_s()
    assert late.trial("stock", "--variant", "stock")["failed"] == "out of time (--minutes)"
    stopped = kernel_bits(late)
    assert stopped["values"] == 0
    assert stopped["correct"] is False, "nothing was compared"


def test_a_difference_counts_only_where_stock_agrees_with_itself():
    def row(digest):
        return {"hash": digest, "iteration_s": 2.0}

    assert against_control(row("a"), row("a"), row("a"))["correct"] is True
    assert against_control(row("a"), row("a"), row("b"))["correct"] is False
    assert against_control(row("a"), row("b"), row("c"))["correct"] is None
    assert against_control(row("a"), {"failed": "x"}, row("c"))["correct"] is None
    assert against_control(row("a"), row("b"), row("a"))["correct"] is True


@pytest.fixture
def short_contract(monkeypatch):
    """Shorten the GPU suite's comparison of training results with stock DeepSpeed, bit for bit."""
    monkeypatch.setattr(contract, "IN_REHEARSAL", ("clips hard", "frozen parameters", "parameters in host memory"))
    monkeypatch.setattr(contract, "PLACEMENTS", {"all three": ["host", "device", "resident"]})
    monkeypatch.setattr(contract, "settle", lambda: None)


def test_frozen_parameters_and_those_in_host_memory_have_stocks_bits(suite, short_contract, only_rank):
    found = contract.contract(suite)
    assert [row["configuration"] for row in found["rows"]] == list(contract.IN_REHEARSAL)
    assert found["correct"] is True, found["rows"]
    assert found["left_out"] == []
    record = json.loads((suite.out / "contract.json").read_text())
    assert record["rows"] == found["rows"]


def test_stored_state_and_auto_have_stocks_bits(only_rank):
    stock = contract.train(contract.start())
    assert contract.differing(contract._stored({}, emulated=True), stock) == []
    assert contract.differing(contract._automatic({}, emulated=True), stock) == []


def test_a_contract_that_ends_early_has_its_rows_and_a_stock_that_fails_loses_no_others(
    suite, short_contract, monkeypatch
):
    # The file contract.json must have the results of all finished runs, although another run of stock DeepSpeed fails
    # and the comparison is then killed.
    asked = []

    def start(**options):
        asked.append(options)
        if len(asked) == 1:
            raise RuntimeError("no deterministic kernel")
        if len(asked) > 6:
            raise KeyboardInterrupt  # as if the process were killed
        return options

    monkeypatch.setattr(contract, "start", start)
    monkeypatch.setattr(contract, "attached", lambda engine, *_, **__: engine)
    monkeypatch.setattr(contract, "train", lambda engine: ({}, [], [1.0]))
    with pytest.raises(KeyboardInterrupt):
        contract.contract(suite)
    record = json.loads((suite.out / "contract.json").read_text())
    assert [(row["placement"], row["identical"]) for row in record["rows"]] == [("stock", None), ("all three", True)]
    assert record["rows"][0]["failed"] == "RuntimeError: no deterministic kernel"
    assert (record["compared"], record["correct"]) == (1, True)
    assert record["left_out"] == ["parameters in host memory"]


def test_the_suites_plan_keeps_the_engines_subgroups(suite, monkeypatch):
    asked = {}
    monkeypatch.setattr(Suite, "workload", lambda self: "workload")
    monkeypatch.setattr(Suite, "machine", lambda self: "machine")
    monkeypatch.setattr("ebbtide.tuner.plan", lambda *_, **options: asked.update(options))
    suite._plan_for("workload")
    assert asked["subgroup_sizes"] == ()
    assert not asked.get("pieces")


def test_a_comparison_of_runs_without_an_update_proves_nothing(suite, short_contract, monkeypatch):
    # On an H200 the loss scale of the fp16 configuration was so large that all steps overflowed. Stock DeepSpeed had
    # then created no Adam moments, and ebbtide's zeros were reported as other bits.
    monkeypatch.setattr(contract, "start", lambda **options: options)
    monkeypatch.setattr(contract, "train", lambda engine: ({}, [], [math.inf] * 6))
    found = contract.contract(suite)
    assert found["correct"] is None
    assert [row["identical"] for row in found["rows"]] == [None] * 3
    assert "must take at least one step, but it skipped all 6" in found["rows"][0]["failed"]


def test_the_fp16_configuration_skips_steps_and_takes_others(only_rank, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    norms = contract.train(contract.start(**contract.CONFIGURATIONS["fp16"]))[2]
    assert 0 < sum(map(math.isfinite, norms)) < len(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_compared_by_bits(dtype):
    values = torch.tensor([0.0, 1.0, math.nan, math.inf], dtype=dtype)
    assert _unequal(values, values.clone()) == 0
    assert _unequal(values, torch.tensor([-0.0, 1.0, math.nan, math.inf], dtype=dtype)) == 1
    assert _unequal(values, torch.tensor([0.0, 1.0, 2.0, math.inf], dtype=dtype)) == 1


def test_overlap_is_time_in_which_two_lanes_work():
    from ebbtide.simulator.schedule import Lane, OpKind, Span
    from ebbtide.simulator.timeline import Timeline

    spans = (
        Span(OpKind.STATE_H2D, Lane.H2D, 0.0, 2.0),
        Span(OpKind.UPDATE_HOST, Lane.HOST, 1.0, 4.0),
        Span(OpKind.FORWARD, Lane.COMPUTE, 0.0, 9.0),  # no op of an update
    )
    assert overlap(Timeline(spans=spans, source="measured")) == (1.0, 4.0)
