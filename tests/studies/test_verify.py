"""Tests of the study of `tune verify`: the command finds and names a defect that the study puts into a real engine."""

import json
from dataclasses import replace

import pytest
from ebbtide.tuner.verify.judge import Noise, judge
from ebbtide.tuner.verify.run import read_run

from studies.verify.__main__ import summary
from studies.verify.judging import Case
from studies.verify.versions import known_versions


@pytest.mark.slow
def test_a_stale_parameter_and_a_lost_subgroup_of_an_engine_are_named(only_rank, tmp_path):
    from studies.verify.defects import DEFECTS
    from studies.verify.training import train, trained

    wanted = {d.name: d for d in DEFECTS if d.name in ("stale parameter", "lost subgroup")}
    train(tmp_path / "stock", 3)
    train(tmp_path / "flipped", 3, flipped=True)
    names = {}
    for name, defect in wanted.items():
        with trained(tmp_path / name, 3) as engine:
            defect.arm(engine)
            names[name] = defect.names(engine)
    stock, flipped = (read_run(tmp_path / name, name) for name in ("stock", "flipped"))
    assert stock.steps[0].scalars == flipped.steps[0].scalars
    assert stock.steps[1].scalars != flipped.steps[1].scalars, "the flipped bit changed no result"
    for name, defect in wanted.items():
        run = replace(read_run(tmp_path / name, name), name=name)
        finding = judge(run, stock, Noise(stock, (stock, flipped)), same_bits=False)
        assert (finding.verdict, finding.off) == ("defect", name)
        assert finding.first.step == defect.step
        assert finding.first.name in names[name]


def test_what_the_study_adds_up(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPAT_DIR", str(tmp_path))
    monkeypatch.setattr("studies.verify.versions.VERSIONS", (("0.18.6", True),))
    (skipped,) = known_versions()
    assert "scripts/compat.sh 0.18.6" in skipped["skipped"]
    case = Case("stale parameter", "first", 3, 1, "bits", "plan", found=True, named=True, said="")
    lost = replace(case, found=False, named=False)
    wrong = {"version": "0.18.6", "wrong": True, "found": True, "named": True}
    figures = summary([case, case, lost], [], {"zero3": 4.0, "zero2": 7.0}, [skipped, wrong])
    assert (figures["seeded"], figures["found"], figures["named_rightly"]) == (4, 3, 0.75)
    assert (figures["overhead_pct"], figures["false_alarms"]) == (7.0, 0)
    assert json.dumps(figures)
