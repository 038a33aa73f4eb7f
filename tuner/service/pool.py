"""The worker processes of the planning service, in separate queues for light requests, heavy ones and background jobs.

So light requests never wait for heavy ones.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from ebbtide.simulator.rules import BrokenRule, RuleError
from ebbtide.tuner.service.quota import Quota
from ebbtide.tuner.service.worker import BROKEN, HEAD, INVALID, PROGRESS, TEXT

OnProgress = Callable[[dict[str, Any]], None]


class InvalidError(RuleError):
    """An error: a request breaks rules."""

    def __init__(self, rule: str, key: str = "", rows: Sequence[BrokenRule] = ()) -> None:
        super().__init__(rule, key)
        self.rows = tuple(rows) or (BrokenRule(key, str(self)),)

    @classmethod
    def of(cls, payload: bytes) -> Self:
        """Build this error from a worker process's message, which is JSON and lists the rules that a request breaks."""
        rows = [BrokenRule(*row) for row in json.loads(payload)]
        return cls("; ".join(row.sentence for row in rows), rows[0].key, rows)


class BusyError(RuntimeError):
    """An error: too many requests already wait for a worker process."""


class WorkerError(RuntimeError):
    """An error: a worker process failed or ended, and nothing shows that the request is the cause."""


class LostWorkerError(WorkerError):
    """An error: a worker process ended, perhaps killed for lack of memory."""


@dataclass(frozen=True)
class Result:
    """The result of a request, in the bytes that a worker process sent: JSON or other text."""

    body: bytes
    is_json: bool = True


class Worker:
    """A worker process and its pipes. A worker processes one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, niceness: int, quota: Quota) -> "Worker":
        """Start a worker process, and return when the process is ready for requests.

        Raises:
            WorkerError: The process could not be started, or ended early.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = ("-m", "ebbtide.tuner.service.worker", str(niceness), str(quota.worker_bytes))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=2**20,
            )
        except OSError as error:
            raise WorkerError(f"no worker process could be started: {error}") from None
        worker = cls(process)
        try:
            await worker._frame()
        except BaseException:  # a worker that is cancelled while it starts must not stay behind
            worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        """Return True if this worker process is alive. A killed process counts as ended."""
        return not self._killed and self._process.returncode is None

    async def call(self, call: bytes, on_progress: OnProgress, result_bytes: int) -> Result:
        """Send a request to this worker process, and wait for the result.

        Args:
            result_bytes: Largest size of the result in bytes.

        Raises:
            InvalidError: The request is at fault.
            WorkerError: The worker process failed.
            LostWorkerError: The worker process ended.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(HEAD.pack(b"c", len(call)) + call)
            await stdin.drain()
        except ConnectionError:
            raise LostWorkerError(self._end()) from None
        while True:
            tag, payload = await self._frame(result_bytes)
            if tag == PROGRESS:
                on_progress(json.loads(payload))
            elif tag == INVALID:
                raise InvalidError.of(payload)
            elif tag == BROKEN:
                raise WorkerError(payload.decode())
            else:
                return Result(payload, is_json=tag != TEXT)

    async def _frame(self, most_bytes: int = 2**30) -> tuple[bytes, bytes]:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            tag, size = HEAD.unpack(await stdout.readexactly(HEAD.size))
            if size > most_bytes:
                self.kill()
                raise InvalidError(
                    f"the result of a request must have at most {most_bytes} bytes, but has {size} bytes. Request less "
                    "in one request, for example a what-if with fewer values"
                )
            return tag, await stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            await self._process.wait()
            raise LostWorkerError(self._end()) from None

    def _end(self) -> str:
        return (
            f"a worker process ended with status {self._process.returncode}, and again when it was "
            "restarted. If the machine is short of memory, ask for less"
        )

    def kill(self) -> None:
        """Kill this worker process. The result of an unfinished request is lost."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class RequestQueue:
    """A queue of requests to the service, with a few worker processes that serve only this queue.

    A worker process that has ended is replaced by a new one.
    """

    def __init__(
        self, name: str, size: int, niceness: int, limit_s: float, waiting: int, quota: Quota, patient: bool = False
    ) -> None:
        self._patient = patient
        self.name, self.size, self.limit_s = name, size, limit_s
        self._niceness, self._most_waiting, self._quota = niceness, waiting, quota
        self._free: asyncio.Queue[Worker | None] = asyncio.Queue()
        self._waiting = 0
        self._all: set[Worker] = set()
        for _ in range(size):
            self._free.put_nowait(None)  # its first call starts the worker

    async def warm(self) -> None:
        """Start all worker processes of this queue of requests now, so that the first request need not wait
        for a start.
        """
        for _ in range(self.size):  # one after the other: the first one compiles, and the others load what it compiled
            worker = await self._free.get()
            try:
                worker = await self._living(worker)
            finally:
                self._free.put_nowait(worker)

    async def call(self, name: str, body: Mapping[str, Any], on_progress: OnProgress = lambda _: None) -> Result:
        """Wait for a free worker process of this queue, send a request to the process, and return the result.

        If the caller is cancelled (because a client has left or a background job was stopped), the worker process is
        killed. In a queue marked as patient, the worker process finishes its work instead.

        Raises:
            BusyError: Too many requests already wait.
            InvalidError: The request is at fault, or takes too long.
            WorkerError: The worker process failed or ended.
        """
        if self._waiting >= self._most_waiting:
            raise BusyError(
                f"at most {self._most_waiting} {self.name} requests may wait, and that many are waiting: try "
                "again in a few seconds"
            )
        frame = json.dumps({"call": name, "body": body}).encode()
        self._waiting += 1
        try:
            worker = await self._free.get()
        finally:
            self._waiting -= 1
        serving = asyncio.create_task(self._serve(worker, frame, on_progress))
        try:
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            if self._patient:  # it ends soon anyway, and starting a new worker would take longer
                serving.add_done_callback(_unheard)
            else:
                serving.cancel()
                await asyncio.wait([serving])
            raise

    async def _serve(self, worker: Worker | None, frame: bytes, on_progress: OnProgress) -> Result:
        try:
            worker = await self._living(worker)
            try:
                return await self._within(worker, frame, on_progress)
            except LostWorkerError:
                worker = await self._living(worker)
                return await self._within(worker, frame, on_progress)
        finally:
            self._free.put_nowait(worker)

    async def _living(self, worker: Worker | None) -> Worker:
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self._all.discard(worker)
        worker = await Worker.start(self._niceness, self._quota)
        self._all.add(worker)
        return worker

    async def _within(self, worker: Worker, frame: bytes, on_progress: OnProgress) -> Result:
        try:
            async with asyncio.timeout(self.limit_s):
                return await worker.call(frame, on_progress, self._quota.result_bytes)
        except TimeoutError:
            worker.kill()
            raise InvalidError(
                f"a {self.name} request must be answered within {self.limit_s:g} s, but this one "
                "was not: ask for less (fewer cells, layers, subgroups or accumulation steps)"
            ) from None
        except asyncio.CancelledError:
            worker.kill()  # the client is gone, so the result is not needed
            raise

    def close(self) -> None:
        """Kill all worker processes of this queue of requests."""
        for worker in self._all:
            worker.kill()


