"""Tests of `CudaDevice`, the runtime's GPU device, against CUDA's rules on a fake torch.cuda, and of the fake."""

import contextlib
import mmap
import os
import threading
import time
from collections import defaultdict, deque
from pathlib import Path

import pytest
import torch
from ebbtide.runtime.checkpoint.format import memory
from ebbtide.runtime.devices import cuda
from ebbtide.runtime.devices.clock import DeviceClock
from ebbtide.runtime.devices.cuda import CudaDevice
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.hardware.pages import own_pages
from ebbtide.simulator.schedule import Lane

from tests.runtime import fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda is the real one")


# -- the stand-in --------------------------------------------------------------------------------


def locked(fake, *, filled_with=0.0, elements=64):
    """Return a page-locked tensor in host memory. Without a page lock no copy to or from the GPU is asynchronous."""
    tensor = own_pages(elements, torch.float32)
    assert fake.runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0) == 0
    return tensor.fill_(filled_with)


def copied_away(fake, *, recorded):
    """Start a copy of a tensor to host memory on another CUDA stream, and free the tensor before the copy runs. Return
    the target of the copy.

    Args:
        recorded: True to call ``record_stream`` for the tensor, so that its memory is not reused before the copy has
            run. Without this call, freeing the tensor is an error.
    """
    stream, location = fake.cuda.Stream(), locked(fake)
    source = torch.ones(64)
    with fake.cuda.stream(stream):
        location.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(stream)
    del source
    stream.synchronize()
    return location


def test_a_block_freed_under_a_copy_is_given_away(fake):
    location = copied_away(fake, recorded=False)
    assert not torch.equal(location, torch.ones(64))
    assert fake.violations
    fake.violations.clear()


def test_record_stream_keeps_the_block(fake):
    assert torch.equal(copied_away(fake, recorded=True), torch.ones(64))


def test_a_copy_reads_its_source_when_it_runs(fake):
    fake.latest_s = 60.0  # no op runs before some code waits for it
    stream, location, source = fake.cuda.Stream(), locked(fake), torch.ones(64)
    with fake.cuda.stream(stream):
        location.copy_(source, non_blocking=True)
    source.fill_(2.0)  # no wait precedes this write
    stream.synchronize()
    assert torch.equal(location, torch.full((64,), 2.0))


def test_a_copy_from_pageable_memory_blocks(fake):
    fake.latest_s = 60.0
    stream, to, source = fake.cuda.Stream(), torch.zeros(64), torch.ones(64)
    with fake.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    source.fill_(2.0)  # this write comes too late
    assert torch.equal(to, torch.ones(64))
    assert fake.counts == {"pageable": 1}


def test_an_event_stands_for_what_was_there_when_it_was_recorded(fake):
    fake.latest_s = 60.0
    one, other, event = fake.cuda.Stream(), fake.cuda.Stream(), fake.cuda.Event()
    source, middle, location = torch.ones(64), locked(fake), torch.zeros(64)
    with fake.cuda.stream(one):
        middle.copy_(source, non_blocking=True)
    event.record(one)
    assert not event.query()
    other.wait_event(event)
    with fake.cuda.stream(other):
        location.copy_(middle, non_blocking=True)
    other.synchronize()
    assert event.query()
    assert torch.equal(location, source)


