"""Tests of the `tune` commands on machine presets and model configs, and with output files that cannot be written."""

import errno
import json
from pathlib import Path

import pytest
from ebbtide.simulator import Plan, preset, workload_from_model
from ebbtide.simulator.limits import UNKNOWN_MARGIN

from tests.tuner.test_cli import run

SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_a_plan_for_a_config_on_a_preset_with_the_best_subgroup_size(model, tmp_path, in_earnest):
    out = tmp_path / "plan.json"
    common = ["plan", "--machine", "h200", "--model", model, "--gpu-memory", "4GiB", "-o", out]
    assert run(*common).exit_code == 0
    automatic = Plan.load(out)
    assert run(*common, "--subgroup-size", "keep").exit_code == 0
    kept = Plan.load(out)
    assert kept.subgroup_size == 10**9
    assert automatic.subgroup_size < kept.subgroup_size
    assert automatic.subgroup_count > kept.subgroup_count
    assert automatic.prediction.iteration_s < kept.prediction.iteration_s
    assert sum(automatic.subgroups) == sum(kept.subgroups)
    said = [reason for reason in kept.reasons if "smaller subgroups" in reason]
    assert f"with {automatic.subgroup_size:.0e} elements" in said[0]
    assert not any("smaller subgroups" in reason for reason in automatic.reasons)


def test_a_subgroup_size_that_is_given_is_kept_to(model, tmp_path):
    out = tmp_path / "plan.json"
    arguments = ["--machine", "h200", "--model", model, "-o", out, "--subgroup-size", 40_000_000]
    assert run("plan", *arguments).exit_code == 0
    work = workload_from_model(SMALL, preset("h200"))
    assert Plan.load(out).subgroups == work.recut(40_000_000).subgroups


def test_flags_of_the_model_reach_the_workload(model):
    base = ["simulate", "--machine", "h200", "--model", model, "--json"]
    once = json.loads(run(*base, "--sequence", 16384).stdout)
    longer = json.loads(run(*base, "--sequence", 32768).stdout)
    kept = json.loads(run(*base, "--sequence", 32768, "--keep-activations").stdout)
    assert longer["forward_s"] > 1.6 * once["forward_s"]
    assert kept["device_peak_bytes"] > longer["device_peak_bytes"]
    assert kept["backward_s"] < longer["backward_s"]
    divided = json.loads(run(*base, "--data-parallel", 4).stdout)
    assert divided["host_peak_bytes"] < 0.3 * longer["host_peak_bytes"]


def test_what_does_not_fit_is_simulated_and_says_by_how_much(model):
    base = ["simulate", "--machine", "a100-node", "--model", model, "--sequence", 8192]
    fitting, large = (run(*base, "--micro-batch", n) for n in (1, 64))
    assert fitting.stdout.splitlines()[-1].split() == ["fits", "yes"]
    told = json.loads(run(*base, "--micro-batch", 64, "--json").stdout)
    a100 = preset("a100-node")
    there = (1 - UNKNOWN_MARGIN) * a100.device_memory_bytes - a100.device_reserved_bytes
    missing = (told["device_peak_bytes"] - there) / 2**30
    assert told["fits"] is False
    assert missing > 1
    assert told["missing"] == f"needs {missing:.1f} GiB more GPU memory"
    assert large.output.splitlines()[-1].split(maxsplit=1) == ["fits", f"no: it {told['missing']}"]


def test_host_memory_is_missed_too():
    llama = Path(__file__).parents[2] / "examples" / "llama-3-8b.json"
    small = ["simulate", "--machine", "rtx4090", "--model", llama]
    assert "more host memory" in run(*small, "--micro-batch", 1).output


def test_a_deepspeed_config_is_obeyed(model, tmp_path):
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "sub_group_size": 3e7}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    out = tmp_path / "plan.json"
    arguments = ["--machine", "h200", "--model", model, "--ds-config", path, "-o", out]
    assert run("plan", *arguments, "--subgroup-size", "keep").exit_code == 0
    assert Plan.load(out).subgroup_size == 30_000_000


