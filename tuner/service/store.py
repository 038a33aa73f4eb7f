"""The database of the planning service: background jobs, uploaded training runs and machines in one SQLite file.

If a client was told that data is stored, the data is on disk (SQLite's write-ahead log with full synchronization).
After a kill at any time, the database has the state of the last committed transaction. Every method is one transaction.
Methods that write wait for the disk, so they run in threads.

Writes run one at a time, under a lock. They have a database connection of their own, so that readers see only committed
data. All reads share a second connection, and they also run one at a time. Overlapping reads on one connection would
all see the database as it was when the first of them started. A thread might then not see a job that it has just added.
"""

import fcntl
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, kind TEXT NOT NULL, title TEXT NOT NULL,
    state TEXT NOT NULL, request TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    share REAL NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '', result BLOB,
    is_json INTEGER NOT NULL DEFAULT 1, created_s REAL NOT NULL, started_s REAL, finished_s REAL);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, number);
CREATE TABLE IF NOT EXISTS attempts (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    started_s REAL NOT NULL, ended_s REAL, outcome TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (job, number));
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, summary TEXT NOT NULL, run TEXT NOT NULL,
    created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS machines (
    name TEXT PRIMARY KEY, machine TEXT NOT NULL, created_s REAL NOT NULL);
"""
_JOB = "id, kind, title, state, attempts, share, note, created_s, started_s, finished_s"


class StoreError(ValueError):
    """An error: the service cannot use its database. The message says what to change."""


class Store:
    """The service's database of background jobs, uploaded training runs and machines, in one SQLite file.

    Raises:
        StoreError: Another server uses the file, or the file is not such a database.
    """

    def __init__(self, path: str | Path) -> None:
        self._file_lock = self._locked(path)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        try:
            self._writer = self._connected(path)
            damage = self._writer.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(f"it is damaged ({damage})")
            version = self._writer.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"--db must be of version {SCHEMA_VERSION} at most, but {path} is of version "
                    f"{version}: the database was written by a newer ebbtide. Upgrade ebbtide, or use another file"
                )
            self._writer.executescript(_TABLES)
            self._writer.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._db = self._connected(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                "--db must be a readable database of tune serve on a disk with free space, but got "
                f"{path}: {error}. Give another file, or an older copy"
            ) from None

    @staticmethod
    def _connected(path: str | Path) -> sqlite3.Connection:
        if str(path) != ":memory:":  # the file holds the configs that clients sent
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        db.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            db.execute(f"PRAGMA {pragma}")
        return db

    @staticmethod
    def _locked(path: str | Path) -> Any:
        try:
            lock = Path(f"{path}.lock").open("w", encoding="utf-8")  # noqa: SIM115 - held until the process ends
        except OSError as error:
            raise StoreError(f"--db must be a file that can be written, but got {path}: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StoreError(
                f"--db must belong to one server, but {path} is in use: stop the other `tune "
                "serve`, or give another file"
            ) from None
        return lock

    def close(self) -> None:
        with self._writing, self._reading:
            self._writer.close()
            self._db.close()
        self._file_lock.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk usually ends the transaction by itself
                    self._writer.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._reading:
            return self._db.execute(query, values).fetchall()

    def _row(self, query: str, *values: Any) -> sqlite3.Row | None:
        return next(iter(self._rows(query, *values)), None)

    # -- jobs --------------------------------------------------------------------------------

    def add_job(self, kind: str, request: str, title: str = "") -> dict[str, Any]:
        """Add a background job at the end of the service's queue in the database, and return the job's state."""
        job = uuid.uuid4().hex
        with self._transaction() as db:
            db.execute(
                "INSERT INTO jobs (id, number, kind, title, state, request, created_s) VALUES (?, "
                "(SELECT COALESCE(MAX(number), 0) + 1 FROM jobs), ?, ?, 'queued', ?, ?)",
                (job, kind, title, request, time.time()),
            )
        results = self.job(job)
        assert results is not None
        return results

    def claim(self) -> dict[str, Any] | None:
        """Mark the oldest queued background job as running, and return the job's state, or None if no job is queued.

        The mark is on disk before the job starts.
        """
        with self._transaction() as db:
            row = db.execute("SELECT id, attempts FROM jobs WHERE state = 'queued' ORDER BY number LIMIT 1").fetchone()
            if row is None:
                return None
            now_s, attempt = time.time(), row["attempts"] + 1
            db.execute(
                "UPDATE jobs SET state = 'running', attempts = ?, started_s = ?, share = 0, "
                "note = 'started' WHERE id = ?",
                (attempt, now_s, row["id"]),
            )
            db.execute("INSERT INTO attempts (job, number, started_s) VALUES (?, ?, ?)", (row["id"], attempt, now_s))
        # If the job was cancelled and forgotten meanwhile, claim the next one.
        return self.job(row["id"]) or self.claim()

    def finish(self, job: str, state: str, note: str, result: bytes | None = None, is_json: bool = True) -> bool:
        """Mark a queued or running background job as ended. Return False if the job had already ended.

        That can happen if a job is cancelled at the moment at which it finishes.
        """
        now_s = time.time()
        with self._transaction() as db:
            done = db.execute(
                "UPDATE jobs SET state = ?, note = ?, result = ?, is_json = ?, finished_s = ?, "
                "share = CASE WHEN ? = 'done' THEN 1.0 ELSE share END "
                "WHERE id = ? AND state IN ('queued', 'running')",
                (state, note, result, is_json, now_s, state, job),
            )
            db.execute(
                "UPDATE attempts SET ended_s = ?, outcome = ? WHERE job = ? AND ended_s IS NULL", (now_s, state, job)
            )
        return done.rowcount == 1

    def recover(self, most_attempts: int) -> int:
        """Queue the jobs again that were running when the server ended. Return the number of interrupted jobs.

        A job that was already started too often fails instead.
        """
        with self._transaction() as db:
            rows = db.execute("SELECT id, attempts FROM jobs WHERE state = 'running'").fetchall()
            for row in rows:
                again = row["attempts"] < most_attempts
                note = f"the server ended during attempt {row['attempts']}"
                note += "; it runs again" if again else f", of {most_attempts} at most"
                state, ended_s = ("queued", None) if again else ("failed", time.time())
                db.execute(
                    "UPDATE jobs SET state = ?, note = ?, finished_s = ? WHERE id = ?",
                    (state, note, ended_s, row["id"]),
                )
                db.execute(
                    "UPDATE attempts SET ended_s = ?, outcome = 'the server ended' WHERE job = ? AND ended_s IS NULL",
                    (time.time(), row["id"]),
                )
        return len(rows)

    def job(self, job: str) -> dict[str, Any] | None:
        """Return the state of a background job with every attempt to run the job, or None if the job is unknown.

        The state does not include the job's request and result.
        """
        row = self._row(f"SELECT {_JOB} FROM jobs WHERE id = ?", job)
        if row is None:
            return None
        tried = self._rows(
            "SELECT number, started_s, ended_s, outcome FROM attempts WHERE job = ? ORDER BY number", job
        )
        return {**dict(row), "history": [dict(attempt) for attempt in tried]}

    def jobs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return a list with the states of the newest background jobs, the newest first."""
        rows = self._rows(f"SELECT {_JOB} FROM jobs ORDER BY number DESC LIMIT ?", limit)
        return [dict(row) for row in rows]

    def waiting(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM jobs WHERE state = 'queued'")[0][0])

    def request(self, job: str) -> str | None:
        row = self._row("SELECT request FROM jobs WHERE id = ?", job)
        return None if row is None else str(row[0])

    def result(self, job: str) -> tuple[bytes, bool] | None:
        """Return the result of a job, and True if it is JSON. None: the job has no result."""
        row = self._row("SELECT result, is_json FROM jobs WHERE id = ?", job)
        return None if row is None or row[0] is None else (bytes(row[0]), bool(row[1]))

    def forget(self, table: Literal["jobs", "runs", "machines"], key: str) -> bool:
        """Remove an entry from the database: a training run, a machine, or a background job that has ended. Return
        False if there is no such entry.
        """
        column = "name" if table == "machines" else "id"
        ended = " AND state NOT IN ('queued', 'running')" if table == "jobs" else ""
        with self._transaction() as db:
            gone = db.execute(f"DELETE FROM {table} WHERE {column} = ?{ended}", (key,))
        return gone.rowcount == 1

    # -- runs and machines -------------------------------------------------------------------

    def add_run(self, name: str, summary: dict[str, Any], run: str) -> dict[str, Any]:
        """Store the timeline of an uploaded training run, and return its summary with its new id."""
        number, now_s = uuid.uuid4().hex, time.time()
        with self._transaction() as db:
            db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?)", (number, name, json.dumps(summary), run, now_s))
        return {"id": number, "name": name, "created_s": now_s, **summary}

    def runs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return a list of summaries of the newest uploaded training runs, the newest first."""
        rows = self._rows("SELECT id, name, created_s, summary FROM runs ORDER BY created_s DESC LIMIT ?", limit)
        kept = ("id", "name", "created_s")
        return [{k: row[k] for k in kept} | json.loads(row["summary"]) for row in rows]

    def run(self, run: str) -> str | None:
        row = self._row("SELECT run FROM runs WHERE id = ?", run)
        return None if row is None else str(row[0])

    def put_machine(self, name: str, machine: str, replace: bool = True) -> bool:
        """Store an uploaded machine in the database. Return False, and store nothing, if another machine
        has the name and ``replace`` is false.
        """
        clash = "REPLACE" if replace else "IGNORE"
        with self._transaction() as db:
            kept = db.execute(f"INSERT OR {clash} INTO machines VALUES (?, ?, ?)", (name, machine, time.time()))
        return kept.rowcount == 1 or self.machine(name) == machine

    def machine(self, name: str) -> str | None:
        """Return the stored JSON text of an uploaded machine, or None if no machine of this name is stored."""
        row = self._row("SELECT machine FROM machines WHERE name = ?", name)
        return None if row is None else str(row[0])

    def machines(self) -> dict[str, str]:
        """Return a dict from machine name to the stored JSON text, for all uploaded machines."""
        rows = self._rows("SELECT name, machine FROM machines ORDER BY name")
        return {row["name"]: row["machine"] for row in rows}

    def expire(self, keep_s: float, run_keep_s: float, kept_rows: int, kept_machines: int = 200) -> None:
        """Delete old rows from the database: finished background jobs, training runs and machines. Jobs that wait or
        run are kept.

        A row is deleted if it is too old, or if there are too many newer rows of its kind.

        Args:
            keep_s: Age in seconds at which finished jobs are deleted.
            run_keep_s: Age in seconds at which training runs and machines are deleted.
            kept_rows: A finished job is deleted if at least this many newer jobs exist, and a training run if at
                least this many newer runs exist.
            kept_machines: A machine is deleted if at least this many newer machines exist.
        """
        now_s = time.time()
        with self._transaction() as db:
            db.execute(
                "DELETE FROM jobs WHERE finished_s < ? OR (finished_s IS NOT NULL AND id NOT IN "
                "(SELECT id FROM jobs ORDER BY number DESC LIMIT ?))",
                (now_s - keep_s, kept_rows),
            )
            for table, key, most in (("runs", "id", kept_rows), ("machines", "name", kept_machines)):
                db.execute(
                    f"DELETE FROM {table} WHERE created_s < ? OR {key} NOT IN "
                    f"(SELECT {key} FROM {table} ORDER BY created_s DESC LIMIT ?)",
                    (now_s - run_keep_s, most),
                )
