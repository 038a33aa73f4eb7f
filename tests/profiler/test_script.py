"""Tests of `tune profile` with a training script that runs in this process, with a real engine."""

import pytest
import torch.distributed
from ebbtide.profiler.progress import ProgressFile, first_error, read_progress
from ebbtide.profiler.script import ProfiledScript, ScriptError, main
from ebbtide.runtime.hardware.launcher import LAUNCHERS, VARIABLES
from ebbtide.simulator import Workload

ENGINE = """
import sys, torch, deepspeed
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
model = ByteGPT(SIZES["tiny"])
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config(1, 20_000{options})
)
batches = Batches(1, 32)
{loop}
"""
STEPS = "for step in range({n}): train_step(engine, batches.at(step))\n"


@pytest.fixture
def profiled(only_rank, tmp_path):
    """Return a function that profiles a training script, given its text, and returns the path of the workload
    file. The function's attributes ``out`` and ``progress`` then hold this path and the reported progress.
    """

    def run(text, *, go_on=False, iterations=1, rank=0):
        script, out = tmp_path / "train.py", tmp_path / "workload.json"
        script.write_text(text)
        watched = ProfiledScript(out, iterations, rank, ProgressFile(tmp_path, 0), go_on=go_on)
        try:
            watched.run(script, ["--lr", "1"])
        finally:
            run.out, run.progress = out, read_progress(tmp_path)
        return out

    return run


def script_of(loop, options=""):
    return ENGINE.format(loop=loop, options=options)


def test_it_is_stopped_as_soon_as_it_is_profiled(profiled, capsys):
    stopped = STEPS.format(n=50) + "print('the end')"
    found = Workload.load(profiled(script_of("print(sys.argv[1:])\n" + stopped)))
    assert found.subgroup_size == 20_000
    assert capsys.readouterr().out.strip().splitlines()[-1] == "['--lr', '1']"
    assert (profiled.progress[0].steps, profiled.progress[0].needed) == (7, 7)


def test_backward_may_be_torchs_own(profiled):
    loop = """
for step in range(50):
    loss = engine(*batches.at(step))
    loss.backward()
    engine.step()
"""
    found = Workload.load(profiled(script_of(loop)))
    assert found.phase_times["backward"].median > 0
    assert "backward" in {point.phase for point in found.memory_curve}


def test_only_rank_0_writes(profiled):
    assert not profiled(script_of(STEPS.format(n=50)), rank=1).exists()
    assert profiled.progress[0].steps == 7


def test_it_may_go_on_to_its_end(profiled, capsys):
    loop = STEPS.format(n=8) + "assert 'step' not in vars(engine)\nprint('the end')"
    assert profiled(script_of(loop), go_on=True).exists()
    assert "the end" in capsys.readouterr().out


def test_a_loop_that_swallows_exceptions_is_stopped_all_the_same(profiled, capsys):
    loop = """
for step in range(50):
    try:
        train_step(engine, batches.at(step))
    except Exception:
        print("swallowed")
"""
    assert profiled(script_of(loop)).exists()
    assert "swallowed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            script_of(STEPS.format(n=3)),
            r"at least 7 optimizer steps .* \(--iterations\), but ended after 3: nothing was",
        ),
        (script_of(""), "but ended after 0"),
        ("print('no engine')", "must train an engine made by deepspeed.initialize, but ended with"),
        (script_of(STEPS.format(n=2) + "raise KeyError('lost')"), r"but it raised KeyError: 'lost' after 2"),
        (script_of("sys.exit(3)"), "but it exited with code 3 after 0"),
        (script_of("sys.exit(0)"), "but ended after 0"),
        (script_of(STEPS.format(n=9), ", stage=0"), "Set zero_optimization.stage to 1, 2 or 3"),
    ],
)
def test_a_script_without_a_workload_is_told_why(profiled, text, message):
    with pytest.raises(ScriptError, match=message):
        profiled(text)
    assert not profiled.out.exists()


def test_a_failure_after_the_profile_keeps_the_workload(profiled):
    loop = STEPS.format(n=8) + "raise OSError('disk')"
    with pytest.raises(ScriptError, match="was written, but later the script raised OSError: disk"):
        profiled(script_of(loop), go_on=True)
    assert Workload.load(profiled.out).name == "ByteGPT"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "w.json", "--", "/nowhere/train.py"], "must be a file, but got /nowhere"),
        (["--out", "w.json"], "must be a file, but got nothing"),
        (["--out", "w.json", "--iterations", "0", "--", __file__], "--iterations must be >= 1"),
        (["--out", "w.json", "--iterations", "-1", "--", __file__], "--iterations must be >= 1"),
        (["--out", "/nowhere/w.json", "--", __file__], "a folder that exists"),
    ],
)
def test_bad_arguments_end_with_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("variable", sorted({launcher.rank for launcher in LAUNCHERS}))
def test_every_launcher_s_ranks_are_told_apart(monkeypatch, tmp_path, variable):
    """Check that two ranks never both act as rank 0, which would write the same files."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv(variable, "3")
    numbers = []

    class Profiled(ProfiledScript):
        def run(self, script, arguments):
            numbers.append(self._rank)
            self.tell()

    monkeypatch.setattr("ebbtide.profiler.script.ProfiledScript", Profiled)
    monkeypatch.setattr("ebbtide.profiler.script._leave_job", lambda: None)
    main(["--out", str(tmp_path / "w.json"), "--report", str(tmp_path), "--", __file__])
    assert numbers == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.json"]


def test_the_first_error_of_the_ranks_counts(tmp_path):
    for rank, error in ((1, "the cause"), (0, "its echo"), (2, "")):
        ProgressFile(tmp_path, rank).tell(3, 5, error)
    found = read_progress(tmp_path)
    assert len(found) == 3
    assert first_error(found) == "the cause"
    assert first_error([]) == ""
