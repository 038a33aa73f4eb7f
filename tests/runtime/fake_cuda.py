"""Stands for `torch.cuda` under `runtime.devices.cuda.CudaDevice` on a machine without a GPU.

Device memory is host memory. The default stream runs at once, as the training thread's own work;
every other stream is a thread that runs what it was given later, in order, after random delays and
the events it was told to wait for. What the code forgets to wait for shows in the bits.
"""

from __future__ import annotations

import mmap
import queue
import random
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEADLINE_S = 60.0
_current = threading.local()


class FakeStream:
    """In order; ``wait_event`` holds up the stream, not the caller."""

    def __init__(self, device=None, priority=0, longest_s=0.003):
        del device, priority
        self._queue = queue.SimpleQueue()
        self._random = random.Random(id(self))
        self._longest_s = longest_s
        self.ran = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            self._queue.get()()

    def enqueue(self, work):
        def later():
            time.sleep(self._random.random() * self._longest_s)
            work()
            self.ran += 1

        self._queue.put(later)

    def wait_event(self, event):
        reached = event.reached  # what it stands for now, whatever is recorded later
        self._queue.put(lambda: reached.wait(DEADLINE_S))

    def wait_stream(self, other):
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def mark(self, reached):
        self._queue.put(reached)

    def synchronize(self):
        reached = threading.Event()
        self.mark(reached.set)
        assert reached.wait(DEADLINE_S)


class DefaultStream:
    """The training thread's own: everything on it has been done when the call returns."""

    def wait_event(self, event):
        event.synchronize()

    def wait_stream(self, other):
        other.synchronize()

    def mark(self, reached):
        reached()

    def synchronize(self):
        pass


DEFAULT = DefaultStream()


class FakeEvent:
    """As `torch.cuda.Event`: stands for the latest `record`; before the first one, for nothing."""

    def __init__(self, enable_timing=False):
        del enable_timing
        self.reached = threading.Event()
        self.reached.set()
        self.time_s = 0.0

    def record(self, stream=None):
        self.reached = reached = threading.Event()

        def mark():
            self.time_s = time.perf_counter()
            reached.set()

        (stream or _stream()).mark(mark)

    def synchronize(self):
        assert self.reached.wait(DEADLINE_S), "an event that nothing reaches"

    def query(self):
        return self.reached.is_set()

    def elapsed_time(self, later):
        return 1e3 * (later.time_s - self.time_s)


def _stream():
    return getattr(_current, "stream", DEFAULT)


class _Queueing(TorchDispatchMode):
    """Copies called within belong to the stream; nothing else may be called there."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.copy_.default, f"{func} on a stream of its own"
        self._stream.enqueue(lambda: func(*args))
        return args[0]


@contextmanager
def on_stream(stream):
    before = _stream()
    _current.stream = stream
    try:
        with _Queueing(stream):
            yield
    finally:
        _current.stream = before


class FakeRuntime:
    """cudaHostRegister and its inverse: whole pages, which do not overlap, given back once."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        del flags
        assert address % mmap.PAGESIZE == 0
        for start, length in self.locked.items():
            if address < start + length and start < address + size:
                return 712  # already registered
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


class FakeTorch:
    """`torch` with another ``cuda``; memory on the device is ordinary memory."""

    def __init__(self):
        self.runtime = FakeRuntime()
        self.streams = []
        self.cuda = SimpleNamespace(
            Stream=self._stream, Event=FakeEvent, stream=on_stream, cudart=lambda: self.runtime,
            current_stream=lambda device=None: _stream(),
            default_stream=lambda device=None: DEFAULT,
            current_device=lambda: 0, synchronize=self._synchronize,
            get_device_properties=lambda index: SimpleNamespace(),
        )  # fmt: skip

    def _stream(self, *args, **kwargs):
        self.streams.append(FakeStream(*args, **kwargs))
        return self.streams[-1]

    def _synchronize(self, device=None):
        del device
        for stream in self.streams:
            stream.synchronize()

    def empty(self, *args, device=None, **kwargs):
        del device
        return torch.empty(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(torch, name)


def device_update(state, grad, out, step, scale=1.0, tail=0):
    """The host kernel in the device kernel's place, on the current stream."""
    from runtime.kernels.host import host_update

    _stream().enqueue(lambda: host_update(state, grad, out, step, scale, 1, tail))


def install(monkeypatch):
    """`CudaDevice` runs on the stand-in from here on; returns it."""
    import runtime.devices.cuda

    fake = FakeTorch()
    monkeypatch.setattr(runtime.devices.cuda, "torch", fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setitem(
        sys.modules,
        "runtime.kernels.device",
        SimpleNamespace(device_update=device_update, compile_for=lambda *_: None),
    )
    return fake
