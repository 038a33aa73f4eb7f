"""Tests of `tune verify`, which compares training runs with and without a plan: the values compared, the first
difference that is named, and scripts that differ from themselves.

`tests/test_documents.py` runs the command on a real script with a plan of its own.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ebbtide.runtime.verify.lines import Lines, Piece
from ebbtide.tuner.cli import main
from ebbtide.tuner.verify.comparison import Verification, compare, verify
from ebbtide.tuner.verify.launch import NotDeterministicError, Side, launch, operations_in
from ebbtide.tuner.verify.report import as_json, screen
from ebbtide.tuner.verify.run import read_run

from studies.bench.rank import free_port
from tests.conftest import RANK_VARIABLES

ROOT = Path(__file__).parents[2]
STEPS, RATE = 6, 1e-3
ABOUT = {
    "side": "stock",
    "key": False,
    "offload": True,
    "stage": 2,
    "dtype": "bf16",
    "ranks": 1,
    "versions": {"deepspeed": "0.18.6", "torch": "2"},
    "port": None,
}
SHAPES = {"embed": 3000, "norm": 64, "head": 2000}


def weights(name):
    generator = torch.Generator().manual_seed(len(name))
    return 0.02 * torch.randn(SHAPES[name], generator=generator)


def update(name, step):
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return RATE * torch.randn(SHAPES[name], generator=generator).sign()


class Trained:
    """A synthetic training run, which writes the files that a real run under `tune verify` writes.

    A test may change the run's state at given steps.
    """

    def __init__(self, folder, name, ranks=1, noise=0.0, **about):
        self.folder, self.name, self.ranks, self.noise = folder / name, name, ranks, noise
        self.about = ABOUT | {"ranks": ranks} | about
        self.at = {}

    def change(self, step, what):
        self.at[step] = what
        return self

    def run(self):
        self.folder.mkdir()
        files = [Lines(self.folder, rank, self.about) for rank in range(self.ranks)]
        state = {name: weights(name) for name in SHAPES}
        rng = torch.Generator().manual_seed(7)
        for step in range(STEPS + 1):
            old = {name: values.clone() for name, values in state.items()}
            facts = {"losses": [4.0 - 0.1 * step], "norm": 1.0 / (1 + step), "rates": [RATE]}
            for name, values in state.items():
                if step:
                    values += update(name, step)
                    values += self.noise * RATE * torch.randn(values.shape, generator=rng)
            if self.noise and step:
                facts["norm"] *= 1 + self.noise
            wire = {name: values.bfloat16() for name, values in state.items()}
            if step in self.at:
                self.at[step](state, wire, old, facts)
                wire = {n: state[n].bfloat16() if wire[n] is not None else old[n].bfloat16() for n in wire}
            for rank, file in enumerate(files):
                file.step(self.pieces(state, wire, rank), **facts)
        return replace(read_run(self.folder, self.name), name=self.name)

    def pieces(self, state, wire, rank):
        for name in SHAPES:
            size = -(-SHAPES[name] // self.ranks)
            part = slice(rank * size, (rank + 1) * size)
            yield Piece(name, wire[name], 0, SHAPES[name])
            yield Piece(f"{name}/fp32", state[name][part], rank * size, SHAPES[name])


@pytest.fixture
def stock(tmp_path):
    return Trained(tmp_path, "stock").run()


def flip(name, at=17):
    def change(state, wire, old, facts):
        state[name].view(torch.int32)[at] ^= 1

    return change


def test_runs_on_other_numbers_of_ranks_are_compared_by_whole_tensors(tmp_path, stock):
    split = Trained(tmp_path, "plan", ranks=3).run()
    finding = compare(split, stock)
    # The runs differ only in the loss of each rank.
    assert finding.first is None or finding.first.name.startswith("loss")
    tensors = [step.tensors for step in split.steps]
    for ours, theirs in zip(tensors, [step.tensors for step in stock.steps], strict=True):
        assert {n: t.hash for n, t in ours.items()} == {n: t.hash for n, t in theirs.items()}


def test_one_flipped_bit_is_found_at_its_step_and_tensor(tmp_path, stock):
    plan = Trained(tmp_path, "plan").change(5, flip("head")).run()
    finding = compare(plan, stock)
    assert (finding.verdict, finding.first.step, finding.first.name) == ("different", 5, "head/fp32")
    assert 0 < finding.first.distance < 1e-8
    result = Verification((plan, stock), (finding,))
    assert result.right is False
    assert any("DIFFERENT from step 5: head/fp32" in line for line in screen(result))
    assert json.dumps(as_json(result))


def skipped(state, wire, old, facts):
    for name in state:
        state[name].copy_(old[name])


def stale(state, wire, old, facts):
    wire["norm"] = None


def lost_norm(state, wire, old, facts):
    facts["norm"] /= 4


def warmer(state, wire, old, facts):
    facts["rates"] = [RATE * (1 + 1e-9)]


def other_loss(state, wire, old, facts):
    facts["losses"] = [1.003 * facts["losses"][0]]


def not_a_number(state, wire, old, facts):
    state["head"][3] = float("nan")


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (skipped, "/fp32", "nearly all masters differ"),
        (stale, "norm", "the masters are the same: the fault comes after the update"),
        (lost_norm, "gradient norm", "the losses of this step are the same"),
        (warmer, "learning rate of group 0", "1e-09 apart"),
        (other_loss, "loss of micro-batch 1, rank 0", "look for different data"),
        (not_a_number, "head/fp32", "not measurable"),
    ],
)
def test_the_first_difference_and_its_likely_cause_are_named(tmp_path, stock, change, name, says):
    wrong = Trained(tmp_path, "plan").change(4, change).run()
    finding = compare(wrong, stock)
    assert (finding.verdict, finding.first.step) == ("different", 4)
    assert finding.first.name.endswith(name)
    assert any(says in line for line in screen(Verification((wrong, stock), (finding,))))


def test_a_run_that_ends_earlier_than_the_other_is_different(stock):
    short = replace(stock, steps=stock.steps[:-2])
    finding = compare(short, stock)
    assert (finding.verdict, finding.first.name) == ("different", "number of steps")
    assert (finding.first.ours, finding.first.theirs) == (STEPS - 2, STEPS)
    assert screen(Verification((short, stock), (finding,)))


def test_copies_that_differ_between_ranks_are_told(tmp_path):
    run = Trained(tmp_path, "stock", ranks=2).run()
    lines = (run_file := tmp_path / "stock" / "rank1.jsonl").read_text().splitlines()
    step = json.loads(lines[3])
    step["tensors"]["norm"] = json.loads(lines[4])["tensors"]["norm"]
    run_file.write_text("\n".join([*lines[:3], json.dumps(step), *lines[4:], ""]))
    wrong = read_run(tmp_path / "stock", "stock")
    finding = compare(wrong, replace(run, name="no-offload"))
    assert (finding.verdict, finding.first.step, finding.first.name) == ("different", 2, "norm")
    assert "stock: ranks hold different copies of it" in finding.why


def as_side(run, side):
    """Return a run as `launch` would return it: only the run under the plan has the key of a plan."""
    return replace(run, name=side.title, about=run.about | {"key": side.name == "plan"})


def test_a_run_without_offload_decides_only_where_no_other_pair_does(tmp_path, stock):
    other = Trained(tmp_path, "no-offload", noise=1e-4).run()
    seen = []

    def start(side):
        seen.append(side)
        return as_side(other if side.name == "no-offload" else stock, side)

    result = verify(("stock", "no-offload"), start, lambda _: None)
    assert [finding.verdict for finding in result.findings] == ["identical", "different"]
    assert result.right is True
    assert [side.name for side in seen] == ["plan", "stock", "no-offload"]
    assert any("is rounding" in line for line in screen(result))
    result = verify(("no-offload",), start, lambda _: None)
    assert [finding.verdict for finding in result.findings] == ["different"]
    assert result.right is None
    assert verify(("no-offload",), lambda side: as_side(stock, side), lambda _: None).right is True


@pytest.mark.parametrize("recurs", [True, False])
def test_a_plan_with_other_bits_is_wrong_and_its_second_run_tells_if_that_recurs(tmp_path, stock, recurs):
    wrong = Trained(tmp_path, "wrong").change(5, flip("embed")).run()
    seen = []

    def start(side):
        seen.append(side.name)
        return as_side(wrong if side.name == "plan" and (recurs or seen.count("plan") == 1) else stock, side)

    result = verify(("stock",), start, lambda _: None)
    assert result.right is False
    assert [finding.verdict for finding in result.findings] == ["different"]
    assert any("a race, or faulty hardware" in line for line in result.findings[0].why) is not recurs
    assert seen == ["plan", "stock", "stock", "plan"]


def other_parameters(number, state, wire, old, facts):
    for values in state.values():
        values.mul_(1 + 0.01 * number)


def other_data(number, state, wire, old, facts):
    facts["losses"] = [(1 + 0.003 * number) * facts["losses"][0]]


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ({}, "gradients are lost, counted twice, or added in another order"),
        ({1: other_data}, "look for different data"),
        ({0: other_parameters}, "the parameters differ before the first step"),
    ],
)
@pytest.mark.parametrize(("key", "offload"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_script_that_differs_from_itself_gives_no_verdict(tmp_path, monkeypatch, at, says, key, offload, form):
    made = []

    def start(command, side, steps, seed, *, deterministic):
        number = len(made)
        own = key and side.name == "plan"
        run = Trained(tmp_path, f"r{number}", noise=number * 1e-3, key=own, offload=offload)
        for step, change in at.items():
            run.change(step, partial(change, number))
        made.append(side)
        return replace(run.run(), name=side.title, operations=("scatter_add",) if side.deterministic else ())

    monkeypatch.setattr("ebbtide.tuner.verify.launch.launch", start)
    done = CliRunner().invoke(main, ["verify", *form, "--", "true"])
    assert done.exit_code == 3, done.output
    if form:
        told = json.loads(done.stdout)
        assert (told["right"], told["identical"]) == (None, False)
        assert {finding["verdict"] for finding in told["findings"]} == {"nondeterministic"}
        assert told["operations"] == ["scatter_add"]
        return
    assert "NOTHING CAN BE SAID, since the script differs from itself" in done.stdout
    assert says in done.stdout
    assert "torch names scatter_add" in done.stdout


def test_bad_input_ends_with_one_line(tmp_path):
    for words, says in (
        (["--against", "nothing", "--", "true"], "--against must name one or more of"),
        (["--", "no-such-program"], "must be a program on PATH"),
        (["--", "train.py"], "Start the script by a launcher or by `python train.py`"),
        (["--", "true"], "must train with a DeepSpeed engine"),
    ):
        result = CliRunner().invoke(main, ["verify", *words])
        assert result.exit_code == 2
        assert says in result.output


BREAKS_OFF = """
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(2):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
raise RuntimeError("out of luck")
"""


def test_a_command_that_fails_on_its_way_is_not_identical(tmp_path):
    (tmp_path / "train.py").write_text(BREAKS_OFF)
    words = ["--steps", "4", "--", sys.executable, str(tmp_path / "train.py")]
    result = CliRunner().invoke(main, ["verify", *words])
    assert result.exit_code == 2
    assert "failed with exit code 1 after 2" in result.output
    assert "out of luck" in result.output


NAMES = {
    "UserWarning: scatter_add_cuda_kernel does not have a deterministic implementation, but you set": (
        "scatter_add_cuda_kernel",
    ),
    "x.py:3: UserWarning: Flash Attention defaults to a non-deterministic algorithm. To explicitly enable": (
        "Flash Attention",
    ),
    "UserWarning: Memory Efficient attention defaults to a non-deterministic algorithm.": (
        "Memory Efficient attention",
    ),
    "a deterministic run": (),
}


@pytest.mark.parametrize("text", NAMES)
def test_both_of_torchs_sentences_name_an_operation(text):
    assert operations_in(f"before\n{text}\n{text}\n") == NAMES[text]


PUTS = """
import os, sys
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(2):
    layer(torch.ones(2, 4)).sum().backward()
    if len(sys.argv) > 2:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))  # has no deterministic kernel
    optimizer.step()
