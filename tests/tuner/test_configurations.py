"""Tests of `tune search` over training configurations: the fastest configuration, the reasons why others
do not fit, and real trial runs.
"""

import io
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from ebbtide.simulator import build_strategy, preset, workload_from_model
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.offloading import offloading
from ebbtide.simulator.limits import Limits
from ebbtide.tuner import plan
from ebbtide.tuner.cli import main
from ebbtide.tuner.configurations import report
from ebbtide.tuner.configurations.deciding import explore
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome, SearchQuestion
from ebbtide.tuner.configurations.search_answer import SearchAnswer
from ebbtide.tuner.configurations.space import KNOBS, Configuration, Space
from ebbtide.tuner.placements import decision
from rich.console import Console

PLANNED = ("optimizer", "parameters")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 5504,
    "vocab_size": 32000,
}


def question(**changes):
    return SearchQuestion(LLAMA, preset("h100-node"), sequence=1024, **changes)


def outcome(tokens_per_s=1.0, device=1, why="", **knobs):
    return ConfigurationOutcome(
        configuration=Configuration(**knobs),
        iteration_s=1.0,
        tokens_per_s=tokens_per_s,
        device_peak_bytes=device,
        host_peak_bytes=1,
        why_not=why,
    )


def answer(*outcomes, free=("offload",), **fields):
    return SearchAnswer(Space.of(Configuration(), free), outcomes, **{"complete": True, **fields})


def test_every_configuration_has_the_global_batch():
    space = Space.of(Configuration(gpus=4), ("micro_batch", "accumulation", "gpus"), 48)
    every = list(space)
    assert {c.global_batch for c in every} == {48}
    assert {c.gpus for c in every} == {1, 2, 4}
    assert {c.micro_batch for c in every if c.gpus == 4} == {1, 2, 3, 4, 6, 12}
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("base", "free", "batch", "says"),
    [
        (Configuration(gpus=4), ("recompute",), 8, r"but 8 is not: .*search micro_batch or accumulation too"),
        (Configuration(gpus=4), ("recompute",), 7, r"multiple of the 4 GPUs, but got 7: take another number of GPUs"),
        (Configuration(), ("recompute",), 0, r"the global batch.* must be >= 1"),
        (Configuration(micro_batch=3), ("recompute",), 8, r"micro_batch or accumulation too"),
        (Configuration(gpus=4), KNOBS, 10**9, "accumulation must be at most 1024 micro-batches"),
        (
            Configuration(zero_stage=2, offload="nvme"),
            ("micro_batch",),
            None,
            "offload nvme needs ZeRO-3, but got zero",
        ),
        (Configuration(), ("colour",), None, r"the settings to search.* must be some of .*, but got colour"),
        (Configuration(), (), None, r"the settings to search.* must be some of .*, but got nothing"),
    ],
)
def test_a_space_that_cannot_be_is_refused(base, free, batch, says):
    with pytest.raises(ValueError, match=says) as caught:
        Space.of(base, free, batch, fixed=("accumulation",) if "accumulation" not in free else ())
    assert "--" not in re.sub(r" \(--[^)]*\)", "", str(caught.value))


def test_a_subgroup_size_means_nothing_without_offload():
    space = Space.of(Configuration(), ("offload", "sub_group_size"))
    assert sum(c.offload == "none" for c in space) == 1
    assert sum(c.offload == "optimizer" for c in space) == 1, "each plan chooses its own"


def test_the_front_has_no_outcome_that_another_one_beats():
    fast, lean, worse = outcome(9.0, 80), outcome(5.0, 40), outcome(4.0, 60)
    front = answer(lean, worse, fast, outcome(99.0, 10, why="10 GiB are missing")).front
    assert front == [fast, lean]


def test_it_says_that_not_offloading_is_best():
    told = answer(outcome(2.0, offload="none"), outcome(1.0, offload="optimizer")).remarks()
    assert "not offloading is best: 2.00x as fast as offloading" in told


def test_it_says_when_nothing_fits_without_offload():
    told = answer(
        outcome(2.0, 9, why="needs 3.0 GiB more GPU memory", offload="none"), outcome(1.0, offload="optimizer")
    ).remarks()
    assert any("does not fit. The closest configuration needs 3.0 GiB more GPU memory" in t for t in told)


def test_it_says_that_fewer_gpus_do():
    told = answer(outcome(100.0, gpus=4), outcome(97.0, gpus=2), free=("gpus",)).remarks()
    assert any(t.startswith("fewer GPUs are enough: 2 GPUs") and "97%" in t for t in told)
    told = answer(outcome(100.0, gpus=4), outcome(60.0, gpus=2), free=("gpus",)).remarks()
    assert not any("fewer GPUs" in t for t in told)


