"""Tests that a question is answered as asked, or that the difference is said, at every door: the commands, Python and
HTTP.
"""

import inspect
import json
import re
from collections import Counter

import click
import ebbtide.tuner
import pytest
import torch
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from ebbtide.simulator import Machine, Plan, preset, workload_from_model
from ebbtide.simulator.analysis.what_if import _IN_WORKLOAD, WORKLOAD_FIELDS
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import CHANGEABLE
from ebbtide.tuner.cli import COMMANDS, main
from ebbtide.tuner.lazy_group import PATHS
from ebbtide.tuner.quantities import size_bytes
from ebbtide.tuner.service import answers
from ebbtide.tuner.service.requests import Answer, Simulate, WhatIf, machine_of

MODEL = "Llama 3.2 1B"


def silent(*_):
    """Do nothing with a progress report of a search."""


def tune(*words):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code in (0, 1), done.output
    return done


@pytest.mark.parametrize(("name", "gpus"), [("rtx4090", 1), ("rtx4090-x2", 2), ("rtx3090-x8", 8), ("h100-node", 1)])
def test_the_preset_of_n_cards_means_n_gpus_at_every_door(name, gpus):
    asked = ["--machine", name, "--model", MODEL, "--sequence", "256"]
    told = json.loads(tune("simulate", *asked, "--json").stdout)
    card = preset(name).device_name
    assert f" on {gpus} x {card}" in told["about"] or f" on {gpus} of 4 x {card}" in told["about"]
    work = workload_from_model(MODEL, preset(name), sequence=256)
    assert work.ranks_per_node == gpus
    assert Answer(machine=name, model=MODEL).job.data_parallel == gpus
    assert ebbtide.estimate(MODEL, batch=1, sequence=256, gpu=name).about == told["about"]
    one = json.loads(tune("simulate", *asked, "--data-parallel", 1, "--json").stdout)
    assert one["about"] == told["about"].replace(f"on {gpus} x", f"on 1 of {gpus} x" if gpus > 1 else "on 1 x")
    assert Answer(machine=name, model=MODEL, gpus=1).job.data_parallel == 1


def test_a_request_makes_its_job_once_and_a_changed_copy_makes_another():
    request = Answer(machine="h200", model=MODEL, accumulation=2)
    assert request.job is request.job
    assert request.model_copy(update={"accumulation": 4}).job.accumulation == 4


def test_more_gpus_than_a_preset_has_name_the_preset_with_so_many():
    with pytest.raises(ValueError, match="take the preset rtx4090-x4"):
        ebbtide.estimate(MODEL, batch=1, sequence=256, gpu="rtx4090", gpus=3)


def test_the_first_line_of_every_command_names_the_job(tmp_path):
    plan = tmp_path / "plan.json"
    asked = ["--machine", "rtx3090-x2", "--model", "gpt2", "--sequence", "128"]
    line = "GPT-2 124M, 0.124 B parameters, on 2 x NVIDIA GeForce RTX 3090 (preset rtx3090-x2, rates from data sheets)"
    told = {
        "plan": tune("plan", *asked, "--quick", "-o", plan).stdout,
        "show": tune("show", plan).stdout,
        "simulate": tune("simulate", *asked).stdout,
        "simulate --plan": tune("simulate", *asked, "--plan", plan).stdout,
    }
    told["search"] = tune("search", *asked, "--trials", "3", "--free", "recompute", "--gpus", "2").stdout
    assert {name: out.splitlines()[0] for name, out in told.items()} == dict.fromkeys(told, line)
    assert all("tokens/s" in out for out in told.values())


def test_a_measured_machine_is_called_so(tmp_path):
    own = preset("rtx4090").model_copy(update={"measured_with": "tune profile", "name": "mine"})
    own.save(tmp_path / "m.json")
    told = tune("simulate", "--machine", tmp_path / "m.json", "--model", "gpt2", "--sequence", "128").stdout
    assert told.splitlines()[0].endswith("on 1 x NVIDIA GeForce RTX 4090 (mine, rates measured)")