with open(sys.argv[1], "a") as file:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, workspace = torch.utils.deterministic.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    compiled = "torch._inductor" in sys.modules  # takes over a second to import
    if flags[0] and not compiled:
        from torch._inductor import config
        compiled = "when used" if config.deterministic else "not when used"
    print(*flags, filled, workspace, compiled, file=file)
"""
STRICT, OWN = "True False False :4096:8 when used", "False False True None False"


@pytest.mark.parametrize(
    ("gpu", "words", "strict"),
    [(True, [], True), (False, [], False), (True, ["--no-deterministic"], False), (False, ["--deterministic"], True)],
)
def test_on_a_gpu_all_sides_train_deterministically(tmp_path, monkeypatch, stock, gpu, words, strict):
    # Runs on a GPU are deterministic by default, so that two of them can be compared.
    asked = []

    def start(command, side, steps, seed, *, deterministic):
        asked.append(deterministic)
        return replace(stock, name=side.title)

    monkeypatch.setattr("ebbtide.tuner.verify.launch.has_gpu", lambda: gpu)
    monkeypatch.setattr("ebbtide.tuner.verify.launch.launch", start)
    result = CliRunner().invoke(main, ["verify", *words, "--", "true"])
    assert result.exit_code == 0, result.output
    assert asked == [strict] * 2


def test_a_launched_script_runs_with_deterministic_algorithms(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    (tmp_path / "train.py").write_text(PUTS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "flags")]
    made = launch(command, Side("plan"), 4, deterministic=True)
    assert (tmp_path / "flags").read_text().splitlines() == [STRICT]
    monkeypatch.setattr("ebbtide.tuner.verify.launch.launch", lambda *_, **__: made)
    result = CliRunner().invoke(main, ["verify", "--steps", "4", "--", "true"])
    assert result.exit_code == 0, result.output
    assert "2 steps (of 4 asked for: the command ended)" in result.output


def test_an_operation_without_a_deterministic_kernel_is_named_and_run_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("ebbtide.tuner.verify.launch.has_gpu", lambda: True)
    (tmp_path / "train.py").write_text(PUTS)
    command = ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path / "flags"), "put"]
    result = CliRunner().invoke(main, ["verify", *command])
    assert result.exit_code == 0, result.output
    assert "no deterministic kernel for put_: running again" in result.output
    assert (tmp_path / "flags").read_text().splitlines() == [OWN] * 2


def test_an_operation_without_a_deterministic_kernel_is_refused_where_one_is_required(monkeypatch, stock):
    def start(command, side, steps, seed, *, deterministic):
        if deterministic:
            raise NotDeterministicError(("put_",))
        return replace(stock, name=side.title)

    monkeypatch.setattr("ebbtide.tuner.verify.launch.launch", start)
    result = CliRunner().invoke(main, ["verify", "--deterministic", "--", "true"])
    assert result.exit_code == 2
    assert "put_ has no deterministic kernel in torch. Use --no-deterministic" in result.output


SCRIPT = """
import json, sys
import deepspeed, torch
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, train_step

torch.set_num_threads(1)
torch.manual_seed(0)
model = ByteGPT(SIZES["tiny"])
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                              config=json.load(open(sys.argv[1])))[0]
batches = Batches(2, 32)
for step in range(100):
    train_step(engine, batches.at(step, engine.device))
"""


@pytest.mark.slow
def test_an_unchanged_script_is_identical_under_its_plan(only_rank, monkeypatch, tmp_path):
    from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config
    from tests.runtime.contract.training import SUBGROUP, plan_for, start

    engine = start(ByteGPT(SIZES["tiny"]))
    plan = plan_for(engine, ["host", "device", "resident"]).model_dump(mode="json")
    engine.destroy()
    config = ds_config(2, SUBGROUP, learning_rate=1e-3)
    config["ebbtide"] = {"plan": plan, "device": "emulated"}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    words = "verify --steps 3 --against stock --json --"
    done = CliRunner().invoke(main, [*words.split(), sys.executable, "train.py", "ds.json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["right"], told["identical"]) == (True, True)
    assert [side["name"] for side in told["sides"]] == ["plan", "stock"]
    assert all(side["steps"] == 3 for side in told["sides"])
    assert [(finding["verdict"], finding["steps"]) for finding in told["findings"]] == [("identical", 3)]
