"""Tests of the study of `tune verify`: the command finds and names a defect that the study puts into a real engine."""

import json
from dataclasses import replace

import pytest

from studies.verify.__main__ import JudgedDefect, judged, summary


@pytest.mark.slow
def test_a_stale_parameter_and_a_lost_subgroup_of_an_engine_are_named(only_rank, tmp_path):
    from studies.verify.defects import DEFECTS
    from studies.verify.training import train, train_with

    wanted = [d for d in DEFECTS if d.name in ("stale parameter", "lost subgroup", "low bit of a parameter")]
    train(tmp_path / "stock", 3)
    train(tmp_path / "again", 3)
    expected = {defect.name: train_with(defect, 3, tmp_path) for defect in wanted}
    cases = judged(tmp_path, 3, 1, expected | {"again": {"step": 1, "names": []}})
    assert [(case.found, case.named) for case in cases] == [(True, True)] * 3 + [(False, False)]


def test_what_the_study_adds_up():
    case = JudgedDefect("stale parameter", 3, 1, found=True, named=True, said="")
    lost = replace(case, found=False, named=False)
    pairs = [{"verdict": "identical"}, {"verdict": "different"}]
    figures = summary([case, case, case, lost], pairs, {"zero3": 4.0, "zero2": 7.0})
    assert (figures["seeded"], figures["found"], figures["named_rightly"]) == (4, 3, 0.75)
    assert (figures["overhead_pct"], figures["right"], figures["false_alarms"]) == (7.0, 2, 1)
    assert json.dumps(figures)
