"""Tests of `tune search --measure`: a script is trained in the best configurations, and what goes wrong is named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from ebbtide.runtime.frontdoor.configured import configured
from ebbtide.simulator import Plan, preset
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.tuner.calibrate.calibration import CalibrationError, calibrate, predicted_s
from ebbtide.tuner.calibrate.run_logs import FactsFromFlags, read_observations
from ebbtide.tuner.cli import main
from ebbtide.tuner.configurations.deciding import as_trained, explore
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome, SearchQuestion
from ebbtide.tuner.configurations.measuring import Measurement, filled, measure, places, with_config
from ebbtide.tuner.configurations.report import as_json
from ebbtide.tuner.configurations.search_answer import SearchAnswer
from ebbtide.tuner.configurations.space import Configuration, Space
from ebbtide.tuner.watched import TOO_LONG, ended

from tests.conftest import RANK_VARIABLES

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}
LARGE = "llama-3.2-1b"
RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "host_adam_params_per_s", "device_flops_per_s")
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "ebbtide": {"plan": "automatic"},
}
# Its parameters have the sizes of the model's, in two groups as those of the Trainer.
SCRIPT = """
import argparse, json, os, time
import deepspeed, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="ds.json")
parser.add_argument("--local_rank")
parser.add_argument("--batch", type=int)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--small", type=int, default=10**9)
parser.add_argument("--then", default="")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--less", type=int, default=0)
parser.add_argument("--ids", default="ids")
o = parser.parse_args()
config = json.load(open(o.config))
batch = o.batch or config["train_micro_batch_size_per_gpu"]
if batch > o.small:
    if o.then == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if o.then == "kill":
        os.kill(os.getpid(), 9)
    if o.then == "fail":
        raise ValueError("bad luck")
    time.sleep(1000)

class Part(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.p = nn.Parameter(torch.full((size,), 0.1))
    def forward(self, x):
        return x + (self.p * x).mean()

class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.parts = nn.ModuleList(Part(n) for n in sizes)
    def forward(self, ids):
        x = ids.float().mean().to(torch.bfloat16)
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) if o.recompute else part(x)
        return x

model = Net(json.load(open("sizes.json"))[o.less:])
groups = [{"params": [p for p in model.parameters() if (p.numel() > 64) == big]} for big in (True, False)]
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=o.config)
for step in range(o.steps * engine.gradient_accumulation_steps()):
    engine.backward(engine(torch.ones(batch, 32, dtype=torch.int64)))
    engine.step()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    sizes = SearchQuestion(MODEL, preset("rtx4090"), sequence=32).workload(Configuration()).parameters[0]
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


WORDS = ["search", "--machine", "rtx4090", "--model", "config.json", "--sequence", "32", "--keep-activations"]
TRAIN = [sys.executable, "train.py"]


def searched(*words):
    return CliRunner().invoke(main, [*WORDS, *words])


def asked(c=None, sequence=32):
    question = SearchQuestion(MODEL, preset("rtx4090-x2"), sequence=sequence)
    c = c or Configuration(micro_batch=2, accumulation=2, recompute=False)
    return question, question.answer(c, sizes=(10**9,))


