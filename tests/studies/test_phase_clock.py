import threading
import time

import pytest
import torch

from studies.bench import phase_clock
from studies.bench.phase_clock import PHASES, PhaseClock, TrainingThreads, medians, timed_step


class _Engine:
    """A stand-in for a training engine that moves a fake clock forward by a known time in each phase: forward,
    backward and step.
    """

    def __init__(self, now):
        self.now = now
        self.calls = []

    def _take(self, name, seconds):
        self.calls.append(name)
        self.now[0] += seconds

    def __call__(self, inputs, targets):
        self._take("forward", 1.0)
        return torch.tensor(2.5, requires_grad=True)

    def backward(self, loss):
        self._take("backward", 2.0)

    def step(self):
        self._take("step", 4.0)


def test_phases_are_told_apart_and_the_gap_between_steps_is_not_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phase_clock.time, "perf_counter", lambda: now[0])
    engine, clock = _Engine(now), PhaseClock(cuda=False)
    for _ in range(3):
        loss = timed_step(engine, (None, None), clock)
        now[0] += 100.0  # time for data and prints
    assert not loss.requires_grad
    assert engine.calls == ["forward", "backward", "step"] * 3
    row = {"forward": 1.0, "backward": 2.0, "step": 4.0, "iteration": 7.0}
    assert clock.iterations() == [row] * 3


def test_medians_leave_the_warm_up_out():
    rows = [{"iteration": s} for s in (50.0, 1.0, 3.0, 2.0)]
    assert medians(rows, warmup=1) == {"iteration": 2.0}
    with pytest.raises(ValueError, match="has 4 steps, of which the first 4 are left out"):
        medians(rows, warmup=4)


class _Elsewhere:
    """A training engine whose backward runs on another thread, as autograd's does on a GPU."""

    def __init__(self):
        self._orders, self.ended = threading.Semaphore(0), threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        while True:
            self._orders.acquire()
            self._busy()
            self.loss.backward()
            self.ended.set()

    def _busy(self):
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:
            pass

    def __call__(self):
        return torch.ones((), requires_grad=True) * 2

    def backward(self, loss):
        self.loss = loss
        self.ended.clear()
        self._orders.release()
        assert self.ended.wait(60.0)

    def step(self):
        self._busy()


def test_the_cpu_time_of_autograds_thread_is_told_from_that_of_the_main_thread():
    engine, clock = _Elsewhere(), PhaseClock(cuda=False, threads=TrainingThreads())
    for _ in range(3):
        timed_step(engine, (), clock)
    first, second, third = clock.threads()
    assert [*first] == list(PHASES)
    assert first["forward"]["autograd_s"] is None  # not known before the first backward
    for row in (second, third):
        assert row["backward"]["autograd_s"] >= 0.02
        assert row["backward"]["main_s"] < 0.02 <= row["step"]["main_s"]
        assert row["step"]["autograd_s"] < 0.02
        assert row["backward"]["autograd_core"] is not None
        assert row["backward"]["alloc_retries"] is None or torch.cuda.is_available()
