"""Tests of the step times that DeepSpeed's own monitor gets from an engine under a plan."""

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.execution.executor import Executor
from ebbtide.simulator import Prediction

from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config
from tests.runtime.test_live import SUBGROUP, machine, new_engine, plan_of, train

pytestmark = pytest.mark.usefixtures("only_rank")

PREDICTION = Prediction(
    strategy="ebbtide",
    iteration_s=0.123,
    iteration_low_s=0.1,
    iteration_high_s=0.2,
    forward_s=0.04,
    backward_s=0.08,
    step_s=0.0,
    update_s=0.04,
    device_peak_bytes=1,
    host_peak_bytes=1,
)


@pytest.fixture
def config(tmp_path):
    """Return a DeepSpeed config with a monitor that writes CSV files to the test's folder."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    return ds_config(2, SUBGROUP, learning_rate=1e-3) | {"csv_monitor": monitor}


@pytest.fixture
def planned(tmp_path):
    """Return the file of a plan with a predicted step time."""
    engine = new_engine()
    count = len(engine.optimizer.fp16_partitioned_groups_flat)
    engine.destroy()
    plan_of(["host"], count, 0, 0).model_copy(update={"prediction": PREDICTION}).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def monitored(config, plan):
    torch.manual_seed(0)
    model = ByteGPT(SIZES["tiny"])
    return ebbtide.runtime.initialize(model=model, model_parameters=model.parameters(), config=config, plan=plan)[0]


def written(folder):
    """Return the values of each CSV file in a folder."""
    rows = {path.stem: path.read_text().splitlines()[1:] for path in folder.rglob("*.csv")}
    return {name: [float(row.split(",")[1]) for row in some] for name, some in rows.items()}


def test_a_plan_from_a_file_sends_predicted_and_measured_times(config, planned, tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.zero.attach.MONITOR_PERIOD_STEPS", 2)
    train(monitored(config, planned), 5)
    values = written(tmp_path)
    assert values["Train_ebbtide_predicted_iteration_s"] == [0.123, 0.123]
    measured = values["Train_ebbtide_iteration_s"]
    assert len(measured) == 2
    assert all(seconds > 0 for seconds in measured)


def test_auto_sends_the_times_of_its_first_plan_and_of_the_next(config, tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.zero.attach.MONITOR_PERIOD_STEPS", 3)
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_machine", lambda drives: machine())
    train(monitored(config, "auto"), 6)
    values = written(tmp_path)
    assert len(values["Train_ebbtide_iteration_s"]) == 2
    assert len(values["Train_ebbtide_predicted_iteration_s"]) == 1, "nothing is predicted before a plan is made"


def test_the_log_tells_what_the_first_steps_are_for_and_what_a_plan_brings(config, monkeypatch, caplog):
    monkeypatch.setattr("ebbtide.runtime.zero.attach.TOLD_STEPS", (2,))
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_machine", lambda drives: machine())
    with caplog.at_level("INFO", "ebbtide"):
        train(monitored(config, "auto"), 6)
    said = [
        "measuring the first 4 steps",
        "after 2 steps under this plan: ",
        "making a plan for this model",
        " s per iteration expected",
        "after 2 steps under this plan: ",
        " s expected",
    ]
    at = [0]
    for text in said:
        assert text in caplog.text[at[-1] :], (text, caplog.text)
        at.append(caplog.text.index(text, at[-1]) + len(text))


def test_the_monitor_waits_for_no_update(config, planned, monkeypatch):
    # Also check that nothing is measured while the state is offloaded, between the calls of DeepSpeed's
    # `offload_states` and `reload_states`.
    monkeypatch.setattr("ebbtide.runtime.zero.attach.MONITOR_PERIOD_STEPS", 1)
    engine = monitored(config, planned)
    session = session_of(engine)
    measure, measured, waited = session.timeline, [], []

    def noted(**options):
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "wait_all", waited.append)
            measured.append(measure(**options))
        return measured[-1]

    def aside(number):
        if number == 0:
            engine.offload_states()
        if number == 1:
            engine.reload_states()

    monkeypatch.setattr(session, "timeline", noted)
    train(engine, 4, aside)
    assert len(measured) == 3
    assert waited == []


def test_without_a_monitor_no_step_is_measured(planned, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.zero.attach.MONITOR_PERIOD_STEPS", 1)
    engine = ebbtide.runtime.attach(new_engine(), planned)
    monkeypatch.setattr(session_of(engine), "timeline", None)
    train(engine, 2)