QUESTIONS = [
    ("Llama 3 8B", "rtx4090", 1024),  # fits with ebbtide only
    ("Llama 3.2 1B", "h200", 512),  # fits without offload
    ("Llama 3 70B", "rtx4090", 512),  # nothing fits
]


@pytest.mark.parametrize(("model", "machine", "sequence"), QUESTIONS)
def test_one_question_has_one_answer_at_every_door(model, machine, sequence, tmp_path):
    told = ebbtide.estimate(model, batch=1, sequence=sequence, gpu=machine)
    page = answers.answer(Answer(machine=machine, model=model, sequence=sequence, timelines=False), silent)
    assert told.sentence == page["sentence"]
    assert told.in_short().startswith(told.sentence)
    assert told.fits is (page["verdict"] != "impossible")
    words = ["plan", "--machine", machine, "--model", model, "--sequence", sequence, "--quick", "-o", tmp_path / "p"]
    shown = CliRunner().invoke(main, [str(word) for word in words])
    assert shown.exit_code == (0 if told.fits else 2)
    if told.fits:
        assert told.sentence in " ".join(shown.stdout.split())
        chosen = "no offload" if told.strategy == "no offload" else "plan"
        row = next(row for row in page["rows"] if row["role"] == chosen)
        assert told.iteration_s == pytest.approx(row["iteration_s"], rel=1e-9)
        assert (told.gpu_bytes, told.host_bytes) == (row["device_peak_bytes"], row["host_peak_bytes"])
        assert told.gpu_limit_bytes == page["limits"]["device_bytes"]
    else:
        assert told.nearest
        assert told.sentence.removeprefix("Nothing fits: ").rstrip(".") in shown.output


KEY = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("host_gib", "says"), [(121, "Nothing fits: stock DeepSpeed needs "), (400, "DeepSpeed alone ")]
)
def test_a_job_that_can_have_no_plan_is_told_apart_from_one_that_does_not_fit(host_gib, says):
    config = {**KEY, "activation_checkpointing": {"cpu_checkpointing": True}}
    asked = {"batch": 1, "sequence": 1024, "gpu": "rtx4090", "host_memory_bytes": host_gib * 2**30}
    told = ebbtide.estimate("Llama 3 8B", ds_config=config, **asked)
    assert told.sentence.startswith(says)
    assert told.fits is says.startswith("DeepSpeed alone")
    assert "activation_checkpointing.cpu_checkpointing (true) must be absent to plan" in told.sentence


def test_the_ways_out_have_the_numbers_of_the_estimate_with_the_key():
    alone = ebbtide.estimate("Llama 3 8B", batch=1, sequence=1024, ds_config=KEY)
    planned = ebbtide.estimate("Llama 3 8B", batch=1, sequence=1024, ds_config={**KEY, "ebbtide": {"plan": "auto"}})
    assert (alone.fits, planned.fits) == (False, True)
    assert f"{planned.gpu_bytes / GIB:.1f} GiB of GPU memory" in alone.nearest[0]


