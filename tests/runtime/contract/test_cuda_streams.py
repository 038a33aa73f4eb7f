"""`CudaDevice` itself, on streams that are threads: its waits, and that a missing one shows."""

import pytest
import torch

import runtime
from runtime.devices.cuda import CudaDevice
from runtime.devices.lane import Completion
from runtime.execution.gradients import GradientHomes
from runtime.replan.switch import switch_plan
from simulator.schedule import Lane
from studies.bench.bits import state_of
from tests.runtime import fake_cuda
from tests.runtime.contract.test_bits import MIX, engine_for, stock
from tests.runtime.contract.training import assert_same, outcome, plan_for, same, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real streams are there"),
]


@pytest.fixture
def fake(monkeypatch):
    return fake_cuda.install(monkeypatch)


def attached(engine, pattern, **fields):
    return runtime.attach(engine, plan_for(engine, pattern, **fields), device=CudaDevice())


@pytest.mark.parametrize(
    "case",
    ["clipping", "accumulation", "fp32_accumulation", "small_buckets", "no_persistent_parameters"],
)
def test_stocks_bits(fake, case):
    ours = attached(engine_for(case), MIX)
    assert_same(outcome(ours), stock(case))
    assert sum(stream.ran for stream in fake.streams) > 50
    assert not fake.runtime.locked, "every page-locked range is given back"


@pytest.mark.parametrize("case", ["clipping", "accumulation"])
def test_below_zero_3(fake, case):
    from tests.runtime.contract.test_stage2 import CASES
    from tests.runtime.contract.test_stage2 import stock as stock2

    assert_same(outcome(attached(start(stage=2, **CASES[case]), MIX)), stock2(case))
    assert not fake.runtime.locked


def test_the_timeline_has_the_devices_clock(fake):
    ours = attached(engine_for("clipping"), MIX)
    train(ours, 3)
    spans = ours.optimizer.timeline().spans
    ours.destroy()
    assert {span.lane for span in spans} >= {Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE}
    assert all(span.end_s >= span.start_s >= 0 for span in spans)


def test_another_plan_in_the_middle(fake):
    ours = attached(engine_for("clipping"), ["host"])
    losses, norms = train(ours, 3)
    switch_plan(ours, plan_for(ours, MIX))
    more, more_norms = train(ours, 3, first=3)
    result = state_of(ours), torch.stack(losses + more), norms + more_norms
    ours.destroy()
    assert_same(result, stock("clipping"))
    assert not fake.runtime.locked


def no_wait(*args, **kwargs):
    """A wait that was forgotten."""


RACES = {
    "an update does not wait for its gradient": (GradientHomes, "arrived", lambda *args: []),
    "forward does not wait for its parameters": (Completion, "wait_on", no_wait),
    "the next sum is fetched before it is home": (
        CudaDevice, "fetch_gradient", lambda self, home, to, arrival: home.to(to),
    ),
}  # fmt: skip


@pytest.mark.parametrize("race", list(RACES))
def test_a_forgotten_wait_shows(fake, monkeypatch, race):
    del fake
    case = "accumulation" if "sum" in race else "clipping"
    expected = stock(case)
    owner, name, broken = RACES[race]
    monkeypatch.setattr(owner, name, broken)
    ours = attached(engine_for(case), ["host", "device"])
    assert not same(outcome(ours), expected)
