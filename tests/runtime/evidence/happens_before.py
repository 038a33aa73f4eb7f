"""A happens-before check by vector clocks on the fake CUDA, which does not depend on timing.

Actors are the streams, including the default stream, which is as asynchronous here as on CUDA, and the host's threads.
Two accesses to the same memory, at least one of them a write, are a race if no event, wait or synchronization orders
them. Two such accesses are a race even if the fake happened to run them one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager

import ebbtide.runtime.kernels.rule
import torch
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime import fake_cuda

KEPT = 400  # most remembered accesses of a storage
VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


def _host():
    return "host", threading.get_ident()


class Order:
    """The vector clocks of all actors (CUDA streams and host threads), and the recorded memory accesses.
    Methods may be called from any thread.

    Attributes:
        races: Number of occurrences of each race, by its two accesses and actors.
        accesses: Number of checked accesses.
    """

    def __init__(self, fake):
        self.races, self.accesses, self.on = Counter(), 0, False
        self._fake = fake
        self._lock = threading.RLock()
        self._clocks = defaultdict(lambda: defaultdict(int))
        self._seen, self._alive = {}, {}
        self._completions = {}  # id -> (completion, clock when submitted, clock at its end)

    # -- clocks ------------------------------------------------------------------------------

    def snapshot(self, actor):
        with self._lock:
            return dict(self._clocks[actor])

    def after(self, actor, clock):
        """Record that all further work of ``actor``, a stream or host thread, comes after the accesses in the
        given vector clock.
        """
        with self._lock:
            mine = self._clocks[actor]
            for other, tick in clock.items():
                mine[other] = max(mine[other], tick)

    def issued(self, stream):
        """Record that further work on a stream is ordered after all work that the issuing thread has done or waited
        for.
        """
        self.after(stream, self.snapshot(_host()))

    # -- memory ------------------------------------------------------------------------------

    def access(self, actor, tensor, write, what):
        if not self.on or not tensor.numel() or tensor.device.type == "meta":
            return
        first = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = first + reach * tensor.element_size()
        with self._lock:
            self.accesses += 1
            key, mine = self._storage(tensor), self._clocks[actor]
            mine[actor] += 1
            kept = []
            for old in self._seen.get(key, ()):
                begin, until, by, tick, wrote, did = old
                known = by == actor or mine[by] >= tick
                if begin < end and first < until and (write or wrote) and not known:
                    self.races[f"{what} by {_name(actor)}; unordered with {did} by {_name(by)}"] += 1
                if not (write and first <= begin and until <= end and known):
                    kept.append(old)
            kept.append((first, end, actor, mine[actor], write, what))
            self._seen[key] = kept[-KEPT:]

    def _storage(self, tensor):
        # If the address belonged to a storage that has been freed since, forget the recorded accesses to the freed
        # storage.
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._alive.get(key)
        if held is None or held.expired():
            self._alive[key] = fake_cuda.StorageWeakRef(storage)
            self._seen.pop(key, None)
        return key

    # -- who waits for whom ------------------------------------------------------------------

    def install(self, patch):
        """Patch the fake CUDA's events and streams, and the runtime's copies, kernels and lanes (queues of ops), so
        that this object records which work must end before other work begins.
        """
        self._follow_events(patch)
        self._follow_streams(patch)
        self._follow_work(patch)
        self._follow_lanes(patch)

    def _follow_events(self, patch):
        kind, order = fake_cuda.FakeEvent, self
        record, synchronize, query = kind.record, kind.synchronize, kind.query

        def recorded(event, stream=None):
            stream = stream or fake_cuda.current_stream()
            order.issued(stream)
            event.clock = order.snapshot(stream)
            record(event, stream)

        def synchronized(event):
            synchronize(event)
            order.after(_host(), getattr(event, "clock", {}))

        def queried(event):
            reached = query(event)
            # On CUDA, an event of the default stream may not have been reached yet, so it proves nothing.
            if reached and event.latest and event.latest._stream is not fake_cuda.DEFAULT:
                order.after(_host(), getattr(event, "clock", {}))
            return reached

        patch.setattr(kind, "record", recorded)
        patch.setattr(kind, "synchronize", synchronized)
        patch.setattr(kind, "query", queried)

    def _follow_streams(self, patch):
        order = self
        for kind in (fake_cuda.FakeStream, fake_cuda.DefaultStream):

            def wait_event(stream, event, stock=kind.wait_event):
                stock(stream, event)
                order.issued(stream)
                order.after(stream, getattr(event, "clock", {}))

            def wait_stream(stream, other, stock=kind.wait_stream):
                order.issued(other)
                stock(stream, other)
                order.after(stream, order.snapshot(other))

            def synchronize(stream, stock=kind.synchronize):
                stock(stream)
                order.after(_host(), order.snapshot(stream))

            patch.setattr(kind, "wait_event", wait_event)
            patch.setattr(kind, "wait_stream", wait_stream)
            patch.setattr(kind, "synchronize", synchronize)

    def _follow_work(self, patch):
        order, fake = self, self._fake
        copy_later, run_later, empty = fake.copy_later, fake.run_later, fake.empty
        host_update = ebbtide.runtime.kernels.rule.host_update

        def copied(stream, to, source, crossing):
            order.issued(stream)
            where = _where()
            order.access(stream, source, False, f"a copy from, {where}")
            order.access(stream, to, True, f"a copy to, {where}")
            copy_later(stream, to, source, crossing)
            if crossing and not (fake.runtime.pinned(to) or fake.runtime.pinned(source)):
                order.after(_host(), order.snapshot(stream))  # the host has waited for the stream

        def ran(stream, func, args, kwargs):
            order.issued(stream)
            updates = "device_update" in getattr(func, "__qualname__", "")
            what = f"a kernel, {_where()}"
            for place, tensor in enumerate(args):
                if isinstance(tensor, torch.Tensor):  # an update writes all tensors except the gradient
                    order.access(stream, tensor, (place == 0) != updates, what)
            run_later(stream, func, args, kwargs)

        def updated(state, grad, out, *rest, **options):
            if threading.current_thread() is not threading.main_thread():  # other threads run DeepSpeed's op
                order.access(_host(), grad, False, "a host update")
                for tensor in (*state, out):
                    order.access(_host(), tensor, True, "a host update")
            host_update(state, grad, out, *rest, **options)

        def allocated(*args, **kwargs):
            made, stream = empty(*args, **kwargs), fake_cuda.current_stream()
            if kwargs.get("device") is not None:  # earlier users of the memory may still be using it
                order.issued(stream)
                order.access(stream, made, True, "an allocation")
            return made

        def exchanged(stream, tensor, write):
            order.issued(stream)
            order.access(stream, tensor, write, f"a collective, {_where()}")

        patch.setattr(fake, "exchanges", exchanged)
        patch.setattr(fake, "empty", allocated)
        patch.setattr(fake, "copy_later", copied)
        patch.setattr(fake, "run_later", ran)
        patch.setattr(ebbtide.runtime.kernels.rule, "host_update", updated)

    def _follow_lanes(self, patch):
        order, known = self, self._completions
        submit, execute = LaneQueue.submit, LaneQueue._execute
        wait_issued, ended = Completion.wait_issued, Completion.ended.fget

        def submitted(lane, body, waits, completion):
            known[id(completion)] = completion, order.snapshot(_host()), None
            submit(lane, body, waits, completion)

        def executed(lane, body, waits, completion):
            order.after(_host(), known[id(completion)][1])

            def then():
                body()
                known[id(completion)] = completion, {}, order.snapshot(_host())

            execute(lane, then, waits, completion)

        def learn(completion):
            held = known.get(id(completion))
            if held is not None and held[2] is not None:
                order.after(_host(), held[2])

        def waited(completion):
            wait_issued(completion)
            learn(completion)

        def has_ended(completion):
            answer = ended(completion)
            if answer:
                learn(completion)
            return answer

        patch.setattr(LaneQueue, "submit", submitted)
        patch.setattr(LaneQueue, "_execute", executed)
        patch.setattr(Completion, "wait_issued", waited)
        patch.setattr(Completion, "ended", property(has_ended))

    # -- the default stream ------------------------------------------------------------------

    @contextmanager
    def watching(self):
        """Record memory accesses of torch's own ops too, inside a ``with`` block.

        These accesses count as work of the current stream, and races with them are found.
        """
        self.on = True
        try:
            with _Ops(self, self._fake):
                yield self
        finally:
            self.on = False


class _Ops(TorchDispatchMode):
    """A dispatch mode that records the memory accesses of torch's ops: on the current stream, or on the host
    thread for host memory.
    """

    def __init__(self, order, fake):
        super().__init__()
        self._order, self._fake = order, fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name.split("::")[1]
        if func.is_view or name.endswith("_like") or name.startswith("new_") or not given:
            return out  # nothing is read
        order, stream = self._order, fake_cuda.current_stream()
        host = all(self._fake.runtime.pinned(t) for t in given if t.numel())
        if func in VALUES:
            order.issued(stream)
            order.after(_host(), order.snapshot(stream))
        if not host:
            order.issued(stream)
        written = {id(t) for t in self._written(func, args, kwargs)}
        actor, what = _host() if host else stream, f"{name}, {_where()}"
        for tensor in given:
            order.access(actor, tensor, id(tensor) in written, what)
        crosses = func is torch.ops.aten.copy_.default and not host
        if crosses and any(self._fake.runtime.pinned(t) for t in given):
            order.after(_host(), order.snapshot(stream))  # the host has waited for the stream
        return out

    @staticmethod
    def _written(func, args, kwargs):
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                yield from (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _where():
    # In the report of a race between memory accesses, these lines tell where an access was made.
    frame, lines = sys._getframe(2), []
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        if ("/runtime/" in path and "/tests/" not in path) or "/deepspeed/" in path:
            lines.append(f"{path.rsplit('/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " in ".join(lines)


def _name(actor):
    if isinstance(actor, tuple):
        return next((t.name for t in threading.enumerate() if t.ident == actor[1]), "a thread")
    return "the default stream" if actor is fake_cuda.DEFAULT else "another stream"