def test_a_deepspeed_config_is_read_once(model, tmp_path, monkeypatch):
    path, read = ds(tmp_path, CPU), []
    original = Path.read_text

    def counted(self, *args, **kwargs):
        read.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counted)
    out = tmp_path / "plan.json"
    common = ["--machine", "h200", "--model", model, "--ds-config", path]
    assert run("plan", *common, "-o", out, "--emit-deepspeed", tmp_path / "e.json").exit_code == 0
    assert read.count(path) == 1
    assert run("simulate", *common).exit_code == 0
    assert read.count(path) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--machine", "h2000"],
            "--machine must be a preset or a machine file. There is no machine preset .* Did you mean 'h200'",
        ),
        ([], "exactly one of --workload and --model must be given, but got none"),
        (["--model", "MODEL", "--workload", "MODEL"], "but got both"),
        (["--model", "gone.json"], r"--model gone.json: the model \(--model\) must be given as a JSON file"),
        (["--model", "MODEL", "--ds-config", "gone.json"], r"--ds-config\), but reading gone.json failed"),
        (["--model", "MODEL", "--sequence", "0"], "--sequence"),
        (["--model", "MODEL", "--tensor-parallel", "3"], "tensor_parallel must divide"),
        (["--model", "MODEL", "--subgroup-size", "-3"], "--subgroup-size must be keep, auto"),
        (["--model", "Llama 3 8B", "--accumulation", "4096"], r"\(--accumulation\) must be at most 963 for 34 layers"),
        (["--model", "MODEL", "-o", "/nonexistent/p.json"], "--output must be a file that can be"),
    ],
)
def test_bad_input_names_the_flag(model, tmp_path, arguments, message):
    import re

    given = [str(model) if a == "MODEL" else a for a in arguments]
    machine = [] if "--machine" in given else ["--machine", "rtx4090"]
    output = [] if "-o" in given else ["-o", str(tmp_path / "plan.json")]
    result = run("plan", *machine, *given, *output)
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output


def test_traces_and_plots_that_cannot_be_written_name_their_flag(model):
    base = ["simulate", "--machine", "rtx4090", "--model", model]
    for flag, path in (
        ("--trace", "/nonexistent/t.json"),
        ("--plot", "/nonexistent/t.png"),
        ("--plot", "timeline.tiger"),
    ):
        result = run(*base, flag, path)
        assert result.exit_code == 2
        assert f"{flag} must be a file that can be written, but got {path}" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["report", "PLAN", "-o", "OUT.html"],
        ["simulate", "--trace", "OUT.json"],
        ["simulate", "--plot", "OUT.png"],
        ["simulate", "--plot", "OUT"],
    ],
)
def test_nothing_is_left_of_what_a_full_disk_does_not_take(command, model, tmp_path, monkeypatch):
    def full(path, content, **_):
        path.open("wb").write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    source = ["--machine", "rtx4090", "--model", str(model)]
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    assert run("plan", *source, "-o", str(plan)).exit_code == 0
    out.mkdir()
    given = [w.replace("PLAN", str(plan)).replace("OUT", str(out / "o")) for w in command]
    for write in ("write_text", "write_bytes"):
        monkeypatch.setattr(Path, write, full)
    result = run(*given, *(source if command[0] == "simulate" else []))
    assert result.exit_code == 2
    assert "must be a file that can be written" in result.output
    assert "No space left" in result.output
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "measured"),
    [
        (["profile", "-o"], "ebbtide.profiler.measure_machine"),
        (["profile", "--train-script", __file__, "-o"], "ebbtide.profiler.launch.profile_script"),
    ],
)
def test_no_minutes_are_spent_on_what_no_folder_takes(command, measured, monkeypatch, tmp_path):
    monkeypatch.setattr(measured, lambda *_, **__: pytest.fail("measured"))
    path = str(tmp_path / "nowhere" / "x.json")
    result = run(*command, path)
    assert result.exit_code == 2
    assert f"{path}: {tmp_path / 'nowhere'} is not a folder" in result.output


def ds(tmp_path, optimizer=None, **zero):
    path = tmp_path / "ds.json"
    section = {"stage": 3, **({"offload_optimizer": optimizer} if optimizer else {}), **zero}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": section}))
    return path


CPU = {"device": "cpu"}
BEYOND_A_PLAN = [(CPU, {"zenflow": {"topk_ratio": 0.1}}), (CPU, {"mics_shard_size": 2})]
BESIDE_ZERO = [{"compile": {"deepcompile": True}}, {"hybrid_engine": {"enabled": True}}]


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        ("optimizer.params.torch_adam", {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}),
        ("bf16.bf16_master_weights_and_grads", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    ],
)
def test_nothing_is_planned_for_an_optimizer_that_runs_its_own_step(model, tmp_path, key, beside):
    path = ds(tmp_path, CPU)
    path.write_text(json.dumps(json.loads(path.read_text()) | beside))
    out = tmp_path / "plan.json"
    planned = run("plan", "--machine", "rtx4090", "--model", model, "--ds-config", path, "-o", out)
    assert (planned.exit_code, out.exists()) == (2, False)
    assert f"{key} must be absent or false" in planned.output