def _unheard(task: asyncio.Task[Result]) -> None:
    if not task.cancelled():
        task.exception()


class Cache:
    """A cache of the service's results, with a limit on the bytes. If the cache is full, the result that was unused
    longest is removed.

    A result depends on its request alone, so equal requests have equal results. The key is the request's digest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._held: OrderedDict[bytes, Result] = OrderedDict()

    @staticmethod
    def key(name: str, body: bytes) -> bytes:
        return sha256(name.encode() + b"\0" + body).digest()

    def get(self, key: bytes) -> Result | None:
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
        return held

    def put(self, key: bytes, result: Result) -> None:
        if len(result.body) > self._most_bytes // 4 or key in self._held:
            return
        self._held[key] = result
        self._bytes += len(result.body)
        while self._bytes > self._most_bytes:
            _, old = self._held.popitem(last=False)
            self._bytes -= len(old.body)


class Pool:
    """The worker processes, with a queue each for light requests, heavy ones and background jobs.

    Workers for light requests run at normal priority, the others at low priority. So a light request
    gets nearly a whole core even on a busy machine.
    """

    def __init__(self, quota: Quota, light_workers: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        light = light_workers or max(1, min(8, cores))
        self.quota = quota
        self.light = RequestQueue("light", light, 0, quota.light_s, quota.light_waiting, quota, True)
        self.heavy = RequestQueue("heavy", 1, 10, quota.heavy_s, quota.heavy_waiting, quota)
        self.jobs = RequestQueue("job", max(1, cores - 1), 15, quota.job_s, 2**31, quota)
        self.cache = Cache(quota.cache_bytes)

    async def answer(self, name: str, body: Mapping[str, Any], light: bool) -> Result:
        """Return the result of a request, from the cache or from a worker process.

        Raises:
            BusyError: Too many requests already wait.
            InvalidError: The request is at fault, or takes too long.
            WorkerError: The worker process failed or ended.
        """
        key = Cache.key(name, json.dumps(body, sort_keys=True).encode())
        held = self.cache.get(key)
        if held is None:
            held = await (self.light if light else self.heavy).call(name, body)
            self.cache.put(key, held)
        return held

    def close(self) -> None:
        """Kill all worker processes."""
        for lane in (self.light, self.heavy, self.jobs):
            lane.close()