def test_a_knobs_cost_is_the_best_that_its_value_allows():
    found = answer(
        outcome(10.0, recompute=False),
        outcome(8.0, recompute=True),
        outcome(9.0, recompute=True, micro_batch=2),
        free=("recompute",),
    )
    assert found.costs() == {"recompute": {False: 1.0, True: 0.9}}


def test_a_tie_is_called_one():
    told = answer(outcome(100.0), outcome(99.6, offload="none")).remarks()
    assert any("makes no difference" in t and "not offloading reaches 99.6%" in t for t in told)


def test_what_lies_within_the_interval_is_no_difference():
    near = answer(outcome(100.0), outcome(95.0, offload="none"))
    assert any("offloading is best: 1.05x" in told for told in near.remarks())
    (told,) = [t for t in replace(near, spread=0.13).remarks() if "offloading" in t]
    assert "makes no difference within the error of predictions (13%): not offloading reaches 95.0%" in told


def test_the_least_that_is_missing_is_told():
    told = answer(
        ConfigurationOutcome(
            configuration=Configuration(micro_batch=8), why_not="9.0 GiB are missing", missing_bytes=9
        ),
        ConfigurationOutcome(configuration=Configuration(), why_not="3.0 GiB are missing", missing_bytes=3),
    ).remarks()
    assert told[0].startswith("nothing fits. The closest configuration, ")
    assert "3.0 GiB are missing" in told[0]


def test_the_search_finds_what_simulating_everything_finds():
    shallow = {**LLAMA, "num_hidden_layers": 4}
    little = SearchQuestion(shallow, preset("h100-node"), sequence=1024, device_memory_bytes=7 * 2**30)
    space = Space.of(Configuration(gpus=2), [k for k in KNOBS if k != "sub_group_size"], 8)
    found = explore(little, space, trials=60)
    assert found.complete
    every = [little.answer(c) for c in space]
    assert len(found.outcomes) < 0.7 * len(every)
    fastest = max(o.tokens_per_s for o in every if o.fits)
    assert found.fitting[0].tokens_per_s >= 0.99 * fastest
    for c, bound in found.left.items():
        assert little.answer(c).tokens_per_s <= bound * (1 + 1e-6), c


def test_with_a_fixed_global_batch_accumulation_follows_from_the_others():
    space = Space.of(Configuration(gpus=2), ("micro_batch", "offload", "gpus"), 32)
    assert {c.accumulation for c in space} == {1, 2, 4, 8, 16, 32}
    found = explore(question(), space)
    assert not any("does not fit" in remark for remark in found.remarks())
    held = Space.of(Configuration(gpus=2, accumulation=4), ("micro_batch", "gpus"), 32, fixed=("accumulation",))
    assert {c.accumulation for c in held} == {4}


def test_what_was_not_tried_is_told_as_that():
    space = Space.of(Configuration(gpus=4), ("micro_batch", "gpus"), 64)
    found = explore(question(), space, trials=1)
    assert found.left
    untried = found.untried()["micro_batch"]
    assert untried
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(found, console)
    told = console.export_text()
    assert f"{next(iter(untried))}: not tried, at most" in told
    assert "does not fit" not in told


def test_the_fastest_has_the_plan_that_tune_plan_gives():
    found = explore(question(device_memory_bytes=7 * 2**30), Space.of(Configuration(), ("sub_group_size",)))
    work = workload_from_model(LLAMA, preset("h100-node"), sequence=1024)
    made = plan(work, preset("h100-node"), device_memory_bytes=7 * 2**30, offload_parameters=False)
    assert found.fitting[0].iteration_s == pytest.approx(made.prediction.iteration_s, rel=0.01)


def test_what_is_missing_is_the_least_of_all():
    tiny = question(device_memory_bytes=2**30, host_memory_bytes=2**30)
    space = Space.of(Configuration(gpus=2), [k for k in KNOBS if k != "sub_group_size"], 16)
    found = explore(tiny, space)
    assert not found.fitting
    least = min(tiny.answer(c).missing_bytes for c in space)
    assert min(o.missing_bytes for o in found.outcomes) <= least * 1.003


def offloads(optimizer, **more):
    return {"zero_optimization": {"stage": 3, "offload_optimizer": optimizer, **more}}


MOVED = {"activation_checkpointing": {"cpu_checkpointing": True}}
CPU = {"device": "cpu"}
PIPELINED = {"device": "nvme", "pipeline_read": True}


CONFIGS = {
    "none": {},
    "precision": {"fp16": {"enabled": True}},
    "fp32": {"gradient_clipping": 0.5},
    "automatic": {"bf16": {"enabled": "auto"}},
}


