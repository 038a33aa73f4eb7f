"""Tests of the writer that copies a checkpoint to disk in blocks while the optimizer updates the same memory."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.memory import HostBytes
from ebbtide.runtime.checkpoint.format.skeleton import State, lay_out
from ebbtide.runtime.checkpoint.protocol.inspect import verify
from ebbtide.runtime.checkpoint.stream import persist
from ebbtide.runtime.checkpoint.stream.persist import Pace
from ebbtide.simulator.plan import READY_BLOCKS

from tests.runtime.checkpoint.conftest import BLOCK, Bench, bytes_of_tensors, some_state


class GatedFiles(Files):
    """File operations of a checkpoint save that hold back every write of tensor data until the test opens the gate."""

    def __init__(self):
        self.gate, self.copied = threading.Event(), threading.Event()

    def call(self, name, function, *args):
        if name == "pwrite" and len(args[1]) >= 4096:
            assert self.gate.wait(30)
        return function(*args)

    def point(self, name):
        if name == "copied_on_update":
            self.copied.set()


def load(folder, name):
    return torch.load(folder / f"rank0_{name}.pt", weights_only=True)


def without_name(tree):
    return {key: value for key, value in tree.items() if key != "name"}


def registered(bench, state):
    bench.live.register_all({number: [t] for number, t in enumerate(state["optim_states"]["fp32"])})
    return state


def test_subgroups_are_written_in_the_order_in_which_their_updates_come_due(bench):
    state = some_state()
    tensors = state["optim_states"]["fp32"]
    bench.live.register_all({number: [tensors[number]] for number in (2, 0, 1)})
    job = bench.begin(state, "a")
    assert [s for s in job._writer._queues if s < 3] == [2, 0, 1]
    job.start()
    assert job.wait(60)
    assert job.failure is None


def test_a_tensor_over_several_subgroups_is_streamed_from_where_it_is(bench):
    flat = torch.randn(20_000)
    cuts = [0, 1_000, 9_000, 20_000]
    bench.live.register_all({number: [flat[begin:end]] for number, (begin, end) in enumerate(pairwise(cuts))})
    state = {"model_states": {}, "optim_states": {"whole": flat, "lean": flat[:15_000]}}
    layout = lay_out(state["optim_states"], bench.live, stream_device=True)
    assert bytes_of_tensors(layout) == (35_000 * 4, 0)
    assert {e.source.subgroup for e in layout.extents} == {0, 1, 2, None}
    bench.save(state, "a")
    found = load(bench.folder / "a", "optim_states")
    assert torch.equal(found["whole"], flat)
    assert torch.equal(found["lean"], flat[:15_000])
    assert bench.live.runs(flat.data_ptr() + 4 * 19_999, 8) is None  # after the last registered byte


def test_file_equals_what_was_saved(bench):
    state = registered(bench, some_state())
    state["model_states"]["tied"] = [state["model_states"]["buffers"]] * 2
    state["model_states"]["odd"] = torch.randn(33, 7).t()[1:, ::2]
    state["model_states"]["empty"] = torch.empty(0, dtype=torch.bfloat16)
    state["model_states"]["scalar"] = torch.tensor(3.0)
    bench.save(state, "a")
    folder = bench.folder / "a"
    assert load(folder, "model_states").pop("name") == state["model_states"]["name"]
    for name, value in state.items():
        value.pop("name", None)
        torch.testing.assert_close(without_name(load(folder, name)), value, rtol=0, atol=0)
    tied = load(folder, "model_states")["tied"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert verify(bench.folder, "a") == []


def test_mmap_reads_the_file(bench):
    state = registered(bench, some_state())
    bench.save(state, "a")
    read = torch.load(bench.folder / "a/rank0_optim_states.pt", mmap=True, weights_only=True)
    assert torch.equal(read["fp32"][2], state["optim_states"]["fp32"][2])


def test_live_tensors_are_not_copied_up_front(bench):
    job = bench.begin(registered(bench, some_state()), "a")
    layouts = [p.layout for p in job._writer._planned]
    assert bytes_of_tensors(layouts[0]) == (3 * 20_000 * 4, 0)
    job.start()
    job.wait()


@pytest.mark.parametrize("budget_blocks", [0, 2, 64])
def test_an_update_during_persist_does_not_reach_the_file(tmp_path, budget_blocks):
    bench = Bench(tmp_path, budget_blocks=budget_blocks)
    state = registered(bench, some_state())
    before = [t.clone() for t in state["optim_states"]["fp32"]]
    files = GatedFiles()
    job = bench.begin(state, "a", files=files)
    job.start()

    def update():
        for number, tensor in enumerate(state["optim_states"]["fp32"]):
            bench.live.before_update(number)
            tensor.fill_(-1.0)

    updates = threading.Thread(target=update)
    updates.start()
    assert files.copied.wait(30 if budget_blocks else 0.2) == (budget_blocks > 0)
    if budget_blocks < 64:
        updates.join(0.2)
        assert updates.is_alive(), "the update must wait for the disk: the budget is used up"
    files.gate.set()
    updates.join(30)
    assert not updates.is_alive()
    job.wait(30)
    assert job.failure is None
    read = load(bench.folder / "a", "optim_states")["fp32"]
    assert all(torch.equal(a, b) for a, b in zip(read, before, strict=True))
    assert verify(bench.folder, "a") == []
    assert len(bench.budget._free) == budget_blocks  # every slot came back


def test_unregistered_tensors_are_copied_at_once(bench):
    state = some_state()
    before = state["optim_states"]["fp32"][0].clone()
    job = bench.begin(state, "a")
    state["optim_states"]["fp32"][0].zero_()
    job.start()
    job.wait()
    assert torch.equal(load(bench.folder / "a", "optim_states")["fp32"][0], before)


def test_storage_that_hangs_is_an_error_not_a_hang(tmp_path):
    bench = Bench(tmp_path, budget_blocks=0, deadline_s=0.5)
    state = registered(bench, some_state())
    files = GatedFiles()
    job = bench.begin(state, "a", files=files)
    job.start()
    with pytest.raises(CheckpointError, match="copy_budget_bytes"):
        bench.live.before_update(0)
    files.gate.set()
    assert job.wait(30)


def test_a_copy_that_ends_after_its_save_was_cancelled_gives_its_buffer_back(bench, monkeypatch):
    copying, cancelled = threading.Event(), threading.Event()
    copy_to = HostBytes.copy_to

    def late_copy(source, *args):
        if threading.current_thread() is update:
            copying.set()
            assert cancelled.wait(30)
        copy_to(source, *args)

    monkeypatch.setattr(HostBytes, "copy_to", late_copy)
    files = GatedFiles()
    job = bench.begin(registered(bench, some_state()), "a", files=files)
    update = threading.Thread(target=bench.live.before_update, args=(2,))
    job.start()
    update.start()
    assert copying.wait(30)
    job.cancel()
    files.gate.set()
    assert job.wait(30)
    assert job.cancelled
    cancelled.set()
    update.join(30)
    assert not update.is_alive()
    assert len(bench.budget._free) == bench.budget.count


def test_a_dead_writer_lets_updates_go_on_and_is_reported(tmp_path):
    class Dying(Files):
        fired = 0

        def call(self, name, function, *args):
            if name == "pwrite" and len(args[1]) >= 4096:
                self.fired += 1
                raise SystemExit("the thread is gone")
            return function(*args)

    bench = Bench(tmp_path, budget_blocks=0)
    files = Dying()
    job = bench.begin(registered(bench, some_state()), "a", files=files)
    job.start()
    for subgroup in range(3):
        bench.live.before_update(subgroup)
    assert job.wait(30)
    assert files.fired
    assert isinstance(job.failure, SystemExit)
    assert not (bench.folder / "a").exists()


def test_pace_adds_up(monkeypatch):
    passed_s = [0.0]

    def sleep(seconds):
        passed_s[0] += seconds

    monkeypatch.setattr(persist, "time", SimpleNamespace(monotonic=lambda: passed_s[0], sleep=sleep))
    pace = Pace(1e6)
    for written in range(5):
        pace.wait(100_000, lambda: False)
        assert passed_s[0] == pytest.approx(0.1 * written)


def test_blocks_cover_each_file_once(bench):
    job = bench.begin(registered(bench, some_state()), "a")
    for number, planned in enumerate(job._writer._planned):
        blocks = [b for b in job._writer._blocks if b.file == number]
        assert [b.offset for b in blocks] == list(range(0, planned.layout.size_bytes, BLOCK))
        assert sum(b.size_bytes for b in blocks) == planned.layout.size_bytes
        pieces = [(b.offset + p.at, p.size_bytes) for b in blocks for p in b.pieces]
        assert all(a + n <= b for (a, n), (b, _) in pairwise(pieces))
    job.start()
    job.wait()


class Busy(Files):
    """File operations of a slow disk: no write of a checkpoint's block ends until the test allows it.

    The object counts the writes in progress and the largest number at any time.
    """

    def __init__(self):
        self.go_on, self.lock, self.now, self.most = threading.Event(), threading.Condition(), 0, 0

    def call(self, name, function, *args):
        if name != "pwrite" or len(args[1]) < BLOCK:
            return function(*args)
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.lock.notify_all()
        assert self.go_on.wait(30)
        with self.lock:
            self.now -= 1
        return function(*args)


@pytest.mark.parametrize("writers", [1, 2])
def test_the_disk_has_as_many_writes_as_writers_and_the_next_block_is_ready(tmp_path, writers):
    bench, files = Bench(tmp_path, writers=writers), Busy()
    job = bench.begin({"a": {"x": torch.randn(16 * BLOCK // 4)}}, files=files)
    writer = job._writer
    job.start()
    with writer._condition:
        ready = lambda: [b.state for b in writer._blocks].count(State.READY) == READY_BLOCKS
        assert writer._condition.wait_for(ready, timeout=30)
    with files.lock:
        assert files.lock.wait_for(lambda: files.now == writers, timeout=30)
    assert sum(bool(block.hash) for block in writer._blocks) == writers + READY_BLOCKS
    files.go_on.set()
    assert job.wait(30)
    assert job.failure is None
    assert files.most == writers


def test_a_block_that_waits_for_the_disk_may_be_copied_and_is_then_written_once(tmp_path):
    # The block is written once, from the copy. The writer thread would write it from the tensors that training uses,
    # and these may be updated as soon as the copy exists.
    bench, files = Bench(tmp_path, writers=1), Busy()
    job = bench.begin({"a": {"x": torch.randn(4 * BLOCK // 4)}}, files=files)
    writer = job._writer
    block = writer._blocks[0]
    block.state = State.WRITING
    writer._at_disk.acquire()  # so that the disk is busy
    thread = threading.Thread(target=writer._in_turn, args=(block, memoryview(bytes(BLOCK))))
    thread.start()
    with writer._condition:
        assert writer._condition.wait_for(lambda: block.state is State.READY, timeout=30)
    slot = writer._claim(block, 0, patient=False)
    assert slot is not None
    with writer._condition:
        block.slot, block.state = slot, State.READY  # another thread has made it ready
    writer._at_disk.release()
    thread.join(30)
    assert not thread.is_alive()
    assert files.most == 0
    assert block.state is State.READY
    assert writer._at_disk.acquire(blocking=False)
