"""Tests of the profiler's measurement by several ranks at the same time, with one process per rank.

For copies, DRAM, host Adam and storage, the measurement gives the speed of each rank while all ranks run,
as a fraction of the speed of one rank that runs alone. `test_launch.py` measures two ranks from the command line.
"""

import itertools
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager

import pytest
from ebbtide.profiler.rates import ranks
from ebbtide.profiler.rates.ranks import STAGES, RankMeasurement, StageSamples, check_ranks
from ebbtide.profiler.rates.sampling import timed_s


def test_a_rank_that_fails_is_an_error_not_a_hang():
    job = RankMeasurement(2, 2, False, 20_000, "/nowhere/at/all", 0.01)
    with pytest.raises(RuntimeError, match=r"rank \d could not measure: FileNotFoundError"):
        ranks._run(job)


def test_a_rank_that_fails_beside_the_others_ends_them(monkeypatch):
    job = RankMeasurement(2, 2, False, 1, "", 0.0)

    @contextmanager
    def stage(name, job, rank):
        calls = itertools.count()

        def work(threads):
            if next(calls) and rank:  # at the same time as the other rank, which has enough samples
                while not enough[0]:
                    time.sleep(0.001)
                raise OSError("planted")

        yield 1.0, work, timed_s

    monkeypatch.setattr(ranks, "STAGES", ("triad",))
    monkeypatch.setattr(ranks, "_stage", stage)
    enough, barrier = multiprocessing.Array("i", 1), threading.Barrier(2)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    each = [
        threading.Thread(target=ranks._measure, args=(job, rank, barrier, enough, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for rank in each:
        rank.start()
    told = [receiver.recv() if receiver.poll(20) else "nothing" for receiver, _ in pipes]
    assert told == ["BrokenBarrierError: ", "OSError: planted"]


class DeadProcess:
    exitcode = -9

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def is_alive(self):
        return False


def test_a_rank_that_was_killed_is_an_error():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    read, write = os.pipe()
    os.close(write)  # a sentinel that is ready means that the process has ended
    with pytest.raises(RuntimeError, match="rank 0 died with code -9"):
        ranks._collect([receiver], [DeadProcess(read)])
    os.close(read)
    sender.close()


def samples(**together):
    rates = {key: [[5.0] * 5, [5.0] * 5] for key in STAGES} | together
    return {name: StageSamples([10.0] * 5, rates[name]) for name in STAGES}


def test_shares_are_rates_beside_the_others_over_the_rate_alone():
    found, notes = ranks._shares(samples(h2d=[[10.0] * 5, [9.0] * 5]), cuda=True)
    assert found["h2d"].median == pytest.approx(0.95)
    assert found["storage"].median == 0.5
    assert found["h2d"].source == "measured"
    assert "19 bytes/s in total, 9 to 10 each. One rank alone: 10" in found["h2d"].detail
    assert notes == []


def test_dram_is_what_the_greedier_of_triad_and_update_moves():
    found, _ = ranks._shares(samples(host_adam=[[4.0] * 5, [4.0] * 5]), cuda=True)
    assert found["dram"].median == pytest.approx(4 / 10)  # 28 bytes x 4 beside the triad's 5 bytes
    found, _ = ranks._shares(samples(host_adam=[[0.1] * 5, [0.1] * 5]), cuda=True)
    assert found["dram"].median == pytest.approx(5 / 280)


def test_uneven_and_unstable_ranks_are_told():
    _, notes = ranks._shares(samples(d2h=[[10.0] * 5, [6.0] * 5]), cuda=True)
    assert notes == [
        "d2h: rank 1 reaches 60% of rank 0 at the same time: check its link, its NUMA node, "
        "and other processes that use them"
    ]
    _, notes = ranks._shares(samples(d2h=[[10.0] * 6, [8.0, 12.0] * 3]), cuda=True)
    assert notes[0].startswith("d2h of rank 1 at the same time as the others is not stable")


def test_ranks_that_together_beat_one_with_all_cores_are_doubted():
    both = [[8.0] * 5, [8.0] * 5]
    _, notes = ranks._shares(samples(triad=both, host_adam=both), cuda=True)
    assert len(notes) == 1
    assert "together reach 160% of the DRAM rate" in notes[0]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_ranks_without_a_core_each_are_refused(count):
    with pytest.raises(ValueError, match=rf"--ranks.* at most 4 \(the number of cores\), but got {count}"):
        check_ranks(count, 4, cuda=False)


def test_each_rank_leaves_threads_to_its_training_thread():
    assert (
        RankMeasurement(4, 32, True, 1, "", 0.0, 2).own_threads,
        RankMeasurement(4, 32, True, 1, "", 0.0, 2).threads_alone,
    ) == (6, 30)
    assert (
        RankMeasurement(4, 4, True, 1, "", 0.0, 2).own_threads,
        RankMeasurement(2, 2, False, 1, "", 0.0).own_threads,
    ) == (1, 1)


def test_ranks_leave_threads_to_training_beside_gpus_alone(tmp_path, monkeypatch):
    jobs = []

    def run(job):
        jobs.append(job)
        raise InterruptedError

    monkeypatch.setattr(ranks, "check_ranks", lambda *_: None)
    monkeypatch.setattr(ranks, "threads_of_updates", lambda cores: cores - 2)
    monkeypatch.setattr(ranks, "_run", run)
    for cuda in (True, False):
        with pytest.raises(InterruptedError):
            ranks.measure_ranks(4, 32, cuda, 1, tmp_path, 0.1)
    assert [(job.own_threads, job.threads_alone) for job in jobs] == [(6, 30), (8, 32)]