@pytest.mark.parametrize(
    ("optimizer", "zero", "beside"),
    [*((*pair, {}) for pair in BEYOND_A_PLAN), *((CPU, {}, beside) for beside in BESIDE_ZERO)],
)
def test_a_config_that_training_refuses_is_refused_by_the_planner_in_the_same_words(
    model, tmp_path, optimizer, zero, beside
):
    from ebbtide.runtime.zero.checks.guard import ConfigError, check_config

    path = ds(tmp_path, optimizer, **zero)
    path.write_text(json.dumps(json.loads(path.read_text()) | beside))
    with pytest.raises(ConfigError) as refused:
        check_config(json.loads(path.read_text()))
    out = tmp_path / "plan.json"
    common = ["--machine", "rtx4090", "--model", model]
    planned = run("plan", *common, "--ds-config", path, "-o", out)
    assert planned.exit_code == 2
    assert str(refused.value) in planned.output
    assert not out.exists()
    assert run("plan", *common, "-o", out).exit_code == 0
    simulated = run("simulate", *common, "--ds-config", path, "--plan", out)
    assert str(refused.value) in simulated.output


def test_keys_that_change_nothing_are_one_quiet_line(model, tmp_path):
    path = ds(tmp_path, {**CPU, "buffer_count": 9}, zero_hpz_partition_size=4)
    common = ["--machine", "rtx4090", "--model", model, "--ds-config", path, "--json"]
    for command, more in (("simulate", []), ("plan", ["-o", tmp_path / "plan.json"])):
        result = run(command, *common, *more)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert result.stderr == ""
        [line] = [note for note in told["notes" if command == "simulate" else "reasons"] if "not simulated" in note]
        assert "not simulated: zero_optimization.offload_optimizer.buffer_count, zero" in line
        assert "zero_hpz_partition_size" in line


def test_parts_of_a_model_whose_compute_is_not_estimated_are_told(tmp_path):
    pytest.importorskip("transformers")
    text = {"model_type": "llama", "num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": text}))
    result = run("simulate", "--machine", "rtx4090", "--model", path, "--json")
    assert result.exit_code == 0, result.output
    assert "not simulated: the compute of the model's parts for images or sound" in result.stdout


