"""Tests of each `tune` command with good and with bad input: the exit code is 0 or 2, never with a traceback."""

import json
import re
from threading import Event

import ebbtide.tuner
import pytest
from click.testing import CliRunner
from ebbtide.simulator import Plan, preset, workload_from_model
from ebbtide.simulator.limits import size
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.planning import shadow_prices
from ebbtide.tuner.quantities import duration_s, size_bytes
from rich.progress import Progress

from tests.tuner.test_search import machine, workload


@pytest.fixture
def files(tmp_path):
    machine().save(tmp_path / "machine.json")
    workload(6).save(tmp_path / "workload.json")
    return tmp_path


def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert "Traceback" not in result.output
    return result


def inputs(files):
    return ["--machine", files / "machine.json", "--workload", files / "workload.json"]


def test_plan_show_and_simulate(files):
    out = files / "plan.json"
    planned = run("plan", *inputs(files), "-o", out, "--mtbf", "4h", "--why")
    assert planned.exit_code == 0, planned.output
    assert "stock ZeRO-3 offload" in planned.output
    assert "one more GiB of GPU memory" in planned.output
    assert Plan.load(out).checkpoint.interval_steps > 0
    shown = run("show", out, "--json")
    assert json.loads(shown.output)["subgroups"] == [3 * 10**7] * 6
    assert "per iteration" in run("show", out).output
    trace, plot = files / "t.json", files / "t.png"
    simulated = run("simulate", *inputs(files), "--plan", out, "--json", "--trace", trace, "--plot", plot)
    told, made = json.loads(simulated.output), Plan.load(out).prediction
    assert told["iteration_s"] > 0
    assert (told["device_peak_bytes"], told["host_peak_bytes"]) == (made.device_peak_bytes, made.host_peak_bytes)
    assert json.loads(trace.read_text())["traceEvents"]
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("device_gib", "saves"), [(24, True), (400, False)])
def test_why_tells_what_more_memory_saves_if_memory_is_short(device_gib, saves):
    machine = preset("rtx4090").model_copy(update={"device_memory_bytes": device_gib * 2**30})
    work = workload_from_model("examples/llama-3-8b.json", machine, sequence=1024).recut(5 * 10**8)
    found = ebbtide.tuner.plan(work, machine, effort=0.02, subgroup_sizes=())
    memory, link = shadow_prices(work, machine, found)
    assert ("0.0 ms (0.0%)" not in memory, "0.0 ms (0.0%)" not in link) == (saves, saves)


@pytest.mark.parametrize(
    "limits",
    [(), ("--memory-margin", "1%"), ("--memory-margin", "30%"), ("--gpu-memory", "8GiB", "--host-memory", "9GiB")],
)
def test_simulate_judges_a_plan_by_the_limits_that_it_was_made_with(files, limits):
    out = files / "plan.json"
    assert run("plan", *inputs(files), "--quick", "-o", out, *limits).exit_code == 0
    made = Plan.load(out).prediction

    def usable(*more):
        told = run("simulate", *inputs(files), "--plan", out, *more)
        return re.findall(r"memory .* of (.*) usable", told.output), told.exit_code

    own = [size(made.limits["device"]), size(made.limits["host"])]
    assert usable() == (own, 0)
    assert usable(*limits) == (own, 0)
    whole = [size(machine().device_memory_bytes), size(machine().host_memory_bytes)]
    assert usable("--memory-margin", "0%") == (whole, 0)
    tight = f"{made.device_peak_bytes - 1}"
    assert usable("--gpu-memory", tight, "--memory-margin", "0%")[1] == 1, "the flag has no effect"


@pytest.mark.parametrize(("device_share", "ranks"), [(0.5, 1), (2, 1), (1, 2)])
def test_the_limits_of_a_plan_do_not_apply_to_another_machine_or_to_more_ranks(files, device_share, ranks):
    out, own = files / "plan.json", machine()
    assert run("plan", *inputs(files), "--quick", "-o", out, "--memory-margin", "1%").exit_code == 0
    device_bytes = int(own.device_memory_bytes * device_share)
    machine(device_memory_bytes=device_bytes).save(files / "machine.json")
    workload(6, ranks_per_node=ranks).save(files / "workload.json")
    told = run("simulate", *inputs(files), "--plan", out).output
    assert f"of {size(device_bytes * 0.95)} usable" in told
    assert f"of {size(own.host_memory_bytes / ranks * 0.95)} usable" in told


