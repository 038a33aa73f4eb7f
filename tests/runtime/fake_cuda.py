"""A fake `torch.cuda` for machines without a GPU, with the rules of CUDA that reveal races.

Device memory is host memory, and the default stream runs immediately, in the training thread. Everything else is as
strict as CUDA allows:

- A stream is a thread that runs its work **late**: when something waits for the work, or after a random delay. The
  delays depend only on a seed and the stream's number. Copies and kernels read their sources when they run, not when
  they are issued.
- The caching allocator reuses a freed block immediately, in the order of the stream it was allocated on. If a tensor is
  freed without ``record_stream`` and a copy on another stream then reads it, the copy finds the data of the block's
  next owner. Here this data is a fixed pattern called poison, and the fake records a violation. Memory that was never
  written holds poison too.
- An event stands for the work that was on its stream when the event was recorded.
- A copy from or to pageable host memory blocks its caller. A page lock covers whole pages. When ebbtide issues a copy
  between host and device, the fake cannot tell which of the two tensors is the host's. So the copy counts as pageable
  if neither tensor is page-locked.
- Synchronizations of the whole device, and those that blocked a thread, are counted.
"""

from __future__ import annotations

import math
import mmap
import random
import sys
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

DEADLINE_S = 60.0
LATEST_S = 0.01
POISON = 0x7F  # as bytes: large and finite in bf16, fp16 and fp32, so that it shows in every sum
_current = threading.local()


def poison(tensor):
    tensor.detach().view(-1).view(torch.uint8).fill_(POISON)


# -- streams and events --------------------------------------------------------------------------


class FakeStream:
    """A fake CUDA stream that runs its work in order, and late. ``wait_event`` blocks the stream, not the caller."""

    def __init__(self, world, number):
        self._world = world
        self._random = random.Random(f"{world.seed} {number}")
        self._work = deque()
        self._state = threading.Condition()
        self._issued = self._done = self._demanded = 0
        self._closed = False
        self.ran = 0
        self.device = torch.device("cpu")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            with self._state:
                while not self._work and not self._closed:
                    self._state.wait()
                if self._closed:
                    return
                work, late = self._work.popleft()
                if late:
                    ends_s = time.monotonic() + self._random.random() * self._world.latest_s
                    while self._demanded <= self._done and not self._closed:
                        left_s = ends_s - time.monotonic()
                        if left_s <= 0 or not self._state.wait(left_s):
                            break
            try:
                work()
            except Exception as error:  # reported at the end of the test
                self._world.violations.append(f"a stream's work failed: {error!r}")
            with self._state:
                self.ran += late
                self._done += 1
                self._state.notify_all()

    def _put(self, work, late):
        with self._state:
            self._issued += 1
            self._work.append((work, late))
            self._state.notify_all()
            return self._issued

    def enqueue(self, work):
        return self._put(work, late=True)

    def demand(self, upto=None):
        """Make this fake stream run its issued work without further delay, because something waits for the work."""
        with self._state:
            self._demanded = max(self._demanded, self._issued if upto is None else upto)
            self._state.notify_all()

    def drain(self):
        """Wait until all work that was issued to this fake stream so far has run. This wait is not counted as a
        synchronization.
        """
        with self._state:
            upto = self._issued
        self.demand(upto)
        with self._state:
            assert self._state.wait_for(lambda: self._done >= upto, DEADLINE_S), "this stream is stuck"

    @property
    def age_s(self):
        return DEFAULT.age_s

    @property
    def idle(self):
        with self._state:
            return self._done >= self._issued

    def wait_event(self, event):
        record = event.latest  # the event's present position, even if it is recorded again later
        if record is not None:
            self._put(record.wait, late=False)

    def wait_stream(self, other):
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def mark(self, reached):
        return self._put(reached, late=False)

    def synchronize(self):
        self._world.synchronised(self)
        self.drain()

    def query(self):
        return self.idle

    def close(self):
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(30)  # the next test may count threads


