"""Tests of the calls of `tune profile` to the HTTP service, against a real server: results, and errors that name the
key of the request that is wrong.
"""

import pytest
from click.testing import CliRunner
from ebbtide.simulator import build_strategy, preset, simulate, workload_from_model
from ebbtide.tuner.service.client import ServiceError, call

LLAMA = {"machine": "h100-node", "model": "Llama 3.2 1B"}


def test_an_answer_is_the_simulators(server):
    from ebbtide.tuner.service.requests import MODELS

    machine = preset("h100-node")
    work = workload_from_model(MODELS["Llama 3.2 1B"], machine, micro_batch=1)
    expected = simulate(build_strategy("zero3_offload", work), machine).iteration_s
    assert call(server.url, "/simulate", LLAMA)["iteration_s"] == pytest.approx(expected, rel=1e-9)


def test_a_refusal_names_the_key(server):
    with pytest.raises(ServiceError, match="gpus: must be greater"):
        call(server.url, "/simulate", {**LLAMA, "gpus": 0})
    with pytest.raises(ServiceError, match="no tune serve answers at"):
        call("http://127.0.0.1:1", "/simulate", LLAMA)
    with pytest.raises(ServiceError, match="url must begin with http"):
        call("127.0.0.1:1", "/simulate", LLAMA)


def test_a_profile_is_pushed(server, tmp_path, monkeypatch):
    from ebbtide.tuner.cli import main
    from ebbtide.tuner.commands import profiling

    fields = preset("h200").model_dump() | {"name": "pushed"}

    def measured(output, *_):  # other tests measure, which takes seconds
        type(preset("h200")).model_validate(fields).save(output)

    monkeypatch.setattr(profiling, "machine_profile", measured)
    out = str(tmp_path / "machine.json")
    result = CliRunner().invoke(main, ["profile", "-o", out, "--push", server.url])
    assert result.exit_code == 0, result.output
    assert server.client.get("/machines/pushed").status_code == 200
    result = CliRunner().invoke(main, ["profile", "-o", out, "--push", "http://127.0.0.1:1"])
    assert result.exit_code == 2