def test_all_notes_are_told_at_every_door(tmp_path):
    config = {**KEY, "train_micro_batch_size_per_gpu": 1, "scheduler": {"type": "WarmupLR"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    work = workload_from_model(MODEL, preset("h200"), config, sequence=16384)
    assert len(work.notes) >= 3
    assert any("not simulated: scheduler" in note for note in work.notes)
    asked = ["--machine", "h200", "--model", MODEL, "--sequence", "16384", "--ds-config", tmp_path / "ds.json"]
    plan = tmp_path / "plan.json"
    printed = tune("plan", *asked, "--quick", "-o", plan).output
    body = {"machine": "h200", "model": MODEL, "sequence": 16384, "ds_config": config}
    doors = {
        "tune plan": " ".join(printed.split()),
        "the plan": " ".join(Plan.load(plan).reasons),
        "tune simulate": tune("simulate", *asked).output,
        "simulate --json": " ".join(json.loads(tune("simulate", *asked, "--json").stdout)["notes"]),
        "estimate": " ".join(ebbtide.estimate(MODEL, batch=1, sequence=16384, gpu="h200", ds_config=config).notes),
        "/answer": " ".join(answers.answer(Answer(**body), silent)["plan"]["reasons"]),
        "/simulate": " ".join(answers.simulate(Simulate(**body), silent)["notes"]),
    }
    for door, told in doors.items():
        for note in work.notes:
            assert note.split(" (")[0] in told, (door, note)


def test_host_memory_is_the_machines_at_every_door(tmp_path):
    given = 100 * GIB
    machine = preset("rtx4090-x2")
    work = workload_from_model(MODEL, machine, sequence=512)
    share = Limits.of(work, machine.with_rates(host_memory_bytes=given)).host_bytes
    body = Answer(machine="rtx4090-x2", model=MODEL, sequence=512, host_memory_bytes=given, timelines=False)
    asked = ["--machine", "rtx4090-x2", "--model", MODEL, "--sequence", "512", "--host-memory", "100G"]
    plan = tmp_path / "plan.json"
    tune("plan", *asked, "--quick", "-o", plan)
    doors = {
        "/answer": answers.answer(body, silent)["limits"]["host_bytes"],
        "plan()": ebbtide.plan(work, machine, host_memory_bytes=given, effort=0.02).prediction.limits["host"],
        "tune plan": Plan.load(plan).prediction.limits["host"],
        "estimate": ebbtide.estimate(
            MODEL, batch=1, sequence=512, gpu="rtx4090-x2", host_memory_bytes=given
        ).host_limit_bytes,
    }
    assert set(doors.values()) == {share}, doors
    assert f"of {share / GIB:.1f} GiB usable" in tune("simulate", *asked).stdout


@pytest.mark.parametrize(
    ("gib", "words"), [(24, "taken as the 23.6 GiB"), (48, "has 23.6 GiB of GPU memory"), (16, "")]
)
def test_gpu_memory_that_is_not_the_cards_own_is_told_and_the_same_everywhere(gib, words):
    asked = ["--machine", "rtx4090", "--model", MODEL, "--sequence", "512", "--gpu-memory", f"{gib}GiB"]
    done = tune("simulate", *asked)
    assert words in done.stderr
    told = ebbtide.estimate(MODEL, batch=1, sequence=512, gpu_memory_bytes=gib * GIB)
    assert any(words in note for note in told.notes)
    assert f"of {told.gpu_limit_bytes / GIB:.1f} GiB usable" in done.stdout
    for name in ("gpu_memory_bytes", "device_memory_bytes"):
        scenario = Answer(machine="rtx4090", model=MODEL, sequence=512, timelines=False, **{name: gib * GIB})
        assert answers.answer(scenario, silent)["limits"]["device_bytes"] == told.gpu_limit_bytes
    own = preset("rtx4090").model_copy(update={"measured_with": "tune profile"})
    if gib == 48:
        with pytest.raises(ValueError, match="must be at most what the machine has"):
            ebbtide.estimate(MODEL, batch=1, sequence=512, gpu=own, gpu_memory_bytes=gib * GIB)


def test_a_card_without_a_preset_is_answered_with_flags_that_work():
    refused = CliRunner().invoke(main, ["simulate", "--machine", "V100", "--model", MODEL])
    assert refused.exit_code == 2
    flags = refused.output.partition("data sheet: ")[2].split()
    told = json.loads(tune("simulate", *flags, "--model", MODEL, "--sequence", "256", "--json").stdout)
    assert "changed as described" in told["about"]


def test_python_errors_name_arguments_and_commands_name_flags():
    with pytest.raises(ValueError, match="must be given as a JSON file") as refused:
        ebbtide.estimate("gone.json", batch=1, sequence=8)
    assert "--" not in str(refused.value)
    assert "(--model)" in CliRunner().invoke(main, ["simulate", "--machine", "h200", "--model", "gone.json"]).output
    with pytest.raises(ValueError, match="host memory") as short:
        ebbtide.tuner.plan(workload_from_model("Llama 3 70B", preset("rtx4090")), preset("rtx4090"))
    assert "--" not in str(short.value)
    told = ebbtide.estimate(MODEL, batch=1, sequence=16384, gpu="h200")
    made = ebbtide.plan(workload_from_model(MODEL, preset("h200")), preset("h200"), effort=0.02)
    assert [text for text in (*told.notes, *made.reasons) if "(--" in text] == []


@pytest.mark.parametrize(("text", "size"), [("64G", 64 * GIB), ("512M", 2**29), ("1T", 2**40), ("64GB", 64 * 10**9)])
def test_sizes_are_read_as_slurm_writes_them(text, size):
    assert size_bytes(text) == size


def test_both_names_of_accumulation_are_one():
    by = {
        name: workload_from_model(MODEL, preset("rtx4090"), sequence=64, **{name: 4})
        for name in ("accumulation", "gradient_accumulation_steps")
    }
    assert by["accumulation"] == by["gradient_accumulation_steps"]
    assert by["accumulation"].gradient_accumulation_steps == 4
    with pytest.raises(ValueError, match="two names of one number"):
        workload_from_model(MODEL, preset("rtx4090"), accumulation=4, gradient_accumulation_steps=2)


def test_keyword_arguments_have_names_that_tab_shows():
    fields = {name for name in (*CHANGEABLE, *WORKLOAD_FIELDS) if name not in _IN_WORKLOAD}
    assert fields <= set(inspect.signature(ebbtide.what_if).parameters)
    planner = set(inspect.signature(ebbtide.tuner.plan).parameters)
    assert planner <= set(inspect.signature(ebbtide.plan).parameters)
    for kind in (Machine, Plan, preset("h200")):
        assert not {"parse_obj", "construct", "dict"} & set(dir(kind))
        assert "save" in dir(kind)


def test_stock_is_a_strategy_of_a_what_if():
    work, machine = workload_from_model(MODEL, preset("rtx4090"), sequence=64), preset("rtx4090")
    named, plain = (ebbtide.what_if(work, machine, [name], n_jobs=1) for name in ("stock", "zero3_offload"))
    assert named.equals(plain)
    body = {"machine": "rtx4090", "model": MODEL, "sequence": 64, "gpu_memory_bytes": 16 * GIB}
    (row,) = answers.what_if(WhatIf(**body, strategies=["stock"]), silent)["rows"]
    assert (row["strategy"], row["gpu_memory_bytes"]) == ("zero3_offload", 16 * GIB)
    assert machine_of(Answer(machine="rtx4090", model=MODEL)).device_memory_bytes == machine.device_memory_bytes


NO_PATH = {
    *("free", "subgroup_size", "tag", "name", "host", "token", "against", "machine", "model", "strategy", "command"),
    *("allow_host", "push", "show", "study"),
}


def test_tab_completes_paths_names_and_machines():
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in COMMANDS]
    texts = {p.name for command in commands for p in command.params if p.type is click.STRING}
    assert texts <= NO_PATH, "a text option must be a path or be listed as no path"
    assert {"ds_config", "plan_file", "output"} <= PATHS
    complete = ShellComplete(main, {}, "tune", "_TUNE_COMPLETE")
    for words in (["show"], ["plan", "--ds-config"], ["plan", "-o"], ["simulate", "--plan"], ["calibrate", "--runs"]):
        (item,) = complete.get_completions(words, "p")
        assert item.type == "file", words
    found = {item.value for item in complete.get_completions(["plan", "--model"], "llama-3")}
    assert "llama-3-8b" in found
    for name in found:
        assert " " not in name
        workload_from_model(name, preset("h200"))
    assert {"h200"} == {item.value for item in complete.get_completions(["calibrate"], "h2")}


def test_help_has_headings_whole_sentences_and_unbroken_examples():
    told = CliRunner().invoke(main, ["--help"]).output
    assert "..." not in told.partition("Commands:")[2]
    assert "Search for the best plan for training on a machine, and explain why it is the best." in " ".join(
        told.split()
    )
    told = CliRunner().invoke(main, ["plan", "--help"]).output
    assert [line for line in ("The machine:", "The training job:", "Output:") if line not in told.splitlines()] == []
    example = "tune plan --machine h200 --model config.json --ds-config ds.json --gpu-memory 40GiB"
    assert any(line.strip() == example for line in told.splitlines())


def others():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        yield transformers.ViTForImageClassification(transformers.ViTConfig())
        yield transformers.BertForSequenceClassification(transformers.BertConfig())
        small = {"num_hidden_layers": 2, "num_experts": 8}
        yield transformers.Qwen3MoeForSequenceClassification(transformers.Qwen3MoeConfig(**small))
        yield transformers.ConvNextForImageClassification(transformers.ConvNextConfig())
        yield torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(512, 8, batch_first=True), 2)