class DefaultStream:
    """The fake default CUDA stream of the training thread. Its work is done when the call returns."""

    device = torch.device("cpu")
    age_s = 0.0

    def wait_event(self, event):
        if event.latest is not None:
            event.latest.wait()

    def wait_stream(self, other):
        if other is not self:
            other.drain()

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def mark(self, reached):
        reached()
        return 0

    def demand(self, upto=None):
        pass

    def drain(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


DEFAULT = DefaultStream()


class _Record:
    """One call of `record` on a fake CUDA event: the position in a stream for which the event stands from then on."""

    def __init__(self, stream):
        self.reached = threading.Event()
        self.time_s = 0.0
        self._stream = stream
        self._upto = stream.mark(self._reach)

    def _reach(self):
        self.time_s = time.perf_counter() + self._stream.age_s
        self.reached.set()

    def wait(self):
        self._stream.demand(self._upto)
        assert self.reached.wait(DEADLINE_S), "nothing reaches this event"


class FakeEvent:
    """A fake `torch.cuda.Event`, which stands for its latest `record`. An event that was never recorded
    counts as reached.
    """

    world = None

    def __init__(self, enable_timing=False, **_):
        self.latest = None
        self._timing = enable_timing

    def record(self, stream=None):
        self.latest = _Record(stream or current_stream())

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        if self.latest is None:
            return
        if self.world is not None and not self.latest.reached.is_set():
            self.world.held_up()
        self.latest.wait()

    def query(self):
        return self.latest is None or self.latest.reached.is_set()

    def elapsed_time(self, later):
        """Return the milliseconds between two fake CUDA events in single precision, as CUDA does."""
        assert self._timing
        assert later._timing
        assert self.query()
        assert later.query()
        return float(torch.tensor(1e3 * (later.latest.time_s - self.latest.time_s)))


def current_stream(device=None):
    del device
    return getattr(_current, "stream", DEFAULT)


# -- memory --------------------------------------------------------------------------------------


class _Block:
    """The fake allocator's data about one tensor storage: the stream that owns the storage, the streams that were
    recorded as its users with `record_stream`, and the number of references that `hold` made.
    """

    def __init__(self, storage):
        self.alive = StorageWeakRef(storage)  # keeps the storage's number from being given to another storage
        self.owner = DEFAULT
        self.recorded = set()
        self.held = 0  # references that `hold` has made


class Allocator:
    """A fake caching allocator that knows the streams that may use each block. Thread-safe."""

    def __init__(self):
        self._blocks = {}
        self._lock = threading.Lock()

    def block(self, tensor):
        """Return the fake allocator's entry of a tensor's storage. The caller must hold the allocator's ``_lock``."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._blocks:
            for old in [n for n, b in self._blocks.items() if b.alive.expired()]:
                del self._blocks[old]
            self._blocks[number] = _Block(storage)
        return self._blocks[number]

    def owned(self, tensor, stream):
        with self._lock:
            self.block(tensor).owner = stream

    def record(self, tensor, stream):
        with self._lock:
            self.block(tensor).recorded.add(stream)

    def hold(self, tensor):
        """Return a second reference to a tensor's memory, for a copy or kernel that runs later on a fake CUDA stream.

        The fake allocator does not count this reference as a use of the memory. So the allocator can tell whether
        the tensor was freed before the copy or kernel has run.
        """
        name = tensor.detach()
        with self._lock:
            self.block(name).held += 1
        return name

    def given_away(self, name, stream):
        """Release a reference that `hold` made to a memory block, for a copy or kernel that runs on ``stream``.

        Return True if the copy or kernel uses the block too late: the block is free, and nothing told the allocator
        that ``stream`` uses it. The block was neither allocated on ``stream`` nor recorded as used by ``stream``. So
        the allocator may have given the block to a new owner, who already writes to it.
        """
        with self._lock:
            block = self.block(name)
            # Uses that do not count: references made by `hold`, and torch's own wrapper of the storage.
            uses = torch._C._storage_Use_Count(name.untyped_storage()._cdata)
            freed = uses <= block.held + 1
            block.held -= 1
            return freed and stream is not block.owner and stream not in block.recorded


# -- torch ---------------------------------------------------------------------------------------


class _Queueing(TorchDispatchMode):
    """A dispatch mode that runs torch's copies and kernels late, on a fake CUDA stream.

    A call that returns a value to the host waits for the stream and then runs immediately.
    """

    def __init__(self, world, stream, crossing):
        super().__init__()
        self._world = world
        self._stream = stream
        self._crossing = crossing  # copies between host and device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view or current_stream() is DEFAULT:  # a nested call
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._world.copy_later(self._stream, args[0], args[1], self._crossing)
            return args[0]
        inplace = func._schema.name.endswith("_") and func._schema.name.startswith("aten::")
        if inplace and isinstance(args[0], torch.Tensor):
            self._world.run_later(self._stream, func, args, kwargs)
            return args[0]
        if not any(isinstance(a, torch.Tensor) for a in tree_leaves(args)):
            return self._owned(func(*args, **kwargs))
        try:
            return self._made_later(func, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError):  # the shape of the result depends on the data
            self._stream.drain()
            return self._owned(func(*args, **kwargs))

    def _made_later(self, func, args, kwargs):
        bare = tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
        options = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        shape = func(*bare, **options)
        if not isinstance(shape, torch.Tensor):
            raise TypeError(func)
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        poison(made)

        def kernel(out, *given):
            out.copy_(func(*tree_unflatten(list(given), tree), **kwargs))

        leaves, tree = tree_flatten(args)
        self._world.run_later(self._stream, kernel, (made, *leaves), {})
        return self._owned(made)

    def _owned(self, made):
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._world.allocator.owned(tensor, self._stream)
        return made


class FakeRuntime:
    """A fake of cudaHostRegister and cudaHostUnregister.

    Locked ranges are whole pages that do not overlap. Each range is unlocked once, and never during a copy.

    Attributes:
        refuses_after: Number of further page locks before locking fails. None means no limit.
        limit_bytes: Bytes that can be page-locked at the same time.
        last_error: Error of the latest failed call, until a kernel launch raises it.
    """

    def __init__(self, violations):
        self.locked = {}
        self.refuses_after, self.limit_bytes = None, math.inf
        self.last_error = 0
        self._violations = violations
        self._flying = Counter()  # (first byte, end) of memory that copies on streams read or write

    def cudaHostRegister(self, address, size, flags):
        del flags
        assert address % mmap.PAGESIZE == 0
        for start, length in self.locked.items():
            if address < start + length and start < address + size:
                return self._fails(712)  # already registered
        if self.refuses_after == 0 or sum(self.locked.values()) + size > self.limit_bytes:
            return self._fails(2)  # out of memory
        if self.refuses_after is not None:
            self.refuses_after -= 1
        self.locked[address] = size
        return 0

    def _fails(self, error):
        self.last_error = error
        return error

    def launched(self):
        """Raise the error of an earlier failed call of this thread, as a kernel launch on CUDA does."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def flies(self, tensor, by=1):
        """Add ``by`` to the number of pending copies that read or write a tensor: 1 when a copy is issued, -1 once it
        runs. While the number is not 0, an unlock of the tensor's pages is reported as a violation.
        """
        begin = tensor.data_ptr()
        self._flying[begin, begin + tensor.nbytes] += by

    def cudaHostUnregister(self, address):
        end = address + self.locked.pop(address)
        if any(a < end and address < b for (a, b), n in list(self._flying.items()) if n):
            self._violations.append(f"{end - address} bytes were unlocked under a copy")
        return 0

    def pinned(self, tensor):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(a <= begin and end <= a + size for a, size in list(self.locked.items()))


class FakeTorch:
    """`torch` with a fake ``cuda``. Memory on the device is ordinary memory.

    Attributes:
        violations: Errors that would give wrong bits or a crash on CUDA. Empty in a correct run.
        counts: Counters by name. ``device`` counts synchronizations of the whole device. ``held_up`` counts
            synchronizations that blocked the training thread. ``pageable`` counts copies that blocked their
            caller, because the host memory was not page-locked. ``compiled`` counts compilations of kernels.
    """

    def __init__(self, seed=0, latest_s=LATEST_S):
        self.seed, self.latest_s = seed, latest_s
        self.violations = []
        self.runtime = FakeRuntime(self.violations)
        self.allocator = Allocator()
        self.streams = []
        self.counts = Counter()
        self.devices_set = set()  # threads that have chosen a device
        self._training = threading.get_ident()
        self.cuda = SimpleNamespace(
            Stream=self.stream,
            Event=type("Event", (FakeEvent,), {"world": self}),
            stream=partial(self.on_stream, crossing=True),
            cudart=lambda: self.runtime,
            current_stream=current_stream,
            default_stream=lambda device=None: DEFAULT,
            current_device=lambda: 0,
            device_count=lambda: 1,
            synchronize=self.synchronize,
            set_device=lambda index: self.devices_set.add(threading.get_ident()),
            device=self.on_device,
            get_device_properties=lambda index: SimpleNamespace(),
        )

    def stream(self, *args, **kwargs):
        del args, kwargs
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def on_device(self, device):
        """Do what `torch.cuda.device` does, and note that the thread has chosen a device for the block."""
        del device
        chosen = threading.get_ident() not in self.devices_set
        self.devices_set.add(threading.get_ident())
        yield
        if chosen:
            self.devices_set.remove(threading.get_ident())

    @contextmanager
    def on_stream(self, stream, crossing=False):
        before = current_stream()
        _current.stream = stream = stream or before
        try:
            if stream is DEFAULT:
                yield
            else:
                # Inside a block of another stream, that one's queue does not count.
                outside = nullcontext() if before is DEFAULT else _disable_current_modes()
                with outside, _Queueing(self, stream, crossing):
                    yield
        finally:
            _current.stream = before

    def synchronize(self, device=None):
        del device
        self.counts["device"] += 1
        for stream in self.streams:
            stream.drain()

    def synchronised(self, stream):
        if not stream.idle:
            self.held_up()

    def held_up(self):
        if threading.get_ident() == self._training:
            self.counts["held_up"] += 1

    def exchanges(self, stream, tensor, write):
        """Do nothing. Tests replace this hook, which a collective calls for each tensor that it uses on a fake
        CUDA stream.
        """

    # What streams run -----------------------------------------------------------------------

    def copy_later(self, stream, to, source, crossing):
        """Issue a copy to a fake CUDA stream. The copy reads its source when it runs. A copy to or from pageable
        memory blocks the caller.
        """
        to_name, source_name = self.allocator.hold(to), self.allocator.hold(source)
        for end in (to, source):
            self.runtime.flies(end)
        stream.enqueue(lambda: self._copy(stream, to_name, source_name))
        if crossing and not (self.runtime.pinned(to) or self.runtime.pinned(source)):
            self.counts["pageable"] += 1
            stream.drain()

    def _copy(self, stream, to, source):
        for end in (to, source):
            self.runtime.flies(end, by=-1)
        source_gone = self.allocator.given_away(source, stream)
        if self.allocator.given_away(to, stream):
            self.violations.append(f"a copy into {to.numel()} elements that were freed before")
        elif source_gone:
            self.violations.append(f"a copy of {source.numel()} elements that were freed before")
            poison(to)
        else:
            to.copy_(source)

    def run_later(self, stream, func, args, kwargs):
        """Issue a kernel, which writes its first argument in place, to a fake CUDA stream."""
        self.runtime.launched()
        hold = self.allocator.hold
        args = [hold(a) if isinstance(a, torch.Tensor) else a for a in args]
        stream.enqueue(lambda: self._kernel(stream, func, args, kwargs))

    def _kernel(self, stream, func, args, kwargs):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        gone = [a for a in tensors if self.allocator.given_away(a, stream)]
        for tensor in gone:
            self.violations.append(f"a kernel on {tensor.numel()} elements that were freed before")
            poison(tensor)
        func(*args, **kwargs)

    def device_update(self, state, grad, out, step, scale=1.0, tail=0):
        """Run the host's optimizer-update kernel in place of the GPU's, on the current fake stream."""
        from ebbtide.runtime.kernels.host import host_update

        def kernel(grad, out, *state):
            host_update(state, grad, out, step, scale, 1, tail)

        self.run_later(current_stream(), kernel, (grad, out, *state), {})

    def compile_for(self, *forms):
        del forms
        self.counts["compiled"] += 1

    def empty(self, *args, device=None, **kwargs):
        del device
        made = torch.empty(*args, **kwargs)
        if made.numel():
            poison(made)
        return made

    def ones(self, *args, device=None, **kwargs):
        del device
        self.runtime.launched()
        return torch.ones(*args, **kwargs)

    def close(self):
        for stream in self.streams:
            stream.drain()
            stream.close()

    def __getattr__(self, name):
        return getattr(torch, name)


def install(monkeypatch, seed=0, latest_s=LATEST_S):
    """Make `CudaDevice` use the fake torch.cuda from now on, and return the fake."""
    import ebbtide.runtime.devices.cuda
    import ebbtide.runtime.hardware.pages

    fake = FakeTorch(seed, latest_s)
    monkeypatch.setattr(DEFAULT, "age_s", 0.0, raising=False)
    for module in (ebbtide.runtime.devices.cuda, ebbtide.runtime.hardware.pages):
        monkeypatch.setattr(module, "torch", fake)
    record = fake.allocator.record
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: record(t, stream))  # noqa: PLW0108
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t, device=None: fake.runtime.pinned(t))
    monkeypatch.setitem(
        sys.modules,
        "ebbtide.runtime.kernels.device",
        SimpleNamespace(device_update=fake.device_update, compile_for=fake.compile_for),
    )
    return fake


