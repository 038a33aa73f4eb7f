"""The queue of the planning service's background jobs, such as plan searches.

Jobs are stored on disk and run by worker processes of low priority. Clients can follow the progress of a job.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from ebbtide.tuner.service.pool import BusyError, InvalidError, Pool, WorkerError
from ebbtide.tuner.service.quota import Quota
from ebbtide.tuner.service.store import Store

# Kind of job -> the worker's call (`ebbtide.tuner.service.worker.calls`). A new kind needs a line in both.
KINDS = {"plan": "job/plan", "what-if": "job/what-if", "search": "job/search"}
T = TypeVar("T")
LOG = logging.getLogger("uvicorn.error")
KEEP_ALIVE_S = 15.0
RETRY_S = 5.0
EXPIRE_EVERY_S = 600.0
REMEMBERED = 512  # events that are kept for streams that fell behind


class Feed:
    """A source of events about the service's background jobs, which any number of clients can follow.

    A client that reads slowly misses old events.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=REMEMBERED)
        self._number = 0
        self._changed = asyncio.Condition()
        self.streams = 0
        self._closed = False

    async def close(self) -> None:
        """End the event streams of all clients, because the server ends."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def tell(self, kind: str, data: dict[str, Any]) -> None:
        async with self._changed:
            self._number += 1
            self._events.append((self._number, kind, data))
            self._changed.notify_all()

    def listen(self) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
        """Return an iterator over (kind, data) of events from now on. None keeps an idle connection alive."""
        return self._since(self._number)

    async def _since(self, last: int) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
        while not self._closed:
            fresh = [event for event in self._events if event[0] > last]
            for number, kind, data in fresh:
                last = number
                yield kind, data
            if fresh:
                continue
            try:
                async with asyncio.timeout(KEEP_ALIVE_S), self._changed:
                    while self._number == last and not self._closed:
                        await self._changed.wait()
            except TimeoutError:
                yield None


class Jobs:
    """The queue of the service's background jobs. Every change is on disk before any client learns of it."""

    def __init__(self, store: Store, pool: Pool, quota: Quota, feed: Feed) -> None:
        self._store, self._pool, self._quota, self.feed = store, pool, quota, feed
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._progress: dict[str, dict[str, Any]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def start(self) -> int:
        """Start the queued jobs. Return the number that an earlier server's end interrupted, which run again."""
        recovered = self._store.recover(self._quota.attempts)
        self._tasks = [asyncio.create_task(self._dispatch()) for _ in range(self._pool.jobs.size)]
        self._tasks.append(asyncio.create_task(self._expire()))
        return recovered

    async def stop(self) -> None:
        """Stop all running background jobs, because the server ends."""
        # On disk the jobs stay ``running``, so that the next server starts them again.
        for task in (*self._tasks, *self._running.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._running.values(), return_exceptions=True)

    async def submit(self, kind: str, request: dict[str, Any], title: str) -> dict[str, Any]:
        """Add a background job to the service's queue, write it to disk, and return its state.

        Raises:
            BusyError: The queue already has the largest allowed number of jobs.
        """
        if self._store.waiting() >= self._quota.jobs_waiting:
            raise BusyError(
                f"at most {self._quota.jobs_waiting} jobs may wait, and that many are waiting: "
                "cancel some, or try again later"
            )
        job = await asyncio.to_thread(self._store.add_job, kind, json.dumps(request), title)
        await self.feed.tell("job", job)
        self._wake.set()
        return job

    async def cancel(self, job: str) -> bool:
        """Cancel a background job. Return False if the job has already ended."""
        stopped = await asyncio.to_thread(self._store.finish, job, "cancelled", "cancelled")
        task = self._running.get(job)
        if stopped and task is not None:
            task.cancel()
        await self._tell(job)
        return stopped

    def state(self, job: str) -> dict[str, Any] | None:
        """Return the stored state of a background job, or None if the job is unknown."""
        stored = self._store.job(job)
        live = self._progress.get(job)
        return {**stored, **live} if stored and live and stored["state"] == "running" else stored

    async def _tell(self, job: str) -> None:
        state = self._store.job(job)
        if state is not None:
            await self.feed.tell("job", state)

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()  # before the lookup, so that a job that is added later sets it again
            job = await _kept(self._store.claim)
            if job is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), EXPIRE_EVERY_S)
                continue
            task = asyncio.create_task(self._run(job))
            self._running[job["id"]] = task
            await asyncio.wait([task])  # the job stores its own errors, so the loop goes on
            self._running.pop(job["id"], None)
            self._progress.pop(job["id"], None)

    async def _run(self, job: dict[str, Any]) -> None:
        name = job["id"]
        await self.feed.tell("job", job)
        state, note, result = "failed", "", None
        try:
            if (self._store.job(name) or {}).get("state") != "running":
                return  # cancelled after it was claimed, before it had a task
            request = json.loads(self._store.request(name) or "{}")
            result = await self._pool.jobs.call(KINDS[job["kind"]], request, lambda step: self._progressed(job, step))
            state, note = "done", "done"
        except (InvalidError, WorkerError, BusyError) as error:
            note = str(error)
        except KeyError:
            note = f"a job must be one of {', '.join(KINDS)}, but this one is {job['kind']!r}"
        except Exception as error:  # told with the job's state, because the job would otherwise stay "running"
            LOG.exception("a job failed")
            note = f"the job could not be run: {error}"
        body, is_json = (result.body, result.is_json) if result else (None, True)
        await _kept(self._store.finish, name, state, note, body, is_json)
        await self._tell(name)

    def _progressed(self, job: dict[str, Any], step: dict[str, Any]) -> None:
        live = {"share": step["share"], "note": step["note"]}
        self._progress[job["id"]] = live
        task = asyncio.get_running_loop().create_task(self.feed.tell("job", {**job, **live}))
        self._telling.add(task)  # Python may delete a task without references before it has run
        task.add_done_callback(self._telling.discard)

    async def _expire(self) -> None:
        q = self._quota
        while True:
            await _kept(self._store.expire, q.keep_s, q.run_keep_s, q.kept_rows)
            await asyncio.sleep(EXPIRE_EVERY_S)


async def _kept(write: Callable[..., T], *arguments: Any) -> T:
    while True:
        try:
            return await asyncio.to_thread(write, *arguments)
        except sqlite3.DatabaseError as error:
            LOG.warning("the database cannot be used: %s. Trying again in %g s", error, RETRY_S)
            await asyncio.sleep(RETRY_S)