def test_plan_as_json_for_a_named_strategy(files):
    planned = run("plan", *inputs(files), "-o", files / "p.json", "--json")
    assert Plan.from_fields(json.loads(planned.output)).subgroup_count == 6
    for strategy in ("zero3_offload", "twin_flow", "no_offload"):
        assert run("simulate", *inputs(files), "--strategy", strategy).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--machine", "nowhere.json", "--workload", "w"], "--machine: machine must be a readable"),
        (["plan", "--machine", "{machine}", "--workload", "{junk}"], "is not a workload this ebbtide can use"),
        (["plan", "--machine", "{machine}"], "--workload"),
        (["plan", "{good}", "--gpu-memory", "3 apples"], "a size such as 24GiB"),
        (["plan", "{good}", "--gpu-memory", "1MiB"], "GPU memory is "),
        (["plan", "{good}", "--gpu-memory", "1e400GiB"], "finite"),
        (["plan", "{good}", "--mtbf", "1e400h"], "finite"),
        (["plan", "--machine", "{binary}", "--workload", "w"], "--machine: machine must be a readable"),
        (["show", "{binary}"], "plan must be a readable JSON file"),
        (["simulate", "{good}", "--plan", "p", "--strategy", "s"], "only one of --plan"),
        (["plan", "{good}", "--mtbf", "-4h"], "a duration with its unit"),
        (["show", "{newer}"], "was written by a newer ebbtide"),
        (["simulate", "{good}", "--strategy", "magic"], "strategy must be one of"),
        (["simulate", "{good}", "--plan", "{other}"], "plan.ways must set the placement of"),
        (["checkpoint", "list", "/nowhere"], "must be a folder of checkpoints"),
        (["checkpoint", "prune", "{folder}", "--keep", "0"], "--keep"),
        (["checkpoint", "verify", "{folder}", "--tag", "none"], "missing"),
        (["profile", "--seconds", "-1"], "seconds must be > 0"),
    ],
)
def test_bad_input(files, arguments, message):
    (files / "junk.json").write_text("{not json")
    (files / "binary.json").write_bytes(b"\x80\xff")
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"]))
    plan.save(files / "other.json")
    newer = {**json.loads(plan.model_dump_json()), "schema_version": 99}
    (files / "newer.json").write_text(json.dumps(newer))
    known = {name: str(files / f"{name}.json") for name in ("machine", "workload", "junk", "binary", "other", "newer")}
    known["folder"] = str(files)
    filled = []
    for argument in arguments:
        if argument == "{good}":
            filled += inputs(files)
        else:
            filled.append(argument.format(**known))
    result = run(*filled)
    assert result.exit_code == 2
    assert message in result.output


def test_every_command_shows_an_example():
    for command in (["plan"], ["show"], ["simulate"], ["profile"], ["checkpoint"], ["checkpoint", "verify"]):
        assert "Example: tune" in run(*command, "--help").output


def test_sizes_and_durations():
    assert size_bytes("24GiB") == 24 * 2**30
    assert size_bytes("1.5 gb") == 1_500_000_000
    assert duration_s("4h") == 14_400
    assert duration_s("90s") == 90
    for bad in ("", "GiB", "-1GiB", "0", "5 parsecs"):
        with pytest.raises(ValueError, match="is needed"):
            size_bytes(bad)


def test_shells_complete_commands():
    words = {"_TUNE_COMPLETE": "bash_complete", "COMP_WORDS": "tune do", "COMP_CWORD": "1"}
    completed = CliRunner().invoke(main, [], prog_name="tune", env=words)
    assert completed.output.strip() == "plain,doctor"


def test_no_color_is_obeyed(files):
    planned = run("plan", *inputs(files), "-o", files / "plan.json")
    assert planned.exit_code == 0
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}
    shown = {
        no_color: CliRunner()
        .invoke(main, ["show", str(files / "plan.json")], env=terminal | {"NO_COLOR": no_color})
        .output
        for no_color in (None, "1")
    }
    colour = re.compile(r"\x1b\[(\d+;)*[349]\d")
    assert colour.search(shown[None])
    assert not colour.search(shown["1"])


def test_a_bar_appears_once_it_takes_long_and_goes(monkeypatch, capsys):
    from ebbtide.tuner.progress import progress_after

    monkeypatch.setenv("FORCE_COLOR", "1")
    for quiet_s, shown in ((1e9, False), (0.0, True)):
        with progress_after(quiet_s) as progress:
            progress(0.5, "annealing")
        assert ("annealing" in capsys.readouterr().err) == shown


def test_a_bar_appears_while_one_part_of_the_work_takes_long(monkeypatch, capsys):
    from ebbtide.tuner.progress import progress_after

    monkeypatch.setenv("FORCE_COLOR", "1")
    begun, start = Event(), Progress.start
    monkeypatch.setattr(Progress, "start", lambda bar: (start(bar), begun.set()))
    with progress_after(0.1) as progress:
        progress(0.0, "subgroup sizes")
        assert begun.wait(60), "the progress bar never started"
    assert "subgroup sizes" in capsys.readouterr().err