def simulated(model, *more):
    result = run("simulate", "--machine", "h100-node", "--model", model, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_simulate_takes_what_the_config_offloads(model, tmp_path):
    assert simulated(model)[0]["strategy"] == "zero3_offload"  # without a config, a plan is compared with this strategy
    nothing, plain = simulated(model, "--ds-config", ds(tmp_path))[0], simulated(model, "--strategy", "no_offload")[0]
    assert {**nothing, "notes": plain["notes"]} == plain
    share = ["--ds-config", ds(tmp_path, {**CPU, "ratio": 0.3})]
    twin, said = simulated(model, *share, "--strategy", "twin_flow")
    assert twin == simulated(model, *share)[0]
    assert "simulates" not in said
    _, said = simulated(model, *share, "--strategy", "zero3_offload")
    assert "simulates zero3_offload, although --ds-config asks for twin_flow, ratio 0.3" in said


def test_a_strategy_that_drops_what_the_config_offloads_is_refused(model, tmp_path):
    path = ds(tmp_path, CPU, offload_param=CPU)
    base = ["simulate", "--machine", "h100-node", "--model", model, "--ds-config", path]
    result = run(*base, "--strategy", "zero3_offload")
    assert result.exit_code == 2
    assert "only zero_infinity can simulate zero_optimization.offload_param" in (result.output)
    assert run(*base, "--strategy", "zero_infinity").stdout == run(*base).stdout


def test_a_plan_beside_a_config_that_does_not_offload_says_what_training_needs(model, tmp_path):
    common = ["plan", "--machine", "rtx4090", "--model", model, "-o", tmp_path / "p.json"]
    note = "offload_optimizer.device must be 'cpu' to train under the plan"
    assert note in run(*common, "--ds-config", ds(tmp_path)).stderr
    assert note not in run(*common, "--ds-config", ds(tmp_path, CPU)).stderr


def test_a_checkpoint_folder_without_an_interval_says_what_that_means(model, tmp_path):
    common = ["plan", "--machine", "rtx4090", "--model", model, "-o", tmp_path / "p.json"]
    note = "without --mtbf the plan has no checkpoint interval"
    assert note in run(*common, "--checkpoint-dir", tmp_path).stderr
    assert Plan.load(tmp_path / "p.json").checkpoint.interval_steps == 0
    assert note not in run(*common, "--checkpoint-dir", tmp_path, "--mtbf", "4h").stderr


def test_activations_that_move_are_told_apart_from_what_training_refuses(model, tmp_path):
    path = ds(tmp_path, CPU)
    text = json.loads(path.read_text()) | {"activation_checkpointing": {"cpu_checkpointing": True}}
    path.write_text(json.dumps(text))
    common = ["plan", "--machine", "rtx4090", "--model", model, "-o", tmp_path / "p.json"]
    result = run(*common, "--ds-config", path)
    assert result.exit_code == 2
    assert "plans with activations that move are not simulated" in result.output


def test_a_plan_is_not_written_over_what_it_is_made_from(model, tmp_path):
    before = model.read_text()
    assert run("plan", "--machine", "rtx4090", "--model", model, "-o", model).exit_code == 2
    assert model.read_text() == before


@pytest.mark.parametrize(
    ("words", "both"),
    [
        ("report plan.json -o plan.json", "--output must be another file than PLAN"),
        ("report plan.json --run trace.json -o ./trace.json", "--output must be another file than --run"),
        (
            "search --machine h200 --model m.json --free recompute -o m.json",
            "--output must be another file than --model",
        ),
        ("simulate --machine h200 --model m.json --plot t --trace t", "--plot must be another file than --trace"),
        ("profile --train-script train.py -o train.py", "--output must be another file than --train-script"),
    ],
)
def test_no_output_is_written_over_what_the_command_names_too(words, both, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan(subgroup_size=1, placement=Plan.runs(["host"])).save("plan.json")
    for name, text in (("trace.json", '{"traceEvents": []}'), ("train.py", ""), ("ds.json", "{}")):
        Path(name).write_text(text)
    Path("m.json").write_text(model.read_text())
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    done = run(*words.split())
    assert (done.exit_code, both in done.output) == (2, True), done.output
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("output", ["--output", "--emit-deepspeed"])
def test_a_plan_is_not_written_over_the_config_that_it_is_made_for(model, tmp_path, output):
    config = tmp_path / "ds.json"
    config.write_text('{"bf16": {"enabled": true}}')
    done = run("plan", "--machine", "h200", "--model", model, "--ds-config", config, output, config, "--quick")
    assert done.exit_code == 2
    assert f"{output} must be another file than --ds-config" in done.output
    assert config.read_text() == '{"bf16": {"enabled": true}}'


@pytest.mark.parametrize("command", ["plan", "search"])
def test_a_drive_that_is_given_twice_is_refused(command, model, tmp_path):
    twice = ("--storage", f"{tmp_path}:500GB", "--storage", f"{tmp_path}/:300GB")
    done = run(command, "--machine", "h200", "--model", model, *twice)
    assert done.exit_code == 2
    assert "--storage must name each folder once" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--quick", "-o", "-"),
        ("simulate", "--trace", "-"),
        ("simulate", "--plot", "-"),
        ("search", "--free", "recompute", "--gpus", "1", "-o", "-"),
    ],
)
def test_a_dash_is_no_file(words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(words[0], "--machine", "h200", "--model", model, "--sequence", 64, *words[1:])
    assert done.exit_code == 2
    assert "must be a file, but got -. For standard output, give /dev/stdout" in done.output
    assert not Path("-").exists()


@pytest.mark.parametrize("given", ["24", "80", "1e3"])
def test_a_size_without_its_unit_is_refused(model, given):
    done = run("plan", "--machine", "h200", "--model", model, "--gpu-memory", given)
    assert done.exit_code == 2
    assert f"write {given}GiB" in " ".join(done.output.split())


def test_a_size_in_bytes_needs_no_unit(model, tmp_path):
    out = tmp_path / "plan.json"
    done = run("plan", "--machine", "h200", "--model", model, "--gpu-memory", 24 * 2**30, "-o", out)
    assert done.exit_code == 0


def test_a_model_of_the_hub_is_told_how_to_be_had():
    done = run("simulate", "--machine", "h200", "--model", "some-lab/new-model-9b")
    assert done.exit_code == 2
    assert "hf download some-lab/new-model-9b config.json" in " ".join(done.output.split())


@pytest.mark.parametrize(("enabled", "noted"), [({}, True), ({"bf16": {"enabled": True}}, False)])
def test_a_config_that_trains_in_fp32_is_told(model, tmp_path, enabled, noted):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **enabled}))
    done = run("simulate", "--machine", "h200", "--model", model, "--ds-config", path)
    assert done.exit_code == 0
    assert ("precision: fp32, because the config enables neither bf16 nor fp16" in done.output) is noted


def test_an_answer_for_one_pipeline_stage_says_so(model):
    asked = ["simulate", "--machine", "h200", "--model", model, "--zero-stage", 1]
    said = "of 2 pipeline stages, only stage 0 is simulated. The last stage also has the head"
    assert said in run(*asked, "--pipeline-parallel", 2).output
    assert "pipeline" not in run(*asked).output