def test_delays_are_those_of_the_seed(fake):
    draws = [[fake_cuda.FakeStream(fake, n)._random.random() for n in (0, 1)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


def test_synchronisations_are_counted(fake):
    fake.latest_s = 60.0
    stream, location, source = fake.cuda.Stream(), locked(fake), torch.ones(64)
    stream.synchronize()
    assert not fake.counts, "an empty stream has nothing to wait for"
    with fake.cuda.stream(stream):
        location.copy_(source, non_blocking=True)
    stream.synchronize()
    fake.cuda.synchronize()
    assert fake.counts == {"held_up": 1, "device": 1}


# -- the device ----------------------------------------------------------------------------------


@pytest.fixture
def device(fake):
    made = CudaDevice()
    yield made
    made.close()
    assert not fake.runtime.locked


def test_a_forked_process_gets_no_page_of_the_optimizers_state(device):
    buffer = device.host_empty(3 * mmap.PAGESIZE, torch.float32)
    assert buffer.is_pinned()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    held, flags = False, None
    for line in lines:
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            held = first <= buffer.data_ptr() < last
        elif held and words[0] == "VmFlags:":
            flags = words[1:]
            break
    assert flags is not None
    assert "dc" in flags, "dc is the kernel's flag for: do not copy on fork"


def faults_by_thread():
    """Return a dict from thread id to the number of minor page faults and the allowed cores, for each thread
    of this process.
    """
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            faults = int((task / "stat").read_text().rsplit(")", 1)[1].split()[7])
            found[int(task.name)] = faults, status["Cpus_allowed_list"].strip()
    return found


def test_buffers_are_backed_by_threads_on_the_cores_near_the_gpu(device, monkeypatch):
    # The thread that first touches a memory page determines the page's NUMA node. So neither the calling thread nor
    # OpenMP's threads may touch a new buffer.
    torch.ones(1 << 22).add_(1)  # starts OpenMP's threads
    device.cores, bound = [max(os.sched_getaffinity(0))], []
    monkeypatch.setattr("ebbtide.runtime.hardware.pages.bind", bound.append)
    before = faults_by_thread()
    buffer = device.host_empty(64 * 2**20, torch.float32)
    after = faults_by_thread()
    assert bound == [device.cores]
    pages = buffer.nbytes // (2 * 2**20)  # pages of the largest kind
    assert sum(after[t][0] - before[t][0] for t in before if t in after) < pages // 2
    assert threading.get_native_id() in after
    assert all(after[t][1] == before[t][1] for t in before if t in after)
    for _ in range(100):  # a joined thread leaves the list a moment later
        if set(faults_by_thread()) <= set(before):
            break
        time.sleep(0.02)
    assert set(faults_by_thread()) <= set(before), "the threads that touched the pages have ended"


def test_host_updates_run_on_the_cores_near_the_gpu(device):
    device.cores, seen = [max(os.sched_getaffinity(0))], []
    lanes, ended = device.lanes(), Completion()
    lanes[Lane.HOST].submit(lambda: seen.append(os.sched_getaffinity(0)), [], ended)
    ended.wait_host()
    assert seen == [set(device.cores)]
    for lane in lanes.values():
        lane.close()


def test_every_lane_chooses_the_ranks_gpu(fake, device):
    lanes = device.lanes()
    threads, ended = [], []
    for lane in lanes.values():
        ended.append(Completion())
        lane.submit(lambda: threads.append(threading.get_ident()), [], ended[-1])
    for completion in ended:
        completion.wait_host()
    # The training thread itself issues gradients, and already has the rank's GPU.
    own = [ident for ident in threads if ident != threading.get_ident()]
    assert len(own) == len(lanes) - 2
    assert set(own) <= fake.devices_set
    for lane in lanes.values():
        lane.close()


def test_a_checkpoints_thread_chooses_the_gpu_before_a_stream(fake, monkeypatch):
    # A new thread has chosen GPU 0. When it leaves a stream of another GPU, PyTorch chooses GPU 0 again, for which CUDA
    # allocates some hundred MB of memory there, in each rank.
    on_stream, chosen = fake.cuda.stream, []

    @contextlib.contextmanager
    def noted(stream):
        chosen.append(threading.get_ident() in fake.devices_set)
        with on_stream(stream):
            yield
        chosen.append(threading.get_ident() in fake.devices_set)

    fake.cuda.stream = noted
    monkeypatch.setattr(memory, "torch", fake)
    monkeypatch.setattr(memory, "_streams", defaultdict(deque))
    source = memory.DeviceBytes(torch.arange(1000), None)
    source._ready = fake.cuda.Event()  # as for a tensor on a GPU
    copied = torch.zeros(1000, dtype=torch.int64)
    thread = threading.Thread(target=source.copy_to, args=(copied.data_ptr(), 0, copied.nbytes))
    thread.start()
    thread.join(30)
    assert chosen == [True, True]
    assert torch.equal(copied, torch.arange(1000))


def test_who_reads_parameters_holds_up_the_stream_that_is_current_and_no_other(fake, device):
    # If parameters are gathered ahead on another stream, the compute stream then waits only when a module needs them.
    gathers, held_up = fake.cuda.Stream(), []
    event = fake.cuda.Event()
    event.record()
    with pytest.MonkeyPatch.context() as patch, fake.cuda.stream(gathers):
        for stream in {type(gathers), type(fake.cuda.default_stream())}:
            patch.setattr(stream, "wait_event", lambda self, _: held_up.append(self))
        device.training_waits([Completion.done(event)])
    assert held_up == [gathers]


def test_a_lane_that_cannot_begin_says_so(device, monkeypatch):
    def refuse(index):
        raise RuntimeError(f"no GPU {index}")

    monkeypatch.setattr(cuda.torch.cuda, "set_device", refuse)
    lanes = device.lanes()
    completion = Completion("an op")
    lanes[Lane.H2D].submit(lambda: None, [], completion)
    with pytest.raises(RuntimeError, match="'an op' failed") as told:
        completion.wait_host()
    assert "no GPU 0" in str(told.value.__cause__)


def test_long_copies_go_in_pieces(fake, device, monkeypatch):
    monkeypatch.setattr(cuda, "PIECE_BYTES", 4096)
    stream, source = fake.cuda.Stream(), device.host_empty(2500, torch.float32)
    source.copy_(torch.arange(2500))
    to = device.device_empty(2500, torch.float32)
    device.copy(to, source, Lane.H2D, stream)
    stream.synchronize()
    assert torch.equal(to, source)
    assert stream.ran == 3


def test_threads_of_later_checkpoints_copy_on_the_same_streams(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    monkeypatch.setattr(memory, "_streams", defaultdict(deque))
    gpu = torch.device("cuda:0")
    with memory._side_stream(gpu) as one, memory._side_stream(gpu) as other:
        assert one is not other

    def copy():
        with memory._side_stream(gpu):
            pass

    for _ in range(40):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    assert len(made) == 2


class Counted:
    """A fake CUDA event that was recorded at a given time. `elapsed_time` returns milliseconds as a float32 number, as
    CUDA does, so long times are coarse.
    """

    def __init__(self, at_s):
        self.at_s = at_s

    def query(self):
        return True

    def elapsed_time(self, other):
        return float(torch.tensor(1e3 * (other.at_s - self.at_s), dtype=torch.float32))


@pytest.mark.parametrize("drift", [1e-3, -1e-3])
def test_clocks_that_drift_apart_stay_together(drift):
    # `DeviceClock` converts GPU times to host times without growing error, although the two clocks drift apart by 1 ms
    # per second.
    now = [0.0]

    def seen(host_s):
        event = Counted(host_s * (1 + drift))
        event.query = lambda: now[0] >= host_s
        return event

    clock = DeviceClock(seen(0.0), lambda: now[0])
    for step in range(1, 3601):
        now[0] = float(step)
        clock.mark(seen(step + 0.1))
    before = clock.latest
    now[0] += 1.0
    assert abs(before.reached_s - 3600.1) <= (1.0 if drift > 0 else 0.1)


def test_times_keep_their_resolution_over_days():
    now, step_s = [100.0], 7.0
    clock = DeviceClock(Counted(0.0), lambda: now[0])
    for step in range(1, 20_000):
        now[0] += step_s
        clock.mark(Counted(step * step_s))
    last = clock.latest
    soon = Counted(last.event.at_s + 1e-3)
    assert last.date_s(soon) - last.reached_s == pytest.approx(1e-3, abs=1e-6)
    assert Counted(0.0).elapsed_time(soon) - Counted(0.0).elapsed_time(last.event) != 1.0
    assert last.reached_s == pytest.approx(100.0 + 19_999 * step_s, abs=0.01)