@pytest.mark.parametrize("given", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters", "nvme"])
def test_a_configuration_is_the_same_in_search_simulate_and_plan(given, offload):
    c = Configuration(micro_batch=2, accumulation=2, gpus=2, offload=offload)
    asked = question(ds_config=given)
    found = asked.answer(c)
    shape = {"sequence": 1024, "data_parallel": 2}
    # As `tune plan` and `tune simulate` are called: with flags, and with the config as it is.
    usual = workload_from_model(
        LLAMA, preset("h100-node"), given or None, micro_batch=2, gradient_accumulation_steps=2, **shape
    )
    emitted = workload_from_model(LLAMA, preset("h100-node"), found.deepspeed, **shape)
    for work in (usual, emitted):
        name, options = offloading(found.deepspeed).strategy(3)
        if offload in PLANNED:
            name, options = "ebbtide", {"plan": found.plan}
        simulated = simulate_fast(build_strategy(name, work, **options), preset("h100-node"))
        assert (simulated.iteration_s, simulated.device_peak_bytes, simulated.host_peak_bytes) == (
            found.iteration_s,
            found.device_peak_bytes,
            found.host_peak_bytes,
        ), (work.wire_dtype, name)


def test_little_memory_makes_it_offload_and_says_what_is_missing():
    small = question(device_memory_bytes=7 * 2**30)
    space = Space.of(Configuration(gpus=1), ("offload",))
    found = explore(small, space)
    fits = found.fitting[0]
    (lacks,) = [o for o in found.outcomes if not o.fits]
    assert fits.configuration.offload in PLANNED
    assert "GiB more GPU memory" in lacks.why_not
    work = workload_from_model(LLAMA, preset("h100-node"), sequence=1024)
    assert fits.plan.subgroups == work.subgroups, "the plan is for the workload it was made for"


def test_ranks_share_the_host_memory_that_is_given():
    machine = preset("h100-node")
    asked = question(host_memory_bytes=machine.host_memory_bytes // 2)
    for gpus in (1, 2, 4):
        work = asked.workload(Configuration(gpus=gpus, offload="optimizer"))
        less = machine.with_rates(host_memory_bytes=machine.host_memory_bytes // 2)
        assert asked.limits(work).host_bytes == Limits.of(work, less).host_bytes
    with pytest.raises(ValueError, match="must be at most what the machine has"):
        question(host_memory_bytes=2 * machine.host_memory_bytes).limits(work)


def test_state_that_memory_cannot_hold_is_stored_where_storage_is_given():
    small = {"device_memory_bytes": 7 * 2**30, "host_memory_bytes": 4 * 2**30}
    base = Configuration(gpus=1, offload="optimizer", sub_group_size=10**8)
    space = Space.of(base, ("recompute",))
    assert not explore(question(**small), space).fitting
    fits = explore(question(**small, storage={"/nvme": 10**12}), space).fitting[0]
    assert fits.plan.count("stored") > 0
    assert fits.plan.storage_dir == "/nvme"
    assert fits.host_peak_bytes <= small["host_memory_bytes"]


def test_steps_too_long_for_a_plan_search_are_planned_with_fewer_micro_batches(monkeypatch):
    monkeypatch.setattr(decision, "MOST_PASSES", 64)
    base = Configuration(gpus=1, accumulation=8, offload="optimizer")
    found = explore(question(device_memory_bytes=7 * 2**30), Space.of(base, ("sub_group_size",)))
    best = found.fitting[0]
    assert best.configuration.accumulation == 8
    work = workload_from_model(LLAMA, preset("h100-node"), sequence=1024, gradient_accumulation_steps=8)
    planned = build_strategy("ebbtide", work.cut_as(best.plan), plan=best.plan)
    assert best.iteration_s >= simulate_fast(planned, preset("h100-node")).iteration_s, "of all eight"


def test_a_search_that_is_cut_short_says_so():
    space = Space.of(Configuration(), ("micro_batch", "recompute", "zero_stage"), 8)
    found = explore(question(device_memory_bytes=7 * 2**30), space, trials=1)
    assert not found.complete
    assert sum(o.plan is not None for o in found.outcomes) == 1
    assert any("were not tried (--trials)" in r for r in found.remarks())


def test_the_command_writes_what_it_prints(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = f"search --machine h100-node --model {tmp_path}/config.json --global-batch 16 --gpus 2 --sequence 1024"
    words = [*asked.split(), "--free", "micro_batch,accumulation", "-o", str(tmp_path / "s.json")]
    printed = CliRunner().invoke(main, words)
    assert printed.exit_code == 0, printed.output
    record = json.loads((tmp_path / "s.json").read_text())
    assert printed.stdout.splitlines()[1].startswith(record["remarks"][0][:40])
    assert record["best"]["configuration"]["gpus"] == 2
    tried = {str(row["configuration"]["micro_batch"]) for row in record["outcomes"]}
    assert tried | set(record["untried"]["micro_batch"]) == {"1", "2", "4", "8"}
    again = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert again["best"] == record["best"], "a second search gave another result"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--global-batch", "7", "--free", "recompute", "--gpus", "4"], "multiple of the 4 GPUs"),
        (["--host-memory", "0GiB"], "greater than 0"),
        (["--gpu-memory", "1GiB"], "nothing fits"),
        (["--trials", "0"], "--trials"),
    ],
)
def test_what_cannot_be_searched_ends_with_one_line(tmp_path, words, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    common = ["search", "--machine", "h100-node", "--model", str(tmp_path / "config.json")]
    free = [] if "--free" in words else ["--free", "recompute"]
    ended = CliRunner().invoke(main, [*common, *free, *words])
    assert ended.exit_code == 2
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.output


def test_what_does_not_fit_is_one_document_of_json_and_told_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["search", "--machine", "h100-node", "--model", str(tmp_path / "config.json"), "--free", "recompute"]
    plain, as_json = (CliRunner().invoke(main, [*words, "--gpu-memory", "1GiB", *more]) for more in ([], ["--json"]))
    assert (plain.exit_code, as_json.exit_code) == (2, 2)
    assert plain.output.count("nothing fits. The closest") == 1
    record = json.loads(as_json.stdout)
    assert record["best"] is None
    assert record["remarks"][0].startswith("nothing fits. The closest")


def searched(tmp_path, config, *words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    common = ["search", "--machine", "h100-node", "--model", str(tmp_path / "config.json")]
    small = ["--gpus", "1", "--sequence", "512", "--ds-config", str(tmp_path / "ds.json")]
    ended = CliRunner().invoke(main, [*common, *small, *words, "--json"])
    assert ended.exit_code in (0, 2), ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"zero_optimization": {"sub_group_size": -5}}, "sub_group_size must be"),
        ('{"zero_optimization": {"sub_group_size": 1e400}}', "sub_group_size must be"),
        ({"optimizer": {"type": "SGD"}}, "optimizer.type must be"),
        ({"zero_optimization": {"stage": 0}}, "stage .*must be 1, 2 or 3"),
        ({"zero_optimization": [1]}, "zero_optimization must be an object"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "offload_optimizer must be an obj"),
        ({"train_micro_batch_size_per_gpu": "4"}, "train_micro_batch_size_per_gpu must be"),
        ({"train_batch_size": 32.0}, "train_batch_size must be"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
    ],
)
def test_a_bad_config_is_an_error_and_never_a_verdict(tmp_path, config, rule):
    import re

    for free in ("offload", "recompute"):
        ended = searched(tmp_path, config, "--free", free)
        assert ended.exit_code == 2, ended.output
        assert re.search(rule, ended.output), ended.output


def searched_and_simulated(tmp_path, config):
    """Return the row of `tune search` for a config on one GPU, and the output of `tune simulate` for it."""
    rows = json.loads(searched(tmp_path, config, "--free", "gpus", "--gpus", "1").stdout)["outcomes"]
    files = ["--model", str(tmp_path / "config.json"), "--ds-config", str(tmp_path / "ds.json")]
    words = ["simulate", "--machine", "h100-node", *files, "--sequence", "512", "--json"]
    (row,) = rows
    return row, json.loads(CliRunner().invoke(main, words).stdout)


@pytest.mark.parametrize(
    "config",
    [{"bf16": {"enabled": True}}, offloads({"device": "nvme"}, offload_param=CPU), {**offloads(CPU), **MOVED}],
    ids=["none", "nvme", "activations"],
)
def test_a_fixed_config_is_simulated_as_it_is(tmp_path, config):
    row, simulated = searched_and_simulated(tmp_path, config)
    assert row["iteration_s"] == pytest.approx(simulated["iteration_s"], rel=1e-9)
    assert row["device_peak_bytes"] == simulated["device_peak_bytes"]


@pytest.mark.parametrize("config", [offloads(CPU, offload_param=CPU), offloads({**CPU, "ratio": 0.5})])
def test_a_config_that_trains_under_a_plan_is_searched_under_one(tmp_path, config):
    # `tune search` simulates a DeepSpeed config with offloaded parameters or a Twin-Flow ratio under an ebbtide plan,
    # and not as stock DeepSpeed trains it. So `tune search` must predict a shorter iteration than `tune simulate`,
    # which simulates stock DeepSpeed.
    row, stock = searched_and_simulated(tmp_path, config)
    assert row["iteration_s"] < stock["iteration_s"]


def test_activation_offload_is_searched_with_what_it_goes_with(tmp_path):
    ended = searched(tmp_path, MOVED, "--free", "offload")
    record = json.loads(ended.stdout)
    assert record["best"]["configuration"]["offload"] != "none"
    assert any(
        "1 configurations were left out: offload_optimizer.device must be cpu or nvme" in r for r in record["remarks"]
    )
