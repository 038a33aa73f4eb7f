"""Tests of plans that keep optimizer state on a drive: training has stock DeepSpeed's results, and host
memory holds no copy of the state.
"""

import functools
import threading
from pathlib import Path

import ebbtide.runtime
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.execution.bodies import OpBodies
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.reader import export
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.simulator import Plan, PlanError
from ebbtide.simulator.schedule import OpKind

from studies.bench.byte_gpt import SIZES, Batches, ds_config
from tests.machines import node
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.test_bits import EVERY_PASS, stock
from tests.runtime.contract.training import (
    DEVICES,
    SUBGROUP,
    assert_same,
    attached,
    outcome,
    plan_for,
    same,
    start,
    train,
)

pytestmark = pytest.mark.usefixtures("only_rank")
LAST = list(DEVICES)[-1]
FREE_BYTES = 410_000  # less than all state beside two slots of the largest subgroup
ON_HOST = {"offload_param": {"device": "cpu"}, **EVERY_PASS}


ALL_STORED = {"default": {}, "clips hard": {"accumulation": 3, "clipping": 0.01}, "on the host": ON_HOST}


@functools.cache
def stock_with(options):
    return outcome(start(**ALL_STORED[options]))


@pytest.mark.parametrize(
    ("options", "host_slots"), [("default", 1), ("default", 9), ("clips hard", 2), ("on the host", 1)]
)
def test_all_of_it_stored(options, host_slots):
    ours = attached(start(**ALL_STORED[options]), ["stored"], LAST, host_slots=host_slots)
    assert_same(outcome(ours), stock_with(options))