@pytest.mark.parametrize("number", range(5))
def test_a_module_without_a_vocabulary_is_estimated(number):
    module = list(others())[number]
    work = workload_from_model(module, preset("rtx4090"), sequence=197, micro_batch=8)
    assert work.params == sum(p.numel() for p in module.parameters())
    assert ebbtide.estimate(module, batch=8, sequence=197).fits


LONG = {**KEY, "train_micro_batch_size_per_gpu": "auto", "scheduler": {"type": "WarmupLR"}, "memory_breakdown": True}
TOLD = {
    "long": ("Llama 3.2 1B", "h200", {"sequence": 16384}, LONG),
    "mixture of experts": ("Mixtral 8x7B", "h100-node", {"sequence": 512, "accumulation": 2}, None),
    "two nodes": ("Llama 3.2 3B", "h100-node", {"sequence": 512, "data_parallel": 8, "accumulation": 4}, None),
    "more memory": ("Llama 3.2 1B", "rtx4090", {"sequence": 512, "gpu_memory": "24GiB", "accumulation": 4}, KEY),
    "nothing fits": ("Llama 3 70B", "rtx4090", {"sequence": 512, "gpu_memory": "24GiB"}, LONG),
}


def repeated(texts):
    """Return the sentences of four words or more that occur more than once in texts of lines."""
    lines = [line.strip(" -").removeprefix("note: ") for text in texts for line in text.splitlines()]
    said = [part for line in lines for part in re.split(r"; |\. ", line) if len(part.split()) > 3 and "│" not in part]
    return {sentence for sentence, times in Counter(said).items() if times > 1}


