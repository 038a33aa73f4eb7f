"""Tests of the Optuna study that a configuration search is."""

import json

import optuna
import pytest
from click.testing import CliRunner
from ebbtide.simulator import preset
from ebbtide.simulator.estimates.knobs import KNOBS as TABLE
from ebbtide.tuner.cli import main
from ebbtide.tuner.configurations import report
from ebbtide.tuner.configurations.deciding import explore
from ebbtide.tuner.configurations.evaluation import SearchQuestion
from ebbtide.tuner.configurations.space import KNOBS, Configuration, Space
from ebbtide.tuner.service import requests
from optuna.trial import TrialState

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 5504,
    "vocab_size": 32000,
}
SPACE = Space.of(Configuration(gpus=2), ("micro_batch", "recompute", "zero_stage", "offload", "gpus"), 8)


def question(**changes):
    return SearchQuestion(LLAMA, preset("h100-node"), sequence=1024, **{"device_memory_bytes": 8 * 2**30, **changes})


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path}/search.db"


def studies(storage):
    names = [one.study_name for one in optuna.get_all_study_summaries(storage)]
    return [optuna.load_study(study_name=name, storage=storage) for name in names]


def told(answer):
    found = json.loads(json.dumps(report.as_json(answer)))
    return found | {"outcomes": sorted(found["outcomes"], key=lambda row: json.dumps(row["configuration"]))}


def test_every_setting_of_the_table_is_searched():
    """Check that `tune search`, its command and the service's request vary what the table of settings has."""
    of_search = {"data_parallel" if name == "gpus" else name for name in KNOBS}
    same = {name for name, knob in TABLE.items() if knob.effect == "same samples"}
    assert of_search == same | {"micro_batch", "data_parallel"}
    assert requests.KNOBS == KNOBS
    assert ",".join(KNOBS) in "".join(CliRunner().invoke(main, ["search", "--help"]).output.split())


@pytest.mark.parametrize("name", ["fused_loss", "recompute_share", "kernels", "flash_attention"])
def test_a_setting_of_the_script_is_varied(name):
    base = Configuration(gpus=1, micro_batch=8, kernels="eager", flash_attention=False)
    found = explore(question(device_memory_bytes=None), Space.of(base, (name,)), trials=9)
    assert {getattr(c, name) for c in found.space} == {getattr(o.configuration, name) for o in found.outcomes} | {
        getattr(c, name) for c in found.left
    }
    assert len(list(found.space)) == 2


def test_each_configuration_is_a_trial_with_what_is_known_of_it():
    found = explore(question(), SPACE, trials=30)
    study = found.trials.study
    assert study.directions == [optuna.study.StudyDirection.MAXIMIZE, optuna.study.StudyDirection.MINIMIZE]
    assert len(study.trials) == len(found.outcomes)
    by_words = {trial.user_attrs["configuration"]: trial for trial in study.trials}
    assert len(by_words) == len(study.trials), "two trials for one configuration"
    for outcome in found.outcomes:
        trial = by_words[outcome.configuration.text()]
        assert all(getattr(outcome.configuration, name) == value for name, value in trial.params.items())
        assert set(trial.params) == {"micro_batch", "accumulation", "recompute", "zero_stage", "offload", "gpus"}
        assert trial.state == (TrialState.COMPLETE if outcome.fits else TrialState.PRUNED)
        if outcome.fits:
            assert trial.values == [outcome.tokens_per_s, outcome.device_peak_bytes]
            assert trial.user_attrs["bound_tokens_per_s"] >= outcome.tokens_per_s * (1 - 1e-6)
            assert ("plan" in trial.user_attrs) == (outcome.plan is not None)
        else:
            assert "GPU memory" in trial.user_attrs["why_not"]
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert study.user_attrs["not tried"].startswith(f"{len(found.left)} configurations")


def test_a_dashboard_has_what_it_shows():
    study = explore(question(), SPACE, trials=30).trials.study
    front = {tuple(trial.values) for trial in study.best_trials}
    fitting = [trial.values for trial in study.trials if trial.values]
    assert max(fitting)[0] == max(front)[0]
    assert all(not any(o[0] > v[0] and o[1] < v[1] for o in fitting) for v in front)
    shares = optuna.importance.get_param_importances(study, target=lambda trial: trial.values[0])
    assert set(shares) <= {*SPACE.free, "accumulation"}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert study.metric_names == ["tokens per second", "GPU memory in bytes"]
    assert "iteration_s" in study.trials_dataframe(attrs=("user_attrs",)).to_string()


def test_a_second_search_evaluates_nothing_again(storage, monkeypatch):
    first = explore(question(), SPACE, study=storage)
    monkeypatch.setattr(SearchQuestion, "outcome", None)
    again = explore(question(), SPACE, study=storage)
    assert told(again) == told(first)
    assert again.fitting[0].plan == first.fitting[0].plan
    (study,) = studies(storage)
    assert len(study.trials) == len(first.outcomes)


def test_a_search_goes_on_where_another_was_cut_short(storage):
    whole = explore(question(), SPACE)
    cut = explore(question(), SPACE, trials=1, study=storage)
    assert not cut.complete
    for _ in range(20):
        more = explore(question(), SPACE, trials=1, study=storage)
        if more.complete:
            break
    assert more.complete
    assert {o.configuration for o in cut.outcomes} < {o.configuration for o in more.outcomes}
    assert more.fitting[0].iteration_s == pytest.approx(whole.fitting[0].iteration_s, rel=0.003)


def test_what_was_interrupted_is_evaluated_again(storage, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.tuner.configurations.deciding._planned", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            explore(question(), SPACE, study=storage)
    (study,) = studies(storage)
    assert [trial.user_attrs["why_not"] for trial in study.trials if trial.state == TrialState.FAIL] == [
        "interrupted: ZeroDivisionError('division by zero')"
    ]
    assert told(explore(question(), SPACE, study=storage)) == told(explore(question(), SPACE))


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 512},
        {"device_memory_bytes": 10 * 2**30},
        {"margin": 0.2},
        {"ds_config": {"fp16": {"enabled": True}}},
        {"model": {**LLAMA, "num_hidden_layers": 5}},
        {"machine": preset("h100-node").with_rates(h2d_bytes_per_s=1e10)},
        {"shape": {"launcher": "torchrun"}},
    ],
)
def test_another_question_is_another_study(storage, changes):
    space = Space.of(Configuration(gpus=1), ("recompute",))
    fields = {"model": LLAMA, "machine": preset("h100-node"), "sequence": 1024}
    first = explore(SearchQuestion(**fields), space, study=storage)
    explore(SearchQuestion(**{**fields, **changes}), space, study=storage)
    explore(SearchQuestion(**fields), Space.of(Configuration(gpus=2), ("recompute",)), study=storage)
    assert len(studies(storage)) == 3
    assert len(studies(storage)[0].trials) == len(first.outcomes)


def test_the_fastest_has_the_plan_of_a_full_search():
    space = Space.of(Configuration(gpus=2), ("micro_batch", "recompute"), 8)
    first = explore(question(), space, trials=99).fitting[0]
    assert first.plan is not None
    assert not first.quick


@pytest.mark.parametrize("given", ["search.db", "nodatabase:///x", "sqlite:////nowhere/at/all/search.db"])
def test_a_database_that_cannot_be_opened_is_told(tmp_path, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["search", "--machine", "rtx4090", "--model", "llama-3.2-1b", "--free", "recompute", "--study", given]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    assert "--study must be the URL of a database that Optuna can open, such as sqlite:///search.db" in done.output
    assert repr(given) in done.output