@pytest.mark.parametrize("device", list(DEVICES))
def test_memory_holds_slots_and_storage_the_rest(device):
    engine = attached(start(), ["stored"], device, host_slots=2)
    train(engine, 3)
    engine.optimizer.wait()
    session = session_of(engine)
    executor, elements = session.executor, sum(s.elements for s in session.executor.states)
    slots = sum(slot.nbytes for slot in executor.host_slots)
    assert len(executor.host_slots) == 2
    assert slots < 2 * 12 * (SUBGROUP + 64 + 20_000)
    parameters = sum(t.nbytes for t in executor.parameter_slots)
    assert session.host_bytes() == slots + 2 * elements + parameters
    # Written: the first state, and the tensors that Adam changed in three steps. Read: the state with which the fourth
    # step begins.
    store = executor.store
    assert 4 * 12 * elements <= store.written_bytes < 4.2 * 12 * elements
    engine.destroy()
    ahead = sum(-(-4 * s.elements // 4096) * 4096 for s in executor.states[:2]) * 3
    assert store.read_bytes == store.written_bytes * 3 // 4 + ahead


@pytest.mark.parametrize("begin", [["host", "device"], ["stored", "host"]])
def test_training_goes_on_as_plans_take_state_to_storage_and_off_it(begin, tmp_path):
    later = {1: ["host", "stored"], 2: ["host", "device"], 3: ["stored", "stored", "host"], 4: ["stored"]}

    def between(engine, number):
        engine.save_checkpoint(tmp_path / "ck")
        if number in later:
            plan = plan_for(engine, later[number])
            switch_plan(engine, plan.model_copy(update={"storage_dir": str(tmp_path / "state")}))

    def under(pattern):
        return attached(start(), pattern, LAST, storage_dir=str(tmp_path / "state"))

    stock = start()
    ours = under(begin)
    losses, norms = train(ours, 6, each=between)
    ours.checkpoint_engine.wait()
    ours.destroy()
    expected = train(stock, 6)
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    assert norms == expected[1]
    again = under(begin)
    again.load_checkpoint(tmp_path / "ck")
    assert_same(outcome(again, 2, first=6), outcome(stock, 2, first=6))


def test_a_plan_that_stores_more_than_there_is_room_for_is_refused(monkeypatch):
    engine = attached(start(), ["stored", "host"], LAST)
    plan = plan_for(engine, ["stored"])
    train(engine, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as without_room:
        without_room.setattr("ebbtide.runtime.checkpoint.files.Files.allocate", full)
        with pytest.raises(StorageError, match="No space left"):
            switch_plan(engine, plan)
    train(engine, 1, first=1)  # training continues
    switch_plan(engine, plan)
    stock = start()
    train(stock, 2)
    assert_same(outcome(engine, 2, first=2), outcome(stock, 2, first=2))


def test_a_plan_that_would_write_over_another_runs_checkpoints_is_refused(tmp_path):
    before = attached(start(), ["stored"], LAST, storage_dir=str(tmp_path / "state"))
    train(before, 1)
    before.save_checkpoint(tmp_path / "ck")
    before.destroy()
    engine = attached(start(), ["host"], LAST)
    plan = plan_for(engine, ["stored"])
    with pytest.raises(StorageError, match=r"another plan\.storage_dir"):
        switch_plan(engine, plan.model_copy(update={"storage_dir": str(tmp_path / "state")}))
    switch_plan(engine, plan)
    assert_same(outcome(engine), stock("clipping"))


def test_a_plan_without_a_folder_and_zero_2_are_refused():
    engine = start()
    plan = plan_for(engine, ["stored"])
    with pytest.raises(PlanError, match=r"plan\.storage_dir must name a folder"):
        ebbtide.runtime.attach(engine, plan.model_copy(update={"storage_dir": None}))
    engine.destroy()
    engine = start(stage=2)
    hosted = plan_for(engine, ["host"])
    stored = hosted.placed(["stored"] * hosted.subgroup_count)
    with pytest.raises(PlanError, match=r"placement 'stored'\), which needs ZeRO-3, but training uses ZeRO-2"):
        ebbtide.runtime.attach(engine, stored.model_copy(update={"storage_dir": "x"}))
    engine.destroy()


def test_several_folders_share_each_subgroups_state(tmp_path):
    engine = start()
    plan = plan_for(engine, ["stored", "host"])
    folders = {str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0}
    there = Plan.from_fields({**plan.model_dump(), "storage_dir": None, "storage_shares": folders})
    ebbtide.runtime.attach(engine, there, device="emulated")
    ours = outcome(engine)
    first, second = (sum(p.stat().st_size for p in Path(f).glob("*.extents")) for f in folders)
    assert first == pytest.approx(3 * second, rel=0.1)
    assert_same(ours, stock("clipping"))


def on_a_drive(folder, plan, **fields):
    """Return an engine under a plan, with a DeepSpeed config that offloads the optimizer to an NVMe drive with
    pipelined reads.

    ebbtide takes the config unchanged, but DeepSpeed's own swapper never starts.
    """
    nvme = {"device": "nvme", "nvme_path": str(folder), "pipeline_read": True, "buffer_count": 5}
    config = ds_config(micro_batch=2, subgroup_size=SUBGROUP, learning_rate=1e-3)
    config["zero_optimization"]["offload_optimizer"] = nvme
    config["aio"] = {"block_size": 1048576}
    torch.manual_seed(0)
    model = SmallModel()
    return ebbtide.runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config, plan=plan, **fields
    )[0]


def free_memory(monkeypatch, at_first, later=0):
    monkeypatch.setattr("ebbtide.runtime.zero.storing.free_host_bytes", lambda: at_first)
    monkeypatch.setattr("ebbtide.runtime.replan.auto.free_host_bytes", lambda: later)


@pytest.fixture
def known_machine(monkeypatch):
    asked = []
    monkeypatch.setattr("ebbtide.runtime.replan.auto.measured_machine", lambda drives: asked.append(drives) or node())
    return asked


def test_a_config_that_offloads_to_a_drive_takes_a_plan(tmp_path):
    plan = plan_for(start(subgroup_size=15_000), ["stored", "host"], 15_000)
    engine = on_a_drive(tmp_path, plan.model_copy(update={"storage_dir": None}))
    assert session_of(engine).plan.count("stored") > 0
    assert [p.name for p in tmp_path.iterdir()] == ["ebbtide_state"]
    # DeepSpeed adds up its norm per subgroup, so with other subgroups the last bit may differ.
    assert_same(outcome(engine), outcome(start(subgroup_size=15_000)))


def test_of_a_config_for_a_drive_what_memory_holds_stays_there(tmp_path, known_machine, monkeypatch):
    # ``plan="auto"`` stores on the drive only the state that host memory cannot hold, although the DeepSpeed config
    # offloads all state to a drive.
    free_memory(monkeypatch, FREE_BYTES)
    engine = on_a_drive(tmp_path, "auto")
    session = session_of(engine)
    made = session.plan
    assert 0 < made.count("stored") < made.subgroup_count
    assert known_machine == [[str(tmp_path / "ebbtide_state")]]
    # DeepSpeed had masters, their gradients, and gradients that accumulate in this memory.
    room = FREE_BYTES + (4 + 4 + 2) * sum(made.subgroups)
    assert session.host_bytes() <= room
    switched = []
    switch = session.switch
    monkeypatch.setattr(session, "switch", lambda plan: switched.append(plan) or switch(plan))
    losses, _ = train(engine, 4, each=lambda e, _: e.save_checkpoint(tmp_path / "ck"))
    assert len(switched) == 1  # the engine has made a plan
    assert session.host_bytes() <= room
    engine.destroy()
    free_memory(monkeypatch, 10**12)
    again = on_a_drive(tmp_path, "auto")
    assert session_of(again).plan.placements == made.placements
    again.load_checkpoint(tmp_path / "ck")
    stock = start()
    assert torch.equal(torch.stack(losses), torch.stack(train(stock, 4)[0]))
    assert_same(outcome(again, 2, first=4), outcome(stock, 2, first=4))


def test_of_a_config_for_a_drive_slots_take_no_more_than_storing_saves(tmp_path, known_machine, monkeypatch):
    # A subgroup on the drive needs such a buffer for its update. The DeepSpeed config offloads the optimizer to a
    # drive. In the test, the state exceeds free host memory by a quarter of the largest subgroup's state. One subgroup
    # on the drive would save nothing, because its host buffer is as large as its state. Two subgroups on the drive can
    # share one buffer, which saves enough. So the plan must have one buffer, and leave other subgroups in host memory.
    free_memory(monkeypatch, 10**12)
    session = session_of(on_a_drive(tmp_path / "all", "auto"))
    largest = 12 * max(session.plan.subgroups)
    held = session.host_bytes() - (4 + 4 + 2) * sum(session.plan.subgroups)
    free_memory(monkeypatch, held - largest // 4)
    engine = on_a_drive(tmp_path / "few", "auto")
    made = session_of(engine).plan
    assert 0 < made.count("stored") < made.subgroup_count
    assert made.host_slots == 1
    assert_same(outcome(engine), stock("clipping"))


def test_of_a_config_for_a_drive_nothing_is_stored_where_memory_holds_all(tmp_path, known_machine, monkeypatch):
    free_memory(monkeypatch, 10**12)
    engine = on_a_drive(tmp_path, "auto")
    assert session_of(engine).plan.count("stored") == 0
    assert known_machine == [[]]
    assert_same(outcome(engine), stock("clipping"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["no write", "no second read", "always the first slot"])
def test_what_would_make_other_bits_is_seen(fault, monkeypatch):
    if fault == "no write":
        monkeypatch.setattr(OpBodies, "state_write", lambda *_: None)
    elif fault == "no second read":
        really, seen = ExtentStore.read, set()

        def read(self, subgroup, into):
            if subgroup not in seen:
                really(self, subgroup, into)
            seen.add(subgroup)

        monkeypatch.setattr(ExtentStore, "read", read)
    else:
        monkeypatch.setattr(Executor, "_host_slot", lambda self, s: self.host_slots[0].views(self.states[s].elements))
    ours = outcome(attached(start(), ["stored"], LAST, seed=3))
    assert not same(ours, stock("clipping"))


class Planted(Exception):
    """An error that a test raises in the runtime."""


def planted(*_, **__):
    raise Planted


@pytest.mark.parametrize("broken", ["execution.session.threads_of", "zero.planned.PlannedZero.gradient_buffers"])
def test_a_failed_attach_lets_go_of_the_folder(broken, tmp_path, monkeypatch):
    engine, before = start(), {*threading.enumerate()}
    plan = plan_for(engine, ["stored"], storage_dir=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(f"ebbtide.runtime.{broken}", planted)
        with pytest.raises(Planted):
            ebbtide.runtime.attach(engine, plan, device=DEVICES[LAST]())
    assert {*threading.enumerate()} <= before
    other = attached(start(), ["stored", "host"], LAST, storage_dir=str(tmp_path))
    train(other, 1)
    assert_same(outcome(engine), stock("clipping"))
    other.destroy()


def hooks(engine):
    """Return the number of hooks before and after forward, by module."""
    hooked = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in engine.module.named_modules()}
    return {name: counts for name, counts in hooked.items() if any(counts)}


def test_a_failed_copy_to_the_gpu_keeps_neither_folder_nor_hooks(tmp_path):
    def fail(op):
        if op.kind is OpKind.STATE_H2D:
            raise Planted

    stock = start()
    stock.destroy()
    engine = attached(start(), ["stored", "device"], LAST, storage_dir=str(tmp_path))
    train(engine, 1)
    engine.optimizer.wait()
    session_of(engine).executor.gradients.before_op = fail
    batch = Batches(2, SIZES["tiny"].sequence).at(1, engine.device)
    engine.backward(engine(*batch))
    with pytest.raises(BackgroundError):
        engine.destroy()
    assert hooks(engine) == hooks(stock)
    attached(start(), ["stored"], LAST, storage_dir=str(tmp_path)).destroy()


def test_who_reads_a_checkpoints_files_is_told_where_the_state_lies(tmp_path):
    # The checkpoint's own files do not contain this state. The error must name the command `tune checkpoint export`,
    # which writes an ordinary DeepSpeed checkpoint with all state.
    ours = attached(start(), ["stored", "host"], LAST)
    train(ours, 1)
    ours.save_checkpoint(str(tmp_path))
    ours.checkpoint_engine.wait()
    ours.destroy()
    with pytest.raises(AssertionError, match=r"is on a drive .*`tune checkpoint export`"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    stock = start()
    with pytest.raises(AssertionError, match="`tune checkpoint export`"):
        stock.load_checkpoint(str(tmp_path))
    stock.destroy()


def test_checkpoints_are_exported_for_stock_whose_own_are_read(tmp_path):
    ours = attached(start(), ["stored", "host"], LAST)
    train(ours, 3)
    ours.save_checkpoint(str(tmp_path / "ours"))
    ours.checkpoint_engine.wait()
    export(tmp_path / "ours", "global_step3", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"global_step3", "latest"}
    losses, _ = train(ours, 2, first=3)
    ours.destroy()
    stock = start()
    stock.load_checkpoint(str(tmp_path / "out"))
    expected = outcome(stock, 2, first=3)
    again = attached(start(), ["stored"], LAST)
    again.load_checkpoint(str(tmp_path / "out"))
    assert_same(outcome(again, 2, first=3), expected)
    assert torch.equal(torch.stack(losses), expected[1])