def install_under_deepspeed(monkeypatch, fake):
    """Make DeepSpeed use the fake CUDA streams too, so that its own waits are tested."""
    import deepspeed.comm
    import ebbtide.runtime.zero.stage3  # noqa: F401
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.comm import coalesced_collectives

    accelerator = get_accelerator()
    kind = type(accelerator)
    monkeypatch.setattr(kind, "is_synchronized_device", lambda self: False)
    monkeypatch.setattr(kind, "use_host_timers", lambda self: True)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(kind, name, property(lambda self, name=name: getattr(fake.cuda, name)))
    members = {"stream": fake.on_stream}  # which also copies within the device
    for name in ("stream", "current_stream", "default_stream", "synchronize"):
        member = members.get(name, getattr(fake.cuda, name))
        monkeypatch.setattr(kind, name, lambda self, *args, member=member: member(*args))
    monkeypatch.setattr(
        "ebbtide.runtime.zero.stage12.float64_norm", _float64_norm
    )  # kernels like any other, as on CUDA
    norms = lambda parts: torch.stack([_float64_norm(part) for part in parts])
    for stage in ("stage12", "stage3"):
        monkeypatch.setattr(f"ebbtide.runtime.zero.{stage}.float64_norms", norms)
    monkeypatch.setattr(
        coalesced_collectives,
        "_torch_reduce_scatter_fn",
        _at_once(fake, coalesced_collectives._torch_reduce_scatter_fn, written=1),
    )
    for name in ("all_reduce", "reduce", "allgather_fn", "all_gather_into_tensor", "all_gather"):
        wrapped = _at_once(fake, getattr(deepspeed.comm, name))
        monkeypatch.setattr(deepspeed.comm, name, wrapped)


def _at_once(fake, collective, written=0):
    # The wrapper runs the collective immediately, and returns when the collective has ended. Work on a fake CUDA stream
    # usually runs late. The wrapper first waits for the earlier work of the current fake stream. The copies and kernels
    # inside the collective then run immediately, and are not queued on the fake stream.
    def run(*args, **kwargs):
        current_stream().drain()
        for place, given in enumerate(args):
            for tensor in tree_leaves(given):
                if isinstance(tensor, torch.Tensor):
                    fake.exchanges(current_stream(), tensor, place == written)
        with _disable_current_modes():
            done = collective(*args, **kwargs)
            if kwargs.get("async_op"):
                done.wait()
            return done

    return run


def _float64_norm(part):
    return torch.linalg.vector_norm(part, dtype=torch.float64)
