"""Tests of the line in the log of a run that names the change with which its samples would train fastest."""

import logging
import threading
from importlib.util import find_spec

import ebbtide.runtime
import pytest
from ebbtide.runtime import session_of
from ebbtide.runtime.replan import auto, hint
from ebbtide.simulator.plan import FASTER
from ebbtide.tuner.quantities import seconds_text

from tests.machines import node
from tests.runtime.contract.training import start, train

COMPUTED_S = 0.1  # forward and backward of a step, in place of this machine's
pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="could not find transformers"),
]


def machine():
    return node(device_kind="emulated").with_rates(device_flops_per_s=1e12, device_memory_bytes_per_s=1e11)


def trained(steps=6, micro_batches=4, **changes):
    import deepspeed

    from examples.tiny_llama import samples, tiny_llama

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        **changes,
    }
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    ebbtide.runtime.attach(engine, "auto", machine=machine(), device="emulated")
    for row in samples(steps * micro_batches):
        tokens = row["input_ids"][None]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


def said(caplog):
    for thread in threading.enumerate():
        if thread.name == "ebbtide-faster":
            thread.join(120)
    return [r.getMessage() for r in caplog.records if "the same samples" in r.getMessage()]


def test_a_run_under_an_automatic_plan_names_its_best_change_once(caplog, monkeypatch):
    agreed = auto._agreed

    def paced(*seen):
        work = agreed(*seen)
        slower = COMPUTED_S / (work.planned.forward_s + work.planned.backward_s)
        layers = [
            layer.model_copy(update={name: slower * (getattr(layer, name) or 0.0) for name in auto._PASSES})
            for layer in work.layers
        ]
        return work.model_copy(update={"layers": tuple(layers)})

    monkeypatch.setattr(auto, "_agreed", paced)
    with caplog.at_level(logging.INFO, "ebbtide"):
        engine = trained()
        (line,) = said(caplog)
    expected_s = session_of(engine).expected_s
    engine.destroy()
    assert "times as fast with micro-batch 4, accumulation 1: " in line
    assert f"instead of {seconds_text(expected_s)}. Nothing is changed" in line


def test_no_step_waits_for_the_search(caplog, monkeypatch, tmp_path):
    # The other process waits for a file that is made after the last step.
    gate = tmp_path / "gate"
    code = (
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('the same samples', end='')"
    )
    monkeypatch.setattr(hint, "_CODE", code)
    with caplog.at_level(logging.INFO, "ebbtide"):
        engine = trained()
        assert not [r for r in caplog.records if "the same samples" in r.getMessage()]
        gate.touch()
        assert said(caplog) == ["the same samples"]
    engine.destroy()


def test_a_search_that_fails_is_told_and_ends_nothing(caplog, monkeypatch):
    monkeypatch.setattr(hint, "_CODE", "raise ValueError('planted')")
    with caplog.at_level(logging.INFO, "ebbtide"):
        engine = trained()
        said(caplog)
    engine.destroy()
    assert "no faster setting is named" in caplog.text
    assert "planted" in caplog.text


def test_a_model_without_a_config_says_what_is_missing(caplog):
    engine = start()
    with caplog.at_level(logging.INFO, "ebbtide"):
        ebbtide.runtime.attach(engine, "auto", machine=machine(), device="emulated")
        train(engine, 6)
        (line,) = said(caplog)
    engine.destroy()
    assert "no setting can be named" in line
    assert "SmallModel has no Hugging Face config" in line


def test_a_plan_file_names_the_change_that_tune_plan_found(caplog):
    from tests.runtime.contract.training import plan_for

    engine = start()
    plan = plan_for(engine, ["host"])
    told = [f"{FASTER} (--faster {n}): --accumulation {n}: 1.00 s (1.2{n}x)" for n in (1, 2)]
    with caplog.at_level(logging.INFO, "ebbtide"):
        ebbtide.runtime.attach(engine, plan.model_copy(update={"reasons": ("another", *told)}), device="emulated")
        assert said(caplog) == [f"`tune plan` says: {told[-1]}"]
    engine.destroy()
