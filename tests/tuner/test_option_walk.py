"""Tests that every option of every `tune` command changes the result or is refused.

The options are read from click's command tree, so a new option fails the tests until it has a line in this file.
"""

import csv
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click
import ebbtide.tuner.placements.planning
import pytest
from click.testing import CliRunner
from ebbtide.simulator import preset, workload_from_model
from ebbtide.simulator.estimates.job import settings
from ebbtide.tuner.cli import main

from tests.machines import node

TINY = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "vocabulary": 2000, "name": "tiny"}
MIB = 2**20


@dataclass(frozen=True)
class Changes:
    """A test case of a command-line option of `tune`. The command runs once without and once with the arguments
    ``more``, which must change the outcome. Both runs also get the arguments ``beside``.
    """

    more: tuple[str, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A test case of an option that the `tune` command must refuse with an error that names the flag."""

    more: tuple[str, ...]
    says: str


def changes(*more: str, beside: tuple[str, ...] = ()) -> Changes:
    return Changes(more, beside)


MODEL = {
    "workload": Refused(("--workload", "w.json"), "exactly one of --workload and --model"),
    "model": changes("--model", "wide.json"),
    "ds_config": changes("--ds-config", "ds.json"),
}
PLAN = ("plan", "--machine", "h200", "--model", "m.json", "-o", "p.json")
SEARCH = ("search", "--machine", "h200", "--model", "m.json", "--free", "recompute", "--gpus", "1")
BASES = {
    "profile": ("profile",),
    "plan": PLAN,
    "show": ("show", "plan.json"),
    "simulate": ("simulate", "--machine", "h200", "--model", "m.json"),
    "search": SEARCH,
    "run": ("run", "--", "true"),
    "verify": ("verify", "--", "true"),
    "doctor": ("doctor",),
    "report": ("report", "plan.json"),
    "serve": ("serve",),
    "checkpoint list": ("checkpoint", "list", "."),
    "checkpoint verify": ("checkpoint", "verify", "."),
    "checkpoint prune": ("checkpoint", "prune", ".", "--keep", "1"),
    "checkpoint export": ("checkpoint", "export", ".", "--tag", "one", "--to", "out"),
    "calibrate": ("calibrate", "h200", "--runs", "runs.csv", "--model", "m.json", "-o", "c.json"),
}
CARD = {
    "flops": changes("--flops", "500TFLOPS"),
    "gpu_bandwidth": changes("--gpu-bandwidth", "1TB/s"),
    "link": changes("--link", "20GB/s"),
}
MEMORY = {
    **CARD,
    "gpu_memory": changes("--gpu-memory", "1300MiB"),
    "host_memory": changes("--host-memory", "20GiB"),
    "memory_margin": changes("--memory-margin", "20%"),
}
SPILLS = ("--machine", "rtx4090", "--model", "large.json", "--host-memory", "50GiB", "--subgroup-size", "2e8")
TABLE = {
    "profile": {
        "output": changes("-o", "other.json"),
        "storage_dir": changes("--storage-dir", "elsewhere"),
        "drive": changes("--drive", "/nvme"),
        "seconds": changes("--seconds", "7"),
        "fresh": changes("--fresh"),
        "ranks": changes("--ranks", "2"),
        "train_script": changes("--train-script", "train.py"),
        "launcher": changes("--launcher", "none", beside=("--train-script", "train.py")),
        "iterations": changes("--iterations", "9", beside=("--train-script", "train.py")),
        "go_on": changes("--continue", beside=("--train-script", "train.py")),
        "push": Refused(("--push", "http://h", "--train-script", "t.py"), "--push uploads a machine"),
        "replace": Refused(("--replace",), "--replace has an effect only with --push"),
        "arguments": changes("--", "--epochs", "1", beside=("--train-script", "train.py")),
        "as_json": changes("--json"),
    },
    "plan": {
        **MODEL,
        "machine": changes("--machine", "rtx4090"),
        "output": changes("-o", "other.json"),
        "emit_deepspeed": changes("--emit-deepspeed", "out.json"),
        **MEMORY,
        "offload_param": changes(
            "--no-offload-param", beside=("--machine", "rtx4090", "--model", "large.json", "--subgroup-size", "1e9")
        ),
        "subgroup_size": changes("--subgroup-size", "1e6"),
        "robust": changes("--robust"),
        "mtbf": changes("--mtbf", "4h"),
        "restart": changes("--restart", "600s", beside=("--mtbf", "4h")),
        "checkpoint_dir": changes("--checkpoint-dir", "ckpt", beside=("--mtbf", "4h")),
        "checkpoint_rate": changes("--checkpoint-rate", "2MB/s", beside=("--mtbf", "4h")),
        "storage": changes("--storage", "/nvme:1TB", beside=(*SPILLS, "--storage", "/pfs:1TB")),
        "endurance": changes("--endurance", "600", beside=(*SPILLS, "--storage", "/nvme:1TB")),
        "seed": changes(
            "--seed", "1", beside=("--model", "deep.json", "--gpu-memory", "70GiB", "--subgroup-size", "2e8")
        ),
        "why": changes("--why"),
        "faster": changes("--faster", "1", beside=("--model", "deep.json", "--accumulation", "4")),
        "quick": changes(
            "--quick", beside=("--machine", "a100-node", "--model", "deep.json", "--subgroup-size", "1e8")
        ),
        "as_json": changes("--json"),
    },
    "show": {"plan_file": changes("second.json"), "as_json": changes("--json")},
    "simulate": {
        **MODEL,
        "machine": changes("--machine", "rtx4090"),
        "clip_rate": Refused(("--clip-rate", "5%"), "--clip-rate has an effect only with --plan"),
        "plan_file": changes("--plan", "plan.json"),
        "strategy": changes("--strategy", "superoffload"),
        **MEMORY,
        "trace": changes("--trace", "t.json"),
        "plot": changes("--plot", "t.png"),
        "as_json": changes("--json"),
    },
    "search": {
        "machine": changes("--machine", "rtx4090"),
        "model": changes("--model", "wide.json"),
        "ds_config": changes("--ds-config", "ds.json"),
        "sequence": changes("--sequence", "64"),
        "free": changes("--free", "micro_batch,recompute"),
        "global_batch": changes("--global-batch", "4", beside=("--free", "accumulation")),
        "gpus": changes("--gpus", "2"),
        "micro_batch": changes("--micro-batch", "2"),
        "accumulation": changes("--accumulation", "3"),
        "zero_stage": changes("--zero-stage", "2"),
        "keep_activations": changes("--keep-activations", beside=("--free", "zero_stage")),
        "no_offload": changes("--no-offload"),
        "launcher": changes("--launcher", "torchrun", beside=("--gpus", "2", "--ds-config", "infinity.json")),
        "omp_threads": changes("--omp-threads", "1", beside=("--ds-config", "infinity.json")),
        **MEMORY,
        "host_memory": changes("--host-memory", "60GiB", beside=("--model", "large.json", "--gpu-memory", "30GiB")),
        "memory_margin": changes("--memory-margin", "99.9%"),
        "storage": changes(
            "--storage",
            "/nvme:1TB",
            beside=(
                "--model",
                "large.json",
                "--gpu-memory",
                "40GiB",
                "--host-memory",
                "60GiB",
                "--storage",
                "/pfs:1TB",
            ),
        ),
        "trials": changes("--trials", "1", beside=("--model", "large.json", "--gpu-memory", "60GiB")),
        "recompute_share": changes("--recompute-share", "50%", beside=("--free", "zero_stage")),
        "kernels": changes("--kernels", "eager"),
        "fused_loss": changes("--fused-loss"),
        "no_flash_attention": changes("--no-flash-attention"),
        "flash_version": changes("--flash-version", "3", beside=("--sequence", "65536")),
        "study": changes("--study", "sqlite:///search.db"),
        # tests/tuner/test_measuring.py measures.
        "measure": Refused(("--measure", "1"), "--measure must be followed by the training command"),
        "measure_timeout": Refused(("--measure-timeout", "5m"), "--measure-timeout has an effect only with --measure"),
        "command": Refused(("--", "true"), "a command has an effect only with --measure N"),
        "emit_deepspeed": changes("--emit-deepspeed", "best.json"),
        "output": changes("-o", "found.json"),
        "as_json": changes("--json"),
    },
    "run": {"no_check": changes("--no-check"), "command": changes("--verbose")},
    "verify": {
        "steps": changes("--steps", "3"),
        "against": changes("--against", "stock"),
        "seed": changes("--seed", "5"),
        "deterministic": changes("--deterministic"),
        "as_json": changes("--json"),
        "command": changes("--verbose"),
    },
    "doctor": {
        "plan_file": changes("--plan", "plan.json"),
        "ranks": changes("--ranks", "3"),
        "checkpoint_dir": changes("--checkpoint-dir", "ckpt"),
        "ds_config": changes("--ds-config", "ds.json"),
        "as_json": changes("--json"),
    },
    "report": {
        "plan_file": changes("second.json"),
        "run": Refused(("--run", "m.json"), "--run must be a trace file, but m.json is a model's config"),
        "output": changes("-o", "other.html"),
    },
    "serve": {
        "port": changes("--port", "9"),
        "host": changes("--host", "0.0.0.0"),
        "allow_host": changes("--allow-host", "name"),
        "db": changes("--db", "other.db"),
        "show": Refused(("--show", "nowhere"), "--show must be a folder"),
        "workers": changes("--workers", "3"),
    },
    "checkpoint list": {"folders": changes(".."), "as_json": changes("--json")},
    "checkpoint verify": {"folders": changes(".."), "tag": changes("--tag", "other"), "as_json": changes("--json")},
    "checkpoint prune": {"folders": changes(".."), "keep": changes("--keep", "2"), "as_json": changes("--json")},
    "checkpoint export": {"folder": changes(".."), "tag": changes("--tag", "other"), "to": changes("--to", "there")},
    "calibrate": {
        **MODEL,
        "workload": Refused(("--workload", "w.json"), "only one of --workload and --model"),
        "machine": changes("rtx4090"),
        "runs": changes("--runs", "more.csv"),
        "strategy": changes("--strategy", "twin_flow"),
        "ratio": changes("--ratio", "0.3", beside=("--strategy", "twin_flow")),
        "out": changes("-o", "other.json"),
        "as_json": changes("--json"),
    },
}
# Flags that follow from the fields of `Job`: see test_job_walk.py.
FLAGS = {one.flag for one in settings()}
OF_JOBS = {"plan": FLAGS, "calibrate": FLAGS, "simulate": FLAGS - {"clip_rate"}}
POSITIONAL = {("show", "plan_file"): 1, ("report", "plan_file"): 1, ("calibrate", "machine"): 1}


def leaves(command: click.Command, path: str = "") -> dict[str, click.Command]:
    """Return a dict of every `tune` command that is no group, keyed by the words that follow ``tune``."""
    if not isinstance(command, click.Group):
        return {path: command}
    context = click.Context(command)
    found = {}
    for name in command.list_commands(context):
        found |= leaves(command.get_command(context, name), f"{path} {name}".strip())
    return found


def options(name: str) -> set[str]:
    return {parameter.name for parameter in leaves(main)[name].params}


@pytest.mark.parametrize("name", sorted(leaves(main)))
def test_the_table_has_every_option(name):
    assert options(name) - OF_JOBS.get(name, set()) == set(TABLE[name])


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """Return a folder with all input files that the tested `tune` commands read."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "m.json").write_text(json.dumps(TINY))
    (folder / "wide.json").write_text(json.dumps({**TINY, "layers": 3}))
    large = {"layers": 8, "hidden": 8192, "heads": 64, "vocabulary": 16000}
    (folder / "large.json").write_text(json.dumps(large))
    # The number of parameters is the same. With more layers, other searches and seeds find other plans.
    deep = {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 32000}
    (folder / "deep.json").write_text(json.dumps(deep))
    ds = {"bf16": {"enabled": True}, "gradient_clipping": 0.0, "data_types": {"grad_accum_dtype": "fp32"}}
    (folder / "ds.json").write_text(json.dumps(ds))
    offloads = {
        "infinity": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
        "nvme": {"offload_optimizer": {"device": "nvme"}},
        "param": {"offload_param": {"device": "cpu"}},
    }
    for name, zero in offloads.items():
        (folder / f"{name}.json").write_text(json.dumps({**ds, "zero_optimization": zero}))
    (folder / "one.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}))
    work = workload_from_model(TINY, preset("h200"))
    work.save(folder / "w.json")
    node().save(folder / "n.json")
    ebbtide.tuner.placements.planning.plan(work, preset("h200")).save(folder / "plan.json")
    ebbtide.tuner.placements.planning.plan(work, preset("rtx4090")).save(folder / "second.json")
    (folder / "train.py").write_text("")
    for name, step in (("runs.csv", 4.0), ("more.csv", 9.0)):
        with (folder / name).open("w") as file:
            rows = csv.writer(file)
            rows.writerow(["forward_ms", "backward_ms", "step_ms", "iteration_ms"])
            rows.writerows([[1.0, 3.0, step, 5.0 + step]])
    return folder


@dataclass
class Recorder:
    """A recorder that replaces functions of `tune` which need a machine, a server or a process. It records the
    arguments of each call.
    """

    calls: list = field(default_factory=list)

    def __call__(self, name, result=None):
        def called(*args, **kwargs):
            self.calls.append((name, repr(args), repr(sorted(kwargs.items()))))
            return result(*args, **kwargs) if callable(result) else result

        return called


@pytest.fixture
def recorder(monkeypatch):
    """Replace functions that the `tune` commands call and that measure the machine, start a server or a process, or
    take long. Return the object that records the arguments of all their calls.
    """
    seen = Recorder()
    for target, result in {
        # First, while it is imported, because it imports `verify` by name, which is replaced below.
        "ebbtide.runtime.storage.reader.export": "out/one",
        "ebbtide.tuner.commands.profiling.machine_profile": None,
        "ebbtide.tuner.commands.profiling.script_profile": None,
        "os.execv": None,
        "ebbtide.tuner.commands.run._check": None,
        "ebbtide.tuner.commands.run._watch_for_engines": None,
        "ebbtide.tuner.verify.launch.launch": untrained,
        "ebbtide.tuner.doctor.examination.whole": [],
        "ebbtide.tuner.service.server.run": None,
        "ebbtide.tuner.service.store.Store": str,
        "ebbtide.runtime.checkpoint.protocol.inspect.list_checkpoints": [],
        "ebbtide.tuner.commands.checkpoint._check_any": None,
        "ebbtide.runtime.checkpoint.protocol.inspect.verify": ["p"],
        "ebbtide.runtime.checkpoint.protocol.inspect.prune": [],
        "ebbtide.tuner.calibrate.run_logs.read_observations": [],
        "ebbtide.tuner.calibrate.calibration.calibrate": calibrated,
        "ebbtide.tuner.placements.planning._robust_choice": ebbtide.tuner.placements.planning._robust_choice,
    }.items():
        monkeypatch.setattr(target, seen(target, result))
    monkeypatch.setattr("ebbtide.tuner.service.resources.Service", seen("Service"))
    # The length of the search does not matter here.
    monkeypatch.setattr("ebbtide.tuner.placements.decision.MOST_EVALUATIONS", 60)
    monkeypatch.setenv("EBBTIDE_TOKEN", "fixed")
    return seen


def untrained(command, side, steps, seed, deterministic):
    from ebbtide.tuner.verify.run import RecordedRun, RecordedStep

    about = {"key": True, "offload": True, "ranks": 1, "versions": {}}
    return RecordedRun(side.title, about, (RecordedStep({}, {}),))


def calibrated(machine, seen):
    from ebbtide.tuner.calibrate.calibration import Calibrated

    return Calibrated(machine, changes=(), contradictions=(), unexplained=(), before_pct=0.0, left_pct=0.0)


def outcome(ground, recorder, arguments):
    """Run a `tune` command, and return its exit code, its output, a dict of the files that it wrote, and a list of
    recorded calls.

    Functions that would start a server or a process, measure the machine or take long are replaced by the recorder,
    which records their calls.
    """
    runner = CliRunner()
    with runner.isolated_filesystem() as folder:
        for path in ground.iterdir():
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        result = runner.invoke(main, list(arguments))
        written = {path.name: path.read_bytes() for path in Path(folder).iterdir() if not (ground / path.name).exists()}
        calls, recorder.calls[:] = tuple(recorder.calls), []
    assert result.exit_code != 1 or result.exception is None or isinstance(result.exception, SystemExit), (
        result.exc_info
    )
    return result.exit_code, result.output.replace(folder, ""), written, calls


CASES = [(name, option) for name in TABLE for option in TABLE[name]]


@cache
def _bases():
    return {}


@pytest.mark.parametrize(("name", "option"), CASES)
def test_each_option_changes_something_or_is_refused(name, option, ground, recorder):
    case = TABLE[name][option]
    base = BASES[name]
    if isinstance(case, Refused):
        code, said, _, _ = outcome(ground, recorder, [*base, *case.more])
        assert code == 2
        assert case.says in said
        return
    at = POSITIONAL.get((name, option))
    changed = [*base, *case.beside, *case.more]
    if at is not None:
        changed = [*base[:at], *case.more, *base[at + 1 :]]
    plain = (*base, *case.beside)
    if plain not in _bases():
        _bases()[plain] = outcome(ground, recorder, plain)
    before = _bases()[plain]
    assert before[0] == 0, before[1]
    after = outcome(ground, recorder, changed)
    assert after[0] in (0, 2)
    assert before != after, f"{' '.join(case.more)} changes nothing"


ALONE = [
    ("PLAN --restart 5s", "--restart .* only with --mtbf"),
    ("PLAN --checkpoint-rate 1GB/s", "--checkpoint-rate .* with --mtbf"),
    ("PLAN --checkpoint-rate 1GB/s --mtbf 4h --storage /nvme:1TB", "--checkpoint-rate .* only without --storage"),
    ("PLAN --storage 1GB/s", "as DIR:SIZE, .* --checkpoint-rate"),
    ("PLAN --endurance 600", "--endurance .* with --storage"),
    ("PLAN --storage /nvme:1TB --zero-stage 2", "--storage needs ZeRO-3"),
    ("plan --machine h200 --workload w.json -o p.json --sequence 9", "--sequence can be given only with --mod"),
    ("plan --machine h200 --workload w.json -o p.json --ds-config ds.json", "--ds-config can be given only"),
    ("simulate --machine h200 --workload w.json --zero-stage 2", "--zero-stage can be given only with --model"),
    ("calibrate h200 --runs runs.csv -o c.json --workload w.json --micro-batch 2", "--micro-batch"),
    ("profile --launcher none", "--launcher .* only with --train-script"),
    ("profile --iterations 2", "--iterations .* only with --train-script"),
    ("profile --drive d --train-script train.py", "--drive .* only without --train-script"),
    ("profile --seconds 2 --train-script train.py", "--seconds .* only without --train-script"),
    ("profile --continue", "must come after --train-script SCRIPT, but got only --continue"),
    ("SEARCH --no-offload --free offload", "--no-offload fixes it"),
    ("SEARCH --zero-stage 2 --free zero_stage", "--zero-stage fixes"),
    ("SEARCH --micro-batch 2 --ds-config one.json", "must agree with"),
    ("PLAN --mtbf 1s", "must leave time to train"),
    ("PLAN --mtbf 1e300d", "a duration must be at most 1e.10 s, but got '1e300d'"),
    ("PLAN --emit-deepspeed ./p.json", "--emit-deepspeed must be another file than --output"),
    ("plan --machine h200 --model m.json -o m.json", "--output must be another file than --model"),
    ("simulate --machine h200 --model m.json --trace t --plot t", "--plot must be another file th"),
    ("PLAN --pipeline-parallel 2", "pipeline_parallel must"),
    ("PLAN --recompute-share 0%", "recompute_share must lie in .0, 1. .*--keep-activations"),
    ("PLAN --keep-activations --recompute-share 50%", "only one of --keep-activations and --recompute-share"),
    ("PLAN --no-flash-attention --flash-version 2", "only one of --no-flash-attention and --flash-version"),
    ("simulate --machine h200 --workload w.json --recompute-share 0%", "--recompute-share can be given only with"),
    ("PLAN --ds-config nvme.json", "nvme_path must name a folder"),
    ("plan --machine rtx4090 --model m.json -o p.json --data-parallel 4", "take the preset rtx4090-x4"),
]


@pytest.mark.parametrize(("line", "says"), ALONE)
def test_what_changes_nothing_or_cannot_be_is_refused(line, says, ground, recorder):
    words = line.split()
    if words[0] in ("PLAN", "SEARCH"):
        words[:1] = [words[0].lower(), "--machine", "h200", "--model", "m.json", "-o", "p.json"]
    code, said, written, _ = outcome(ground, recorder, words)
    assert code == 2, said
    assert re.search(says, said), said
    assert not written
