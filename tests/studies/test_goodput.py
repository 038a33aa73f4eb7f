"""Tests of the study of goodput (the fraction of time that is useful training) under failures.

The goodput of a published case is reproduced. The goodput never rises with the number of GPUs. No rule of thumb for the
checkpoint interval gives more goodput than the best interval.
"""

import json

import pytest

from studies import goodput


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    path = tmp_path_factory.mktemp("goodput") / "goodput.json"
    assert goodput.main(["--json", str(path), "--quick"]) == 0
    return json.loads(path.read_text())


def test_the_published_case_is_reproduced(figures):
    case = figures["llama3_405b"]
    assert case["mtbf_s"] == pytest.approx(54 * 86_400 / 419)
    assert case["goodput"] > 0.9
    assert case["monte_carlo"] == pytest.approx(case["goodput"], rel=0.01)


def test_more_gpus_never_raise_goodput(figures):
    values = [row["goodput"] for row in figures["scales"]]
    assert figures["scales"][-1]["gpus"] == 100_000
    assert values == sorted(values, reverse=True)


def test_no_rule_beats_the_best_interval(figures):
    rules = figures["intervals"]["rules"]
    best = rules["best"]["goodput"]
    assert all(rule["goodput"] <= best + 1e-12 for rule in rules.values())
    assert all(value <= best + 1e-12 for _, value in figures["intervals"]["curve"])