@pytest.mark.slow
def test_the_best_are_trained_and_the_study_keeps_what_was_measured(folder, deepspeed_ops):
    """The script takes the micro-batch from the config that the command names. The largest one runs out of memory."""
    words = [
        "--global-batch",
        "8",
        "--zero-stage",
        "3",
        "--study",
        "sqlite:///s.db",
        "--measure",
        "2",
        "-o",
        "all.json",
        "--emit-deepspeed",
        "best.json",
    ]
    command = [*TRAIN, "--config=ds.json", "--small", "4", "--then", "oom"]
    done = searched(*words, "--free", "micro_batch,offload", "--", *command)
    assert done.exit_code == 0, done.output
    rows = json.loads((folder / "all.json").read_text())["measured"]
    lacking = [row for row in rows if row["out_of_memory"]]
    trained = [row for row in rows if row["measured_s"]]
    assert {row["configuration"]["micro_batch"] for row in lacking} == {8}
    assert "Tried to allocate 2.00 GiB" in lacking[0]["why_not"]
    assert len(trained) == 2
    assert len(rows) == len(lacking) + len(trained)
    for row in trained:
        assert len(row["steps_s"]) == 8
        assert row["ratio"] == pytest.approx(row["measured_s"] / row["iteration_s"])
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["measured_s"])
        assert row["tokens_per_sample"] == 32
    best = max(trained, key=lambda row: row["tokens_per_s"])
    assert json.loads((folder / "all.json").read_text())["best"]["configuration"] == best["configuration"]
    assert "fastest measured: 1 GPU, ZeRO-3" in done.output
    assert "ran out of memory after 0 steps: torch.OutOfMemoryError: CUDA out of memory" in done.output

    written = json.loads((folder / "best.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == best["configuration"]["micro_batch"]
    assert written["optimizer"] == CONFIG["optimizer"]
    assert ("ebbtide" in written) == (best["plan"] is not None)
    if best["plan"] is not None:
        assert Plan.load(written["ebbtide"]["plan"]) == Plan.from_fields(best["plan"])

    (name,) = [one.study_name for one in optuna.get_all_study_summaries("sqlite:///s.db")]
    trials = optuna.load_study(study_name=name, storage="sqlite:///s.db").trials
    kept = [trial for trial in trials if trial.user_attrs["source"] == "measured"]
    assert [trial.state.name for trial in kept] == ["COMPLETE" if row["measured_s"] else "FAIL" for row in rows]
    assert [trial.values for trial in kept if trial.values] == [
        [row["tokens_per_s"], row["device_peak_bytes"]] for row in trained
    ]
    assert {"measured_s", "predicted_s", "ratio", "why_not"} <= kept[-1].user_attrs.keys()
    assert kept[0].params["micro_batch"] == 8

    again = searched(*words, "--free", "micro_batch,offload", "--", *command)
    assert again.exit_code == 0, again.output
    assert json.loads((folder / "all.json").read_text())["measured"] == rows
    assert again.output.count("measured in an earlier search") == len(rows)
    assert len(optuna.load_study(study_name=name, storage="sqlite:///s.db").trials) == len(trials)


TRAINS = [
    ({}, ["--batch", "2"]),
    ({"zero_stage": 2}, ["--batch", "{micro_batch}"]),
    ({"zero_stage": 2, "offload": "none"}, ["--config", "ds.json"]),
    ({"recompute": True}, ["--recompute", "--config", "ds.json"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "words"), TRAINS)
def test_a_configuration_is_trained_as_asked(folder, deepspeed_ops, changes, words):
    question, outcome = asked(Configuration(**{"micro_batch": 2, "accumulation": 2, "recompute": False, **changes}))
    one = measure(question, outcome, [*TRAIN, *words])
    assert one.why_not == "", one.output
    assert len(one.seconds) == 8
    assert one.measured_s > 0


OTHERS = {
    "micro-batch": (["--batch", "4"], "must train with micro_batch 2, but has 4 (samples in a forward)"),
    "recompute": (["--recompute"], "the script recomputes activations, which is another configuration"),
    "model": (["--less", "1"], "must train the model of --model, with 115,008 parameters, but its model has 98,624"),
    "steps": (["--steps", "5"], "ended after 5 of 12 steps"),
    "failed": (["--small", "1", "--then", "fail"], "failed with exit code 1 after 0 steps: ValueError: bad luck"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_configuration_is_never_measured(folder, deepspeed_ops, name):
    words, says = OTHERS[name]
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "train_micro_batch_size_per_gpu": 2}))
    question, outcome = asked()
    one = measure(question, outcome, [*TRAIN, *words])
    assert (one.seconds, one.out_of_memory) == ((), False)
    assert says in one.why_not


@pytest.mark.slow
def test_another_number_of_ranks_and_another_precision_are_named(folder, deepspeed_ops):
    question, outcome = asked(Configuration(gpus=2, micro_batch=2, recompute=False))
    one = measure(question, outcome, [*TRAIN, "--config", "ds.json"])
    assert "must start 2 ranks, but starts 1. Search with --gpus 1, or write {gpus}" in one.why_not
    config = {k: v for k, v in CONFIG.items() if k != "bf16"}
    (folder / "ds.json").write_text(json.dumps(config))
    question, outcome = asked()
    one = measure(question, outcome, [*TRAIN, "--config", "ds.json"])
    assert "must train in bf16, but trains in fp32" in one.why_not


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks(folder, deepspeed_ops, launcher):
    from studies.bench.rank import free_port

    words = {
        "torchrun": ["torchrun", "--nproc-per-node={gpus}", f"--master-port={free_port()}"],
        "deepspeed": ["deepspeed", "--hostfile=", "--num_gpus={gpus}", f"--master_port={free_port()}"],
    }[launcher]
    question, outcome = asked(Configuration(gpus=2, micro_batch=2, recompute=False))
    one = measure(question, outcome, [*words, "train.py", "--config", "ds.json"])
    assert one.why_not == "", one.output
    assert len(one.seconds) == 8


def test_what_was_measured_calibrates_a_machine(tmp_path):
    """A machine with slower rates is recovered from measurements, which are its own predictions here."""
    usual = preset("rtx4090")
    slow = usual.with_rates(**{name: getattr(usual, name).median / 3 for name in RATES})
    measured = []
    for micro_batch in (1, 4):
        for offload in ("optimizer", "none"):
            c = Configuration(micro_batch=micro_batch, offload=offload, zero_stage=2)
            outcome = SearchQuestion(LARGE, usual).answer(c, sizes=(10**8,))
            ran = SearchQuestion(LARGE, slow).of(outcome.configuration)
            work, plan = estimated(ran, slow), outcome.plan
            name, options = ("ebbtide", {"plan": plan}) if plan else ran.offload.strategy(2)
            work = work.cut_as(plan) if plan else work
            seconds = simulate_fast(build_strategy(name, work, iterations=1, **options), slow).iteration_s
            measured.append(Measurement(outcome, (seconds,), tokens_per_sample=2048))
    answer = SearchAnswer(Space.of(Configuration(), ("offload",)), (), complete=True, measured=tuple(measured))
    record = {**as_json(answer), "job": {"model": LARGE, "sequence": 2048, "shape": {}}}
    (tmp_path / "all.json").write_text(json.dumps(record))
    seen = read_observations(tmp_path / "all.json", FactsFromFlags())
    for one in seen:
        assert predicted_s(one.build(slow), slow)["iteration"] == pytest.approx(one.measured_s["iteration"], rel=0.01)
    found = calibrate(usual, seen)
    assert found.left_pct < 0.2 * found.before_pct

    record["measured"] = [{**row, "measured_s": None} for row in record["measured"]]
    (tmp_path / "all.json").write_text(json.dumps(record))
    with pytest.raises(CalibrationError, match=r"must hold a measured configuration, but all\.json has none"):
        read_observations(tmp_path / "all.json", FactsFromFlags())


def processes_of(folder):
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(folder) in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, sys.argv[0], "child"], start_new_session=True)
time.sleep(1000)
"""


def test_a_command_that_hangs_is_ended_with_all_its_processes(tmp_path):
    (tmp_path / "hang.py").write_text(STUBBORN)
    began = time.monotonic()
    code, _ = ended([sys.executable, str(tmp_path / "hang.py")], tmp_path, {"MARK": str(tmp_path)}, limit_s=2)
    assert code is TOO_LONG
    assert not processes_of(tmp_path)
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_ends_its_command(folder, number):
    """The study keeps the trial as interrupted, and a later search measures it again."""
    (folder / "hang.py").write_text(STUBBORN)
    words = ["--free", "micro_batch", "--global-batch", "2", "--study", "sqlite:///s.db", "--measure", "1"]
    command = [sys.executable, "-m", "ebbtide.tuner", *WORDS, *words, "--", sys.executable, "hang.py"]
    # Shells start what runs in the background with SIGINT ignored, and this test too may run so.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command[1:3] = ["-c", f"{heard}from ebbtide.tuner.cli import main; main(sys.argv[1:])"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = lambda: [pid for pid in processes_of("ebbtide-measure-") if pid != process.pid]
    while process.poll() is None and len(started()) < 2:
        time.sleep(0.1)
    process.send_signal(number)
    said, _ = process.communicate(timeout=100)
    assert process.returncode not in (0, None), said
    assert not started(), said
    (name,) = [one.study_name for one in optuna.get_all_study_summaries("sqlite:///s.db")]
    trials = optuna.load_study(study_name=name, storage="sqlite:///s.db").trials
    assert trials[-1].user_attrs["why_not"].startswith("interrupted: ")
    assert trials[-1].state.name == "FAIL"


def outcome_of(gpus=1):
    return ConfigurationOutcome(iteration_s=1.0, tokens_per_s=100.0, configuration=Configuration(gpus=gpus))


FAILS = {
    "hangs": ("import time; time.sleep(1000)", "took 0 of 12 steps in 3 s (--measure-timeout)", False),
    "no engine": ("pass", "ended without a DeepSpeed engine that trains", False),
    "host memory": ("import os; os.kill(os.getpid(), 9)", "was killed after 0 steps", True),
    "memory": ("raise MemoryError('no room')", "ran out of memory after 0 steps: MemoryError: no room", True),
}


@pytest.mark.parametrize("name", FAILS)
def test_what_went_wrong_is_named(tmp_path, name):
    text, says, out_of_memory = FAILS[name]
    question, outcome = asked()
    one = measure(question, outcome, [sys.executable, "-c", text], 3.0 if name == "hangs" else 100.0)
    assert says in one.why_not
    assert one.out_of_memory is out_of_memory


def test_configurations_that_train_alike_are_measured_once():
    question = asked()[0]  # whose plans move no parameters to host memory, although some may
    space = Space.of(Configuration(micro_batch=2), ("offload", "recompute"), 2)
    found = explore(question, space, best=2)
    known = {as_trained(outcome) for outcome in found.fitting}
    assert len(known) >= 2
    assert {o.configuration.offload for o in found.fitting if o.plan} == {"optimizer", "parameters"}
    assert len({as_trained(o) for o in found.fitting if o.plan}) < len([o for o in found.fitting if o.plan])


def test_places_in_a_command():
    c = Configuration(micro_batch=4, recompute=False, gpus=2)
    command = ["x", "--b={micro_batch}", "{recompute}", '{"a": {gpus}}', "{other}", "{}"]
    assert places(command) == {"micro_batch", "recompute", "gpus"}
    assert filled(command, c) == ["x", "--b=4", "false", '{"a": 2}', "{other}", "{}"]
    with pytest.raises(RuleError, match=r"but got \{microbatch\}. Did you mean \{micro_batch\}\?"):
        places(["{microbatch}"])


def test_a_script_keeps_what_no_configuration_decides():
    given = {
        "train_batch_size": 64,
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 7,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "pin_memory": True},
        },
        "ebbtide": {"plan": "automatic", "device": "emulated", "checkpoint": {"interval_steps": 5, "dir": "kept"}},
    }
    wanted = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "sub_group_size": 9, "offload_optimizer": {"device": "cpu"}},
        "ebbtide": {"plan": "p.json"},
    }
    made = configured(given, wanted)
    assert made == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "sub_group_size": 9,
            "reduce_bucket_size": 7,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "ebbtide": {"plan": "p.json", "device": "emulated"},
    }
    assert configured(made, wanted) == made
    assert "ebbtide" not in configured(given, {k: v for k, v in wanted.items() if k != "ebbtide"})


def test_only_deepspeed_configs_in_a_command_are_exchanged(folder, tmp_path):
    wanted = {**CONFIG, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    command = ["train.py", "config.json", "nowhere.json", "--deepspeed=ds.json", "ds.json"]
    (tmp_path / "copies").mkdir()
    words = with_config(command, wanted, tmp_path / "copies")
    assert words[:3] == command[:3]
    assert words[3].startswith("--deepspeed=")
    for path in (words[3].removeprefix("--deepspeed="), words[4]):
        assert json.loads(Path(path).read_text())["train_micro_batch_size_per_gpu"] == 4
    assert json.loads((folder / "ds.json").read_text()) == CONFIG


REFUSED = {
    "no command": (["--measure", "2"], "--measure must be followed by the training command"),
    "no --measure": (["--", "true"], "a command has an effect only with --measure N"),
    "timeout alone": (["--measure-timeout", "5m"], "--measure-timeout has an effect only with --measure"),
    "no program": (["--measure", "1", "--", "no-such-program"], "must be a program on PATH"),
    "no place": (
        ["--measure", "1", "--free", "micro_batch,fused_loss", "--", "true"],
        "write {fused_loss} in the command where its value belongs",
    ),
    "misspelt": (["--measure", "1", "--", "true", "{microbatch}"], "Did you mean {micro_batch}?"),
    "nothing trains": (
        ["--measure", "2", "--free", "micro_batch", "--", "true"],
        "all failed. The last one ended without a DeepSpeed engine that trains",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused(folder, name):
    words, says = REFUSED[name]
    done = searched(*words)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


def test_what_a_command_has_no_place_for_is_not_varied(folder):
    done = searched("--measure", "1", "--global-batch", "2", "--json", "--", "true", "{kernels}")
    record = json.loads(done.stdout)
    assert done.exit_code == 2
    assert "kernels" in record["free"]
    assert {"fused_loss", "flash_attention", "gpus"}.isdisjoint(record["free"])
    assert "not varied, because the command has no place for them: " in done.stderr
    assert ", fused_loss False ({fused_loss}), " in done.stderr
    assert [row["why_not"] for row in record["measured"]]


@pytest.mark.parametrize(("tokens", "told"), [(100.0, False), (50.0, True), (None, False)])
def test_samples_of_another_length_are_told(tokens, told):
    one = Measurement(outcome_of(), (1.0,) * 8, tokens_per_sample=tokens)
    answer = SearchAnswer(Space.of(Configuration(), ("recompute",)), (one.outcome,), complete=True, measured=(one,))
    said = "the script's samples have 50 tokens, but the search assumed 100 (--sequence)"
    assert any(said in remark for remark in answer.remarks()) is told


def test_measured_speeds_that_cannot_be_told_apart():
    first = Measurement(outcome_of(), (1.0, 1.1, 1.2, 1.3))
    assert first.slowest_speed < first.tokens_per_s < first.quickest_speed
    assert Measurement(outcome_of(), (2.0,)).tokens_per_s == Measurement(outcome_of(), (2.0,)).slowest_speed == 50.0
