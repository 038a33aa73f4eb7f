"""Tests of `tune verify`, which compares training runs with and without a plan: the values compared, the
differences that count as rounding, and the run that is blamed for a defect.

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
from ebbtide.tuner.verify import sides as verification
from ebbtide.tuner.verify.judge import Noise, judge
from ebbtide.tuner.verify.launch import NotDeterministicError, Side, launch, operations_in
from ebbtide.tuner.verify.run import read_run
from ebbtide.tuner.verify.sides import compared, verify
from ebbtide.tuner.verify.words import as_json, screen

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
            yield Piece(f"{name}/fp32", state[name][part], rank * size, SHAPES[name], torch.bfloat16)


@pytest.fixture
def stock(tmp_path):
    return Trained(tmp_path, "stock").run()


@pytest.fixture
def noise(tmp_path, stock):
    flipped = Trained(tmp_path, "flipped", noise=1e-4).run()
    return Noise(stock, (stock, flipped))


def flip(name, at=17):
    def change(state, wire, old, facts):
        state[name].view(torch.int32)[at] ^= 1

    return change


def test_runs_on_other_numbers_of_ranks_are_compared_by_whole_tensors(tmp_path, stock):
    split = Trained(tmp_path, "plan", ranks=3).run()
    finding = judge(split, stock, None, same_bits=True)
    # The runs differ only in the loss of each rank.
    assert finding.first is None or finding.first.name.startswith("loss")
    tensors = [step.tensors for step in split.steps]
    for ours, theirs in zip(tensors, [step.tensors for step in stock.steps], strict=True):
        assert {n: t.hash for n, t in ours.items()} == {n: t.hash for n, t in theirs.items()}


def test_one_flipped_bit_is_found_at_its_step_and_tensor(tmp_path, stock, noise):
    plan = Trained(tmp_path, "plan").change(5, flip("head")).run()
    finding = judge(plan, stock, noise, same_bits=True)
    assert (finding.verdict, finding.off) == ("defect", "plan")
    assert (finding.first.step, finding.first.name) == (5, "head/fp32")
    assert 0 < finding.first.distance < 1e-8
    lines = screen(verification.Verification((plan, stock), (finding,)))
    assert any("DIFFERENT from step 5: head/fp32" in line for line in lines)
    assert json.dumps(as_json(verification.Verification((plan, stock), (finding,))))


def test_rounding_is_no_defect_and_a_norm_far_off_is(tmp_path, stock, noise):
    rounded = Trained(tmp_path, "no-offload", noise=2e-4).run()
    finding = judge(stock, rounded, noise, same_bits=False)
    assert (finding.verdict, finding.first.step) == ("rounding", 1)

    def lost(state, wire, old, facts):
        facts["norm"] /= 4

    wrong = Trained(tmp_path, "wrong", noise=1e-4).change(3, lost).run()
    finding = judge(wrong, rounded, noise, same_bits=False)
    assert (finding.verdict, finding.off) == ("defect", "wrong")
    assert (finding.first.step, finding.first.name) == (3, "gradient norm")


@pytest.mark.parametrize(("bit", "verdict"), [(0, "rounding"), (21, "defect")])
def test_a_change_in_one_place_only_is_a_defect_if_an_update_cannot_round_so(tmp_path, stock, noise, bit, verdict):
    """Check how `tune verify` judges a single changed element of the training state in two runs that may round
    differently, but were identical before. A change of the lowest bit counts as rounding, and of a high
    mantissa bit as a defect.
    """

    def change(state, wire, old, facts):
        state["embed"].view(torch.int32)[3] ^= 1 << bit

    wrong = Trained(tmp_path, "wrong").change(5, change).run()
    finding = judge(wrong, replace(stock, name="no-offload"), noise, same_bits=False)
    assert (finding.verdict, finding.first.step) == (verdict, 5)
    assert finding.first.name == "embed/fp32"


def skipped(state, wire, old, facts):
    for name in state:
        state[name].copy_(old[name])


def stale(state, wire, old, facts):
    wire["norm"] = None


def narrowed(state, wire, old, facts):
    state["embed"].copy_(state["embed"].bfloat16().float())


def lost_tensor(state, wire, old, facts):
    state["head"].copy_(old["head"])


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (skipped, "/fp32", "it is as it was a step before"),
        (stale, "norm", "the parameter is not its master, rounded"),
        (narrowed, "embed/fp32", "its elements have 16 bits only"),
        (lost_tensor, "head/fp32", "it is as it was a step before"),
    ],
)
def test_a_side_that_is_wrong_is_seen_by_its_own_state(tmp_path, stock, noise, change, name, says):
    """Check that `tune verify` names the one of two training runs that went wrong. It can tell from the wrong run's own
    training state, such as a tensor that a step did not change.

    Here the run that serves as the reference went wrong. The other run differs from a correct one only by rounding.
    """
    rounded = Trained(tmp_path, "plan", noise=1e-4).run()
    wrong = Trained(tmp_path, "wrong").change(4, change).run()
    finding = judge(rounded, wrong, noise, same_bits=False)
    assert (finding.verdict, finding.off) == ("defect", "wrong")
    assert finding.first.step == 4
    assert finding.first.name.endswith(name)
    assert any(says in line for line in finding.why)


def doubled_update(state, wire, old, facts):
    state["head"].add_(state["head"] - old["head"])


def few_flips(state, wire, old, facts):
    """Change the sign of the updates of eight elements, a difference that `tune verify` must count as rounding.

    Another order of summation can have the same effect on elements whose gradient is about zero.
    """
    state["head"][:8] += 2 * (old["head"] - state["head"])[:8]


@pytest.mark.parametrize(
    ("change", "rounds", "verdict"),
    [
        (lost_tensor, 0.0, "defect"),
        (lost_tensor, 1e-3, "defect"),
        (doubled_update, 0.0, "defect"),
        (few_flips, 0.0, "rounding"),
        (skipped, 1e-3, "rounding"),
    ],
)
def test_an_update_of_one_tensor_that_goes_wrong_late_is_found_beside_loud_rounding(
    tmp_path, stock, change, rounds, verdict
):
    """Check that `tune verify` finds a lost or doubled update of one tensor in step 4, although rounding alone makes
    differences of similar size.

    A few elements with an update of opposite sign must count as rounding, and so must a step that one of the runs
    skips.
    """

    def norm(state, wire, old, facts):
        facts["norm"] *= 1 + 1e-8

    def changed(*given):
        change(*given)
        norm(*given)

    wrong = Trained(tmp_path, "stock with it", noise=rounds)
    for step in range(1, STEPS + 1):
        wrong.change(step, changed if step == 4 else norm)
    reference = replace(stock, name="no-offload")
    loud = Noise(reference, (reference, Trained(tmp_path, "flipped", noise=0.2).run()))
    finding = judge(wrong.run(), reference, loud, same_bits=False)
    assert finding.verdict == verdict
    if verdict == "defect":
        assert (finding.first.step, finding.first.name) == (4, "head/fp32")
        assert finding.first.relative < 10 * finding.explained, "the size of the difference alone would show the defect"


@pytest.mark.parametrize(
    ("off", "sums", "verdict"), [(0.03, 1e-8, "defect"), (0.03, 1e-4, "rounding"), (0.001, 1e-8, "rounding")]
)
def test_equal_gradients_that_make_another_update_are_no_rounding(tmp_path, stock, off, sums, verdict):
    """Check that `tune verify` reports a defect if one run's update in a step is 3% larger than the other
    run's although their gradient norms agree.

    The difference counts as rounding if the gradient norms differ as well, or if the update is only 0.1% larger.
    """

    def other_rate(state, wire, old, facts):
        norm(state, wire, old, facts)
        for name, values in state.items():
            values += off * (values - old[name])

    def norm(state, wire, old, facts):
        facts["norm"] *= 1 + sums

    wrong = Trained(tmp_path, "stock with it")
    for step in range(1, STEPS + 1):
        wrong.change(step, other_rate if step == 4 else norm)
    reference = replace(stock, name="no-offload")
    loud = Noise(reference, (reference, Trained(tmp_path, "flipped", noise=0.05).run()))
    finding = judge(wrong.run(), reference, loud, same_bits=False)
    assert finding.verdict == verdict
    if verdict == "defect":
        assert (finding.first.step, finding.first.name.endswith("/fp32")) == (4, True)


def test_who_agrees_with_a_third_is_not_blamed(tmp_path, stock, noise):
    plan = replace(stock, name="plan")
    apart = Trained(tmp_path, "wrong").change(5, flip("embed")).run()
    first, _ = compared((plan, apart, replace(stock, name="no-offload")), noise)
    assert (first.verdict, first.off) == ("defect", "wrong")
    first, _ = compared((apart, plan, replace(stock, name="no-offload")), noise)
    assert (first.verdict, first.off) == ("defect", "wrong")


@pytest.mark.parametrize("odd", ["plan", "stock"])
@pytest.mark.parametrize("against", [("stock",), ("stock", "no-offload")])
def test_what_does_not_recur_is_blamed_on_the_run_that_had_it(tmp_path, odd, against):
    """Check that `tune verify` blames a single wrong bit on the right run: the run under a plan, or the run of stock
    DeepSpeed.

    If the two runs differ, `tune verify` repeats both. The run that does not give the same result again had the wrong
    bit. In some cases there is a third run, without offload. It rounds differently and must not change the verdict.
    """
    made, rounded = Trained(tmp_path, "right").run(), Trained(tmp_path, "third", noise=1e-4).run()
    wrong = Trained(tmp_path, "wrong").change(5, flip("embed")).run()
    seen = []

    def start(side):
        run = rounded if side.name == "no-offload" else made
        if side.name == odd and side not in seen:
            run = wrong
        seen.append(side)
        key = replace(run, about=run.about | {"key": side.name == "plan"})
        return replace(key, name=side.title)

    result = verify(against, start, lambda _: None)
    assert not result.right
    assert (result.findings[0].verdict, result.findings[0].off) == ("defect", odd)
    assert (result.findings[0].first.step, result.findings[0].first.name) == (5, "embed/fp32")
    assert any("does not recur" in line for line in result.findings[0].why)
    assert [finding.verdict for finding in result.findings[1:]] in ([], ["rounding"])


def test_what_recurs_is_blamed_as_without_running_it_again(tmp_path, stock):
    wrong = Trained(tmp_path, "wrong", key=True).change(5, flip("embed")).run()

    def start(side):
        return replace(wrong if side.name == "plan" else stock, name=side.title)

    result = verify(("stock",), start, lambda _: None)
    assert (result.findings[0].verdict, result.findings[0].off) == ("defect", "plan")
    assert not any("recur" in line for line in result.findings[0].why)


@pytest.mark.parametrize(("off", "verdict"), [(2e-4, "rounding"), (1.5e-3, "defect")])
def test_a_loss_is_measured_by_what_a_flipped_bit_makes_of_losses(tmp_path, stock, off, verdict):
    """Check that `tune verify` judges a difference in loss between two runs by how much a flipped bit in the
    training state changes the losses.

    Here the flipped bit changes the loss of step 4 by 0.004%. A difference of 0.02% between two runs then
    counts as rounding, and one of 0.15% as a defect.
    """

    def jitter(step):
        def change(state, wire, old, facts):
            facts["losses"] = [facts["losses"][0] * (1 + 1e-5 * step)]

        return change

    flipped, wrong = Trained(tmp_path, "flipped", noise=1e-4), Trained(tmp_path, "wrong")
    for step in range(1, STEPS + 1):
        flipped.change(step, jitter(step))

    def stale(state, wire, old, facts):
        facts["losses"] = [facts["losses"][0] * (1 + off)]

    noise = Noise(stock, (stock, flipped.run()))
    finding = judge(wrong.change(4, stale).run(), stock, noise, same_bits=False)
    assert finding.verdict == verdict
    assert finding.first.name.startswith("loss of micro-batch 1")


def test_a_learning_rate_that_differs_is_no_rounding(tmp_path, stock, noise):
    def warmer(state, wire, old, facts):
        facts["rates"] = [RATE * (1 + 1e-9)]

    finding = judge(Trained(tmp_path, "wrong").change(2, warmer).run(), stock, noise, same_bits=False)
    assert (finding.verdict, finding.first.name) == ("defect", "learning rate of group 0")


def test_wrong_scalars_move_all_masters_alike(tmp_path, stock, noise):
    """Check that updates 6% too large in all tensors are found, though each alone could be rounding."""

    def ahead(state, wire, old, facts):
        for name, values in state.items():
            values += 0.06 * (values - old[name])

    rounded = Trained(tmp_path, "no-offload", noise=1e-4).run()
    wrong = Trained(tmp_path, "wrong").change(2, ahead).run()
    finding = judge(wrong, rounded, noise, same_bits=False)
    assert (finding.verdict, finding.first.step) == ("defect", 2)
    assert finding.first.name.endswith("/fp32")
    assert finding.first.relative < 10 * finding.explained
    assert any("step count" in line for line in finding.why)


def test_copies_that_differ_between_ranks_are_told(tmp_path):
    run = Trained(tmp_path, "stock", ranks=2).run()
    lines = (run_file := tmp_path / "stock" / "rank1.jsonl").read_text().splitlines()
    step = json.loads(lines[3])
    step["tensors"]["norm"] = json.loads(lines[4])["tensors"]["norm"]
    run_file.write_text("\n".join([*lines[:3], json.dumps(step), *lines[4:], ""]))
    wrong = read_run(tmp_path / "stock", "stock")
    finding = judge(wrong, replace(run, name="no-offload"), None, same_bits=False)
    assert (finding.verdict, finding.off, finding.first.step) == ("defect", "stock", 2)
    assert any("ranks hold different copies" in line for line in finding.why)


def test_further_runs_are_made_only_where_bits_differ(tmp_path, stock):
    other = Trained(tmp_path, "no-offload", noise=1e-4).run()
    seen = []

    def start(equal):
        def started(side):
            seen.append(side)
            away = side.perturb or (not equal and side.name == "no-offload")
            return replace(other if away else stock, name=side.title)

        return started

    result = verify(("stock", "no-offload"), start(True), seen.append)
    assert result.right
    assert [s.name for s in seen if isinstance(s, Side)] == ["plan", "no-offload"]
    seen.clear()
    result = verify(("stock", "no-offload"), start(False), seen.append)
    assert [f.verdict for f in result.findings] == ["rounding"]
    made = [s for s in seen if isinstance(s, Side)]
    assert [s.name for s in made] == ["plan", *["no-offload"] * 3]
    assert [s.perturb for s in made] == [False, False, False, True]


def test_a_script_that_does_not_agree_with_itself_is_said(tmp_path, stock):
    runs = iter([stock, *(Trained(tmp_path, f"r{n}", noise=1e-4 * n).run() for n in (1, 2, 3, 4))])

    def start(side):
        return replace(next(runs), operations=("scatter_add",) if side.deterministic else ())

    result = verify(("no-offload",), start, lambda _: None)
    assert [f.verdict for f in result.findings] == ["nondeterministic"]
    assert any("torch names scatter_add" in line for line in screen(result))


def other_parameters(number, state, wire, old, facts):
    for values in state.values():
        values.mul_(1 + 0.01 * number)


def other_data(number, state, wire, old, facts):
    facts["losses"] = [(1 + 0.003 * number) * facts["losses"][0]]


@pytest.mark.parametrize(
    ("noise", "at", "code", "says"),
    [
        (1e-3, {}, 0, "equal but for the difference between two runs of one side"),
        (0.5, {}, 3, "the losses of step 1 are the same, but its gradient norm differs"),
        (0.5, {1: other_data}, 3, "look for different data"),
        (0.0, {0: other_parameters}, 3, "the parameters differ before the first step"),
    ],
)
@pytest.mark.parametrize("stage", [2, None])
def test_where_a_script_does_not_train_like_itself_nothing_is_said(tmp_path, monkeypatch, noise, at, code, says, stage):
    """Check `tune verify` on runs that differ from themselves: much gives no verdict, little only a remark."""
    made = []

    def start(command, side, steps, seed, *, deterministic):
        number = len(made)
        run = Trained(tmp_path, f"r{number}", noise=number * noise, stage=stage, offload=bool(stage))
        for step, change in at.items():
            run.change(step, partial(change, number))
        made.append(side)
        return replace(run.run(), name=side.title)

    monkeypatch.setattr("ebbtide.tuner.verify.launch.launch", start)
    out = tmp_path / "out.json"
    done = CliRunner().invoke(main, ["verify", "--json", str(out), "--", "true"])
    assert done.exit_code == code, done.output
    assert says in done.output
    assert ("NOTHING CAN BE SAID" in done.output) == (code == 3)
    told = json.loads(out.read_text())
    assert told["right"] is {0: True, 3: None}[code]
    assert told["chance"]["blind"] == (code == 3)


def test_bad_input_ends_with_one_line(tmp_path):
    for words, says in (
        (["--against", "nothing", "--", "true"], "--against must name one or more of"),
        (["--", "no-such-program"], "must be a program on PATH"),
        (["--", "train.py"], "Start the script by a launcher or by `python train.py`"),
        (["--json", str(tmp_path / "none" / "x.json"), "--", "true"], "--json must be a file that can be written"),
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
    """Check that a script that fails after two identical steps is reported as failed, not as identical."""
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
    """Check that runs on a GPU are deterministic by default, so that a wrong bit does not count as noise."""
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
    words = "verify --steps 3 --against stock --json out.json --"
    done = CliRunner().invoke(main, [*words.split(), sys.executable, "train.py", "ds.json"])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["identical"]
    assert [side["name"] for side in told["sides"]] == ["plan", "stock"]
    assert all(side["steps"] == 3 for side in told["sides"])
    assert "identical, every bit of 3 steps" in done.stdout
