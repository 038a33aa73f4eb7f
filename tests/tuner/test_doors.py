"""Tests that all entry points (commands, Python and HTTP) answer the same question about a job with the
same plan and predictions, and with the same memory to the byte.
"""

import json
from contextlib import contextmanager
from importlib import import_module

import ebbtide.tuner
import pytest
from click.testing import CliRunner
from ebbtide import estimate, what_if
from ebbtide.simulator.estimates.estimate import estimated, workload_from_model
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.planning import quick_plan
from ebbtide.tuner.service import answers
from ebbtide.tuner.service.requests import MODELS, Answer, Simulate, WhatIf

ASKED = ("Llama 3.2 3B", "rtx4090", 1024, 10**9)


def silent(*_):
    """Do nothing with a progress report of a search."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("doors") / "config.json"
    path.write_text(json.dumps(MODELS[ASKED[0]]))
    return path


@pytest.mark.parametrize("memory_gib", [None, 8])
def test_five_doors_agree_on_memory_to_the_byte(config, memory_gib, tmp_path):
    model, machine, sequence, size = ASKED
    have = preset(machine)
    if memory_gib:
        have = have.with_rates(device_memory_bytes=memory_gib * 2**30, host_memory_bytes=32 * 2**30)
    path = tmp_path / "machine.json"
    have.save(path)
    work = workload_from_model(MODELS[model], have, sequence=sequence)
    scenario = {"machine": have, "model": MODELS[model], "sequence": sequence}

    flags = ["simulate", "--machine", str(path), "--model", str(config), "--sequence", str(sequence), "--json"]
    told = json.loads(CliRunner().invoke(main, flags).stdout)
    rows = {
        "tune simulate": (told["device_peak_bytes"], told["host_peak_bytes"], told["fits"], told["missing"]),
        "/simulate": _peaks(answers.simulate(Simulate(**scenario), silent)),
        "/answer": _peaks(_stock(answers.answer(Answer(**scenario, peers=False, timelines=False), silent)["rows"])),
        "/what-if": _peaks(answers.what_if(WhatIf(**scenario, strategies=["zero3_offload"]), silent)["rows"][0]),
        "what_if": _peaks(what_if(work, have, ["zero3_offload"]).to_dict("records")[0]),
    }
    limits = {}
    if not memory_gib:
        made = ebbtide.tuner.plan(work.recut(size), have)
        other = next(
            p for p in made.alternatives if p.strategy in ("stock ZeRO-3 offload", "stock, offload_param none")
        )
        rows["plan()"] = (other.device_peak_bytes, other.host_peak_bytes, other.fits, other.note)
        limits["plan()"] = made.prediction.limits
        limits["/simulate"] = answers.simulate(Simulate(**scenario), silent)["limits"]
        assert limits["plan()"]["device"] == limits["/simulate"]["device_bytes"]
        assert limits["plan()"]["host"] == limits["/simulate"]["host_bytes"]
    assert len(set(rows.values())) == 1, rows
    assert next(iter(rows.values()))[2] is (memory_gib is None)


def _stock(rows):
    return next(row for row in rows if row["strategy"] == "zero3_offload")


def _peaks(row):
    return (row["device_peak_bytes"], row["host_peak_bytes"], bool(row["fits"]), row["reason"])


def test_an_estimate_is_the_quick_answer_of_every_other_door():
    model, machine, sequence, _ = ASKED
    have = preset(machine).with_rates(device_memory_bytes=16 * 2**30)
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "ebbtide": {"plan": "auto"},
    }
    told = estimate(MODELS[model], batch=1, sequence=sequence, gpu=have, ds_config=config)
    work = estimated(Job.of_deepspeed(MODELS[model], config, sequence=sequence, micro_batch=1, recompute=True), have)
    quick = quick_plan(work, have, Limits.of(work, have))
    assert told.fits
    assert told.iteration_s == pytest.approx(quick.prediction.iteration_s, rel=1e-9)
    assert told.host_bytes == quick.prediction.host_peak_bytes


def test_a_what_if_is_the_quick_answer_in_python_and_over_http():
    model, machine, sequence, _ = ASKED
    have = preset(machine)
    scenario = {"machine": have, "model": MODELS[model], "sequence": sequence}
    work = workload_from_model(MODELS[model], have, sequence=sequence)
    sizes, changes = [16 * 2**30], {"clip_rate": [0.0, 0.5]}
    asked = {"strategies": ["ebbtide"], "gpu_memory_bytes": sizes}
    rows = answers.what_if(WhatIf(**scenario, changes=changes, **asked), silent)["rows"]
    table = ebbtide.what_if(work, have, **asked, **changes, n_jobs=1).to_dict("records")
    for row, told in zip(rows, table, strict=True):
        on = have.with_rates(device_memory_bytes=int(row["gpu_memory_bytes"]))
        clipping = work.model_copy(update={"clip_rate": row["clip_rate"]})
        quick = quick_plan(clipping, on, Limits.of(clipping, on))
        # A what-if tries the plans of all its points at each point, so it may find a faster one than a single search.
        assert row["iteration_s"] == told["iteration_s"] <= quick.prediction.iteration_s * (1 + 1e-9)
        assert row["iteration_s"] >= quick.prediction.iteration_s * 0.95
        assert row["lower_bound_s"] <= row["iteration_s"]


@pytest.mark.parametrize(("command", "flags"), [("simulate", []), ("search", ["--trials", "2", "--free", "recompute"])])
def test_long_commands_tell_how_far_they_are(config, monkeypatch, command, flags):
    heard = []

    @contextmanager
    def listening(quiet_s):
        heard.append(quiet_s)
        yield lambda share, what: heard.append((share, what))

    monkeypatch.setattr(import_module(f"ebbtide.tuner.commands.{command}"), "progress_after", listening)
    done = CliRunner().invoke(main, [command, "--machine", "rtx4090", "--model", str(config), *flags])
    assert heard[0] == 2.0, done.output
    shares = [share for share, what in heard[1:] if what]
    assert len(shares) > 1
    assert shares == sorted(shares)
