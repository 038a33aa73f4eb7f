"""`tune search`: which configuration is fastest, what does not fit and why, and real runs."""

import json

import pytest
from click.testing import CliRunner

from simulator import preset, workload_from_model
from tuner.cli import main
from tuner.configurations.outcome import Outcome, Question
from tuner.configurations.space import Configuration, Space
from tuner.configurations.study import Answer, explore

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "intermediate_size": 5504, "vocab_size": 32000,
}  # fmt: skip


def question(**changes):
    return Question(LLAMA, preset("h100-node"), sequence=1024, **changes)


def outcome(tokens_per_s=1.0, device=1, why="", **knobs):
    return Outcome(Configuration(**knobs), 1.0, tokens_per_s, device, 1, why)


def answer(*outcomes, free=("offload",)):
    return Answer(Space.of(Configuration(), free), outcomes, complete=True)


def test_every_configuration_has_the_global_batch():
    space = Space.of(Configuration(gpus=4), ("micro_batch", "accumulation", "gpus"), 48)
    every = list(space)
    assert {c.global_batch for c in every} == {48}
    assert {c.gpus for c in every} == {1, 2, 4}
    assert {c.micro_batch for c in every if c.gpus == 4} == {1, 2, 3, 4, 6, 12}
    assert len(every) == len(set(every))


def test_a_global_batch_that_nothing_can_have_is_refused():
    with pytest.raises(ValueError, match=r"but 7 is not: .*free accumulation too \(--free\)"):
        Space.of(Configuration(gpus=4), ("recompute",), 7)


@pytest.mark.parametrize(("free", "got"), [(("colour",), "colour"), ((), "nothing")])
def test_unknown_knobs_are_refused(free, got):
    with pytest.raises(ValueError, match=f"--free must name some of .*, but got {got}"):
        Space.of(Configuration(), free)


def test_a_subgroup_size_means_nothing_without_offload():
    space = Space.of(Configuration(), ("offload", "sub_group_size"))
    assert sum(c.offload == "none" for c in space) == 1
    assert sum(c.offload == "optimizer" for c in space) == 3


def test_the_front_has_no_outcome_that_another_one_beats():
    fast, lean, worse = outcome(9.0, 80), outcome(5.0, 40), outcome(4.0, 60)
    front = answer(lean, worse, fast, outcome(99.0, 10, why="10 GiB are missing")).front
    assert front == [fast, lean]


def test_it_says_that_not_offloading_is_best():
    told = answer(outcome(2.0, offload="none"), outcome(1.0, offload="optimizer")).remarks()
    assert "not offloading is best: 2.00x the best configuration that does otherwise" in told


def test_it_says_when_nothing_fits_without_offload():
    told = answer(
        outcome(2.0, 9, why="3.0 GiB of device memory are missing", offload="none"),
        outcome(1.0, offload="optimizer"),
    ).remarks()
    assert any("otherwise nothing fits (3.0 GiB of device memory are missing" in t for t in told)


def test_it_says_that_fewer_gpus_do():
    told = answer(outcome(100.0, gpus=4), outcome(97.0, gpus=2), free=("gpus",)).remarks()
    assert any(t.startswith("fewer GPUs do: 2 GPUs") and "97%" in t for t in told)
    told = answer(outcome(100.0, gpus=4), outcome(60.0, gpus=2), free=("gpus",)).remarks()
    assert not any("fewer GPUs" in t for t in told)


def test_a_knobs_cost_is_the_best_that_its_value_allows():
    found = answer(
        outcome(10.0, recompute=False), outcome(8.0, recompute=True),
        outcome(9.0, recompute=True, micro_batch=2), free=("recompute",),
    )  # fmt: skip
    assert found.costs() == {"recompute": {False: 1.0, True: 0.9}}


def test_the_search_finds_what_simulating_everything_finds():
    space = Space.of(Configuration(gpus=2), ("micro_batch", "recompute", "offload"), 16)
    found = explore(question(), space)
    assert found.complete
    assert {o.configuration for o in found.outcomes} == set(space)
    best = max((question().answer(c) for c in space), key=lambda o: o.fits * o.tokens_per_s)
    assert found.fitting[0].tokens_per_s == best.tokens_per_s


def test_little_memory_makes_it_offload_and_says_what_is_missing():
    small = question(device_memory_bytes=12 * 2**30)
    space = Space.of(Configuration(gpus=1), ("offload",))
    found = explore(small, space)
    fits = found.fitting[0]
    (lacks,) = [o for o in found.outcomes if not o.fits]
    assert fits.configuration.offload == "optimizer"
    assert "GiB of device memory are missing" in lacks.why_not
    work = workload_from_model(LLAMA, preset("h100-node"), sequence=1024)
    assert fits.plan.subgroups == work.subgroups, "the plan is for the workload it was made for"


def test_a_large_space_is_sampled_within_its_trials_and_kept(tmp_path):
    import optuna

    storage = f"sqlite:///{tmp_path / 'study.db'}"
    space = Space.of(Configuration(gpus=4), ("micro_batch", "accumulation", "gpus"), 64)
    found = explore(question(), space, trials=6, storage=storage)
    assert not found.complete
    assert 1 <= len(found.outcomes) <= 6
    (summary,) = optuna.get_all_study_summaries(storage)
    assert summary.n_trials == 6


def test_the_command_writes_what_it_prints(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = [
        "search", "--machine", "h100-node", "--model", str(tmp_path / "config.json"),
        "--global-batch", "16", "--gpus", "2", "--sequence", "1024",
        "--free", "micro_batch,accumulation,recompute,offload", "-o", str(tmp_path / "s.json"),
    ]  # fmt: skip
    printed = CliRunner().invoke(main, words)
    assert printed.exit_code == 0, printed.output
    record = json.loads((tmp_path / "s.json").read_text())
    assert printed.output.startswith(record["remarks"][0][:40])
    assert record["best"]["configuration"]["gpus"] == 2
    assert {row["configuration"]["micro_batch"] for row in record["outcomes"]} == {1, 2, 4, 8}
    again = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert again["best"] == record["best"], "deterministic"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--free", "colour"], "--free must name some of"),
        (["--global-batch", "7", "--free", "recompute", "--gpus", "4"], "but 7 is not"),
        (["--gpu-memory", "1GiB"], "nothing fits"),
        (["--verify", "1"], "must be a Hugging Face config.json with a model_type"),
    ],
)
def test_what_cannot_be_searched_ends_with_one_line(tmp_path, words, message):
    plain = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 32000}
    model = plain if "--verify" in words else LLAMA
    (tmp_path / "config.json").write_text(json.dumps(model))
    common = ["search", "--machine", "h100-node", "--model", str(tmp_path / "config.json")]
    free = [] if "--free" in words else ["--free", "recompute"]
    ended = CliRunner().invoke(main, [*common, *free, *words])
    assert ended.exit_code == 2
    assert message in ended.stderr.splitlines()[-1]