@pytest.mark.parametrize("case", TOLD)
def test_no_sentence_is_told_twice(case, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    model, machine, about, config = TOLD[case]
    asked = ["--machine", machine, "--model", model]
    for name, value in about.items():
        asked += [f"--{name.replace('_', '-')}", value]
    if config is not None:
        (tmp_path / "ds.json").write_text(json.dumps(config))
        asked += ["--ds-config", tmp_path / "ds.json"]
    plan = tmp_path / "plan.json"
    full = [word if word != "--data-parallel" else "--gpus" for word in asked]
    commands = {
        "plan --quick": ["plan", *asked, "--quick", "-o", plan],
        "plan": ["plan", *asked, "--why", "-o", plan],
        "simulate": ["simulate", *asked],
        "search": ["search", *full, "--global-batch", 32, "--trials", 3, "-o", tmp_path / "found.json"],
    }
    if case != "nothing fits":
        commands["show"] = ["show", plan]
    for name, words in commands.items():
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code in (0, 1, 2), done.output
        assert not repeated([done.stdout, done.stderr]), name
        if name in ("plan --quick", "simulate") and done.exit_code < 2:
            told = CliRunner().invoke(main, [*map(str, words), "--json"])
            found = json.loads(told.stdout)
            assert not repeated([*found.get("reasons", []), *found.get("notes", []), told.stderr]), name


def test_a_changed_setting_is_not_told_as_assumed(tmp_path):
    job = Job.of_deepspeed(MODEL, {"bf16": {"enabled": True}, "gradient_clipping": "auto"}, sequence=256)
    assert len([note for note in job.estimate_notes if "not given" in note]) == 3
    assert [note for note in job.changed(micro_batch=4, zero_stage=2).estimate_notes if "not given" in note] == [
        "gradient_accumulation_steps: not given -> 1"
    ]
    asked = ["--machine", "rtx4090", "--model", MODEL, "--sequence", "256", "--global-batch", 8, "--trials", 2]
    told = json.loads(tune("search", *asked, "-o", tmp_path / "found.json", "--json").stdout)["notes"]
    assert not [note for note in told if "not given" in note]
