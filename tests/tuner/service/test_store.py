"""Tests of the service's job database: claiming jobs, recovery after a crash, and expiry."""

import sqlite3
import sys
import threading

import pytest
from ebbtide.tuner.service.store import Store, StoreError


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "s.db")
    yield opened
    opened.close()


def test_jobs_are_claimed_in_order_and_counted(store):
    ids = [store.add_job("plan", "{}")["id"] for _ in range(3)]
    assert [store.claim()["id"] for _ in range(3)] == ids
    assert store.claim() is None
    assert store.job(ids[0])["attempts"] == 1


def test_a_result_and_a_cancellation_cannot_both_end_a_job(store):
    job = store.add_job("plan", "{}")["id"]
    store.claim()
    assert store.finish(job, "cancelled", "cancelled")
    assert not store.finish(job, "done", "done", b"{}")
    assert store.job(job)["state"] == "cancelled"
    assert store.result(job) is None


def test_what_ran_when_the_server_ended_runs_again_and_is_counted(tmp_path):
    first = Store(tmp_path / "s.db")
    job = first.add_job("plan", "{}")["id"]
    first.claim()
    first.close()
    second = Store(tmp_path / "s.db")
    assert second.recover(most_attempts=2) == 1
    state = second.job(job)
    assert state["state"] == "queued"
    assert "attempt 1" in state["note"]
    assert state["history"][0]["outcome"] == "the server ended"
    second.claim()
    assert second.recover(most_attempts=2) == 1
    assert second.job(job)["state"] == "failed"
    assert second.job(job)["attempts"] == 2
    second.close()


@pytest.mark.parametrize("ended", [True, False])
def test_what_could_not_be_committed_is_not_in_the_way_of_what_comes(store, ended):
    class Full:
        """A stand-in for a connection to the service's job database. Its first commit fails because the disk is
        full. If ``ended`` is set, SQLite has rolled back the transaction already.
        """

        def __init__(self, db):
            self.db, self.told = db, False

        def __getattr__(self, name):
            return getattr(self.db, name)

        def execute(self, sql, *arguments):
            if sql == "COMMIT" and not self.told:
                self.told = True
                if ended:
                    self.db.execute("ROLLBACK")
                raise sqlite3.OperationalError("database or disk is full")
            return self.db.execute(sql, *arguments)

    store._writer = Full(store._writer)
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        store.add_job("plan", "{}")
    job = store.add_job("plan", "{}")["id"]
    assert store.claim()["id"] == job


def test_two_servers_cannot_share_a_database(store, tmp_path):
    with pytest.raises(StoreError, match="in use"):
        Store(tmp_path / "s.db")


def test_nobody_else_reads_a_new_database(tmp_path):
    Store(tmp_path / "service.db")
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.glob("service.db*")}
    assert {name: mode for name, mode in modes.items() if mode and "lock" not in name} == {}


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("x" * 5000)
    with pytest.raises(StoreError, match="--db must be a readable database"):
        Store(path)


def test_old_finished_jobs_expire_and_open_ones_never(store):
    done, kept = (store.add_job("plan", "{}")["id"] for _ in range(2))
    store.claim()
    store.finish(done, "done", "done", b"{}")
    store.add_run("r", {}, "{}")
    store.expire(keep_s=-1, run_keep_s=-1, kept_rows=10)
    assert store.job(done) is None
    assert store.job(kept)["state"] == "queued"
    assert store.runs() == []


def test_a_job_is_there_for_who_added_it_while_another_reads_the_list(store):
    for n in range(100):
        store.add_job("plan", "{}", f"job {n}")
    switched_s, over = sys.getswitchinterval(), threading.Event()

    def reads():
        while not over.is_set():
            store.jobs(100)

    reader = threading.Thread(target=reads)
    sys.setswitchinterval(1e-5)
    try:
        reader.start()
        claimed = [store.claim() for _ in range(100)]
        added = [store.add_job("plan", "{}", "one more") for _ in range(50)]
    finally:
        over.set()
        reader.join()
        sys.setswitchinterval(switched_s)
    assert [job["title"] for job in claimed] == [f"job {n}" for n in range(100)]
    assert {job["state"] for job in claimed} == {"running"}
    assert {job["title"] for job in added} == {"one more"}
