"""Tests of training scripts that `tune profile --train-script` starts under real launchers such as torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ebbtide.profiler.launch import LaunchError, ScriptRun, profile_script
from ebbtide.simulator import Machine, Workload

SCRIPT = """
import argparse, os, torch, deepspeed
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required={required})
parser.add_argument("--lr", required=True)
args = parser.parse_args()
rank = int(os.environ["RANK"])
if {required}:
    assert args.local_rank == int(os.environ["LOCAL_RANK"])
deepspeed.init_distributed("gloo")
model = ByteGPT(SIZES["tiny"])
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config(2, 20_000)
)
batches = Batches(2, 32, rank=rank)
for step in range(50):
    if step == {crash} and rank == 1:
        raise ValueError("rank 1 lost its data")
    train_step(engine, batches.at(step))
raise SystemExit("the script came to its end")
"""
FEWER_ELEMENTS = """
import sys
from ebbtide.profiler import measure_machine
from ebbtide.tuner.cli import main
measure_machine.__kwdefaults__["elements"] = 2**20
try:
    main()
finally:
    assert "torch._dynamo" not in sys.modules, "torch's compiler takes over a second to import"
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tune(tmp_path, child_environment, deepspeed_ops):
    """Return a function that runs `tune`, with given arguments, in a temporary folder and returns the
    completed process.
    """

    def run(*words, start=("-m", "ebbtide.tuner.cli")):
        environment = {**child_environment, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *start, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


def written(tmp_path, *, required=False, crash=-1):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(required=required, crash=crash))
    return str(script)


@pytest.mark.slow
def test_two_ranks_under_deepspeeds_launcher(tune, tmp_path):
    words = ("--launcher", "deepspeed", "--ranks", "2", "--iterations", "1", "--json", "--", "--lr", "1")
    done = tune("profile", "--train-script", written(tmp_path, required=True), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = Workload.load(tmp_path / "workload.json")
    assert Workload.model_validate_json(done.stdout) == found
    assert (found.ranks_per_node, found.nodes) == (2, 1)
    assert found.samples_per_iteration == 2 * 2
    assert found.tokens_per_iteration == 2 * 2 * 32
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "workload.json"}


@pytest.mark.slow
def test_a_rank_that_crashes_is_told_with_its_output(tune, tmp_path):
    done = tune("profile", "--train-script", written(tmp_path, crash=2), "--ranks", "2", "--", "--lr", "1")
    assert done.returncode == 2
    assert done.stderr.rstrip().splitlines()[-1] == (
        "Error: the script must run until 7 optimizer steps are taken (--iterations), but it "
        "raised ValueError: rank 1 lost its data after 2"
    )
    assert 'in <module>\n    raise ValueError("rank 1 lost its data")' in done.stderr
    assert "torch/distributed/run.py" not in done.stderr, "the launcher's own stack trace must be left out"
    assert not (tmp_path / "workload.json").exists()


@pytest.mark.slow
def test_going_on_shows_what_the_script_prints(tune, tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint('so', *sys.argv[1:])\nraise KeyError(7)")
    words = ("profile", "--train-script", "train.py", "--launcher", "none", "--continue")
    done = tune(*words, "--", "--lr", "1")
    assert done.returncode == 2
    assert done.stdout.endswith("so --lr 1\n")
    assert "KeyError: 7\nebbtide.profiler.script: error:" in done.stderr
    assert done.stderr.rstrip().endswith("but it raised KeyError: 7 after 0")


def test_a_script_that_is_killed_is_told(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nprint('so far', flush=True)\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(LaunchError, match="but the script was killed by signal 9") as told:
        profile_script(ScriptRun(str(script), launcher="none"), tmp_path / "w.json")
    assert told.value.output.splitlines()[-1] == "so far"
    assert not (tmp_path / "w.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"script": "nope.py"}, "must be a file, but got nope.py"),
        ({"launcher": "none", "ranks": 2}, "1 without a launcher, but got 2"),
        ({"ranks": 0}, "ranks must be >= 1"),
        ({"iterations": 0}, "iterations must be >= 1, but got 0"),
        ({"launcher": "mpirun"}, "one of none, torchrun, deepspeed, but got 'mpirun'"),
    ],
)
def test_runs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        ScriptRun(**{"script": __file__, **changes})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1"], "must come after --train-script SCRIPT, but got only --lr 1"),
        (["--continue"], "must come after --train-script SCRIPT, but got only --continue"),
        (["--ranks", "10000"], "(the number of cores), but got 10000"),
        (["--seconds", "90"], "at most 60 (--seconds), but got 90"),
        (["--train-script", "nope.py"], "must be a file, but got nope.py (--train-script)"),
        (["--train-script", __file__, "-o", "/no/where.json"], "where.json: /no is not a folder"),
        (["--train-script", __file__, "--iterations", "0"], "iterations must be >= 1"),
    ],
)
def test_bad_flags_end_with_one_line(words, message):
    from click.testing import CliRunner
    from ebbtide.tuner.cli import main

    ended = CliRunner().invoke(main, ["profile", *words])
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_ranks_at_once_from_the_command_line(tune, tmp_path):
    words = ("--fresh", "--storage-dir", "disk", "--seconds", "0.1", "--ranks", "2", "--json")
    done = tune("profile", *words, start=("-c", FEWER_ELEMENTS))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["cpu_cores"] >= 2
    machine = Machine.load(tmp_path / "machine.json")
    assert machine.gather_bytes_per_s.source == machine.reduce_bytes_per_s.source == "emulated"
    assert "gloo, 2 ranks" in machine.gather_bytes_per_s.detail
    shares = machine.rank_shares
    assert set(shares) == {2}
    assert set(shares[2]) == {"h2d", "d2h", "link", "dram", "storage"}
    assert {shares[2][name].source for name in ("h2d", "d2h", "link")} == {"emulated"}
    assert shares[2]["dram"].detail.startswith("2 ranks at once: ")
    assert all(share.n >= 2 * 4 for share in shares[2].values())
    assert list((tmp_path / "disk").iterdir()) == []
