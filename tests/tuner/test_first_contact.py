"""Tests of what `tune` answers to a new user's mistakes in the shell.

Examples are wrong paths, misspelt names, taken ports, and a `tune run` of a script that does not use ebbtide.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from ebbtide.profiler import measure_machine
from ebbtide.simulator import Machine, Plan, simulate
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.tuner.cli import main
from ebbtide.tuner.quantities import seconds_text

from tests.runtime.checkpoint.conftest import Bench, some_state
from tests.tuner.test_cli import run
from tests.tuner.test_search import machine, workload


@pytest.mark.parametrize("command", [("verify",), ("prune", "--keep", "1")])
def test_a_folder_without_checkpoints_is_refused(tmp_path, command):
    done = run("checkpoint", command[0], tmp_path, *command[1:])
    assert done.exit_code == 2
    assert f"there is no checkpoint in {tmp_path}" in done.output


@pytest.fixture
def saved_by_a_trainer(tmp_path):
    """Return a folder with the folder of one checkpoint, as the Trainer saves it."""
    Bench(tmp_path / "out" / "checkpoint-4").save(some_state(), "global_step4")
    return tmp_path / "out"


@pytest.mark.parametrize("command", [("list",), ("verify",), ("prune", "--keep", "1")])
def test_the_folder_above_checkpoints_is_answered_with_theirs(saved_by_a_trainer, command):
    inside = saved_by_a_trainer / "checkpoint-4"
    told = run("checkpoint", command[0], saved_by_a_trainer, *command[1:]).output
    assert f"Give the folders in it that hold checkpoints: {inside}\n" in told
    told = run("checkpoint", command[0], inside / "global_step4", *command[1:]).output
    assert f"Give {inside}, the folder that holds this checkpoint's folder." in told
    assert "Give" not in run("checkpoint", command[0], inside, *command[1:]).output


@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_tag_that_is_not_there_is_answered_with_those_that_are(saved_by_a_trainer, command):
    to = ("--to", saved_by_a_trainer / "exported") if command == "export" else ()
    done = run("checkpoint", command, saved_by_a_trainer / "checkpoint-4", "--tag", "global_step5", *to)
    assert done.exit_code == 2
    assert "there is no checkpoint global_step5 in" in done.output
    assert "there are: global_step4" in done.output


@pytest.mark.parametrize(("given", "meant"), [("plna", "plan"), ("SIMULATE", "simulate"), ("verfiy", "verify")])
def test_a_misspelt_command_is_suggested(given, meant):
    done = run(given)
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.output


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["plan", "--json"], "machine"),
        (["plan", "--machine", "no such machine", "--model", "x", "--json"], "machine"),
        (["checkpoint", "verify", "/nowhere", "--json"], ""),
    ],
)
def test_an_error_under_json_is_json(arguments, key):
    done = run(*arguments)
    assert done.exit_code == 2
    (told,) = json.loads(done.output)["errors"]
    assert told["rule"]
    assert told["key"] == key


def test_the_ways_out_of_an_error_under_json_are_a_list(tmp_path):
    model = {"layers": 16, "hidden": 2048, "heads": 16, "vocabulary": 32000}
    (tmp_path / "model.json").write_text(json.dumps(model))
    asked = ["--machine", "rtx4090", "--model", tmp_path / "model.json", "--sequence", 16384, "--micro-batch", 4]
    done = run("plan", *asked, "--json", "-o", tmp_path / "plan.json")
    assert done.exit_code == 2
    (told,) = json.loads(done.stdout)["errors"]
    assert "short" in told["rule"]
    assert "--" not in told["rule"]
    assert told["ways"]
    for way in told["ways"]:
        assert way["flags"].startswith("--")
        assert way["iteration_s"] > 0
        assert way["tokens_per_s"] > 0


def test_a_success_under_json_ends_with_0(tmp_path):
    done = run("checkpoint", "list", tmp_path, "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, [])


def test_machines_and_strategies_are_completed():
    complete = ShellComplete(main, {}, "tune", "_TUNE_COMPLETE")
    found = {item.value for item in complete.get_completions(["plan", "--machine"], "rtx")}
    assert found >= {"rtx4090", "rtx3090"}
    assert all(name.startswith("rtx") for name in found)
    strategies = {item.value for item in complete.get_completions(["simulate", "--strategy"], "zero")}
    assert "zero3_offload" in strategies


def test_a_taken_port_and_a_token_that_no_header_carries_are_refused(tmp_path, monkeypatch):
    database = tmp_path / "jobs.db"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run("serve", "--port", port, "--db", database)
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use" in done.output
    monkeypatch.setenv("EBBTIDE_TOKEN", "p@ss/é")
    done = run("serve", "--port", 0, "--db", database)
    assert done.exit_code == 2
    assert "EBBTIDE_TOKEN may hold" in done.output
    assert "é" not in done.output
    assert not database.exists()


WITH_THE_KEY = "import os, pathlib; pathlib.Path(os.environ['EBBTIDE_TOOK']).touch()"


@pytest.mark.parametrize(
    ("script", "code", "told"), [("", 0, True), ("raise SystemExit(3)", 3, True), (WITH_THE_KEY, 0, False)]
)
def test_a_command_without_an_engine_that_has_the_key_is_told_at_its_end(script, code, told):
    command = [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--no-check", "--", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False, timeout=120)
    assert done.returncode == code
    assert ("no DeepSpeed engine with an optimizer was started on this node" in done.stderr) is told


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.45, "4.45 s"), (0.9996, "1.00 s"), (0.255, "255 ms"), (0.0023, "2.3 ms"), (170.3, "170 s")]
)
def test_times_have_one_form(seconds, text):
    assert seconds_text(seconds) == text


@pytest.fixture
def configs(tmp_path):
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    files = {
        "model.json": model,
        "ds.json": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "qlora.json": {**model, "quantization_config": {"load_in_4bit": True}},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "qlora.json"], "quantization_config must be absent"),
        (["--model", "model.json", "--mtbf", "4"], "a duration with its unit"),
        (["--model", "model.json", "--mtbf", "4s"], "Check the unit of --mtbf"),
    ],
)
def test_what_is_mixed_up_is_refused_before_any_search(configs, arguments, told, monkeypatch):
    monkeypatch.chdir(configs)
    monkeypatch.setattr("ebbtide.tuner.placements.decision.begun", None)
    done = run("plan", "--machine", "rtx4090", *arguments)
    assert done.exit_code == 2
    assert told in done.output


FILES = {
    "machine.json": "a machine file",
    "workload.json": "a workload file",
    "plan.json": "a plan file",
    "trace.json": "a trace file",
    "model.json": "a model's config",
    "ds.json": "a DeepSpeed config",
}


@pytest.fixture
def one_of_each_kind(configs):
    a_workload = workload(6)
    machine().save(configs / "machine.json")
    a_workload.save(configs / "workload.json")
    Plan(subgroup_size=10, subgroups=(10, 10), placement=Plan.runs(["host"] * 2)).save(configs / "plan.json")
    simulate(build_strategy("zero3_offload", a_workload, iterations=1), machine()).to_perfetto(configs / "trace.json")
    return configs


@pytest.mark.parametrize(
    ("command", "flag", "wanted"),
    [
        ("plan --model model.json --machine", "--machine", "a machine file"),
        ("plan --machine rtx4090 --workload", "--workload", "a workload file"),
        ("plan --machine rtx4090 --model", "--model", "a model's config"),
        ("plan --machine rtx4090 --model model.json --ds-config", "--ds-config", "a DeepSpeed config"),
        ("simulate --machine rtx4090 --model model.json --plan", "--plan", "a plan file"),
        ("search --machine rtx4090 --model", "--model", "a model's config"),
        ("search --machine rtx4090 --model model.json --ds-config", "--ds-config", "a DeepSpeed config"),
        ("calibrate h200 -o out.json --model model.json --runs", "--runs", "a workload file"),
        ("calibrate h200 -o out.json --runs train.log --model", "--model", "a model's config"),
        ("calibrate h200 -o out.json --runs train.log --workload", "--workload", "a workload file"),
        ("doctor --plan", "--plan", "a plan file"),
        ("doctor --ds-config", "--ds-config", "a DeepSpeed config"),
        ("show", "PLAN", "a plan file"),
        ("report plan.json --run", "--run", "a trace file"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_its_kind(one_of_each_kind, command, flag, wanted, monkeypatch):
    monkeypatch.chdir(one_of_each_kind)
    others = {path: kind for path, kind in FILES.items() if kind != wanted}
    assert len(others) == len(FILES) - 1
    for path, kind in others.items():
        done = run(*command.split(), path)
        assert done.exit_code == 2
        assert f"{flag} must be {wanted}, but {path} is {kind}" in done.output


def test_a_file_of_another_kind_is_refused_with_the_flag_for_it_if_there_is_one(configs, monkeypatch):
    monkeypatch.chdir(configs)
    told = run("plan", "--machine", "rtx4090", "--model", "ds.json").output
    assert told.endswith("is a DeepSpeed config. Give it as --ds-config\n")
    assert run("show", "ds.json").output.endswith("is a DeepSpeed config\n")


def test_a_flag_that_writes_a_file_is_not_advised_for_reading_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace.json").write_text('{"traceEvents": []}')
    told = run("simulate", "--machine", "rtx4090", "--workload", "trace.json").output
    assert told.endswith("is a trace file\n")


@pytest.mark.parametrize(("flag", "told"), [("--drive", "a folder that exists"), ("--storage-dir", "is a file")])
def test_a_folder_to_measure_that_is_none_is_refused(configs, flag, told, monkeypatch):
    monkeypatch.chdir(configs)
    for path in ("model.json", "absent") if flag == "--drive" else ("model.json",):
        done = run("profile", flag, path)
        assert done.exit_code == 2
        assert f"{flag} must be a folder" in done.output
        assert told in done.output
    assert not Path("absent").exists()


def test_a_measurement_from_the_cache_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ebbtide.profiler.machine.MOST_TIMES", 1)  # the first one may have been disturbed
    measured = measure_machine(seconds=0.1, elements=1000)
    done = run("profile")
    assert done.exit_code == 0
    assert "cached results of an earlier measurement. --fresh measures again" in done.output
    assert Machine.load("machine.json") == measured


@pytest.fixture
def foreign(tmp_path):
    """Return a folder with a model file. The names of folder, file and model have non-ASCII characters, and
    the text begins with the byte-order mark of Windows.
    """
    folder = tmp_path / "ein Ordner ä"
    folder.mkdir()
    model = {"name": "Größe 模型", "layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100}
    (folder / "modell ü.json").write_text(json.dumps(model, ensure_ascii=False), encoding="utf-8-sig")
    return folder


def test_names_of_any_language_in_any_locale(foreign):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))} | locale

    def tune(*words):
        command = [sys.executable, "-m", "ebbtide.tuner.cli", *words]
        done = subprocess.run(command, cwd=foreign, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    tune("plan", "--machine", "rtx4090", "--model", "modell ü.json", "-o", "plan é.json", "--emit-deepspeed", "ö.json")
    tune("show", "plan é.json")
    tune("report", "plan é.json", "-o", "bericht ü.html")
    plan = json.loads((foreign / "plan é.json").read_text(encoding="utf-8"))
    assert plan["about"].startswith("Größe 模型, ")


def test_no_file_is_read_or_written_in_the_locales_encoding():
    text = re.compile(r"""\.(read_text|write_text)\(|\.open\(["'][rwax]\+?["']\)""")
    root = Path(__file__).parents[2]
    files = [file for room in ("simulator", "profiler", "tuner", "runtime") for file in (root / room).rglob("*.py")]
    lines = [(file, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 10_000
    assert [f"{file}: {line}" for file, line in lines if text.search(line) and "encoding=" not in line] == []
