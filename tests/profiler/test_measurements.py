"""Tests of the profiler's measurements at a tiny size. They check the form of a result, its ``source``
(measured or emulated) and the removal of temporary files, but never a measured speed.
"""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from ebbtide.profiler import machine, measure_machine
from ebbtide.profiler.machine import STAGES
from ebbtide.profiler.rates import adam, contention, copies, sampling, storage
from ebbtide.profiler.rates.sampling import doubts, rate, repeat_s
from ebbtide.runtime.storage import store
from ebbtide.simulator import Machine
from ebbtide.simulator.quantity import Quantity

from tests.machines import machine as made_machine

TINY = 20_000


def test_repeats_are_at_least_five_and_leave_out_the_warm_up():
    calls = []
    durations = repeat_s(lambda: calls.append(1), budget_s=0.0)
    assert len(durations) == 5
    assert len(calls) == 6


def test_what_is_very_slow_is_repeated_less_and_doubted(monkeypatch):
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: next(now))
    durations = repeat_s(lambda: None, 0.1, lambda work: 2.0)
    assert durations == [2.0, 2.0]
    assert doubts("x", durations) == [
        "x was measured only 2 times (at least 5 are needed to call it stable): one measurement takes "
        "too long for the given time (--seconds)"
    ]


def test_a_figure_is_called_stable_only_if_repeats_agree():
    assert Quantity.from_samples([1.0, 1.05, 0.95, 1.0, 1.0]).stable
    assert not Quantity.from_samples([1.0, 2.0, 1.0, 2.0, 1.5]).stable
    assert not Quantity.exact(1.0).stable, "a single value was not repeated"
    doubled = Quantity.from_samples([1.0, 2.0, 3.0]).scaled(2.0, "twice")
    assert (doubled.q1, doubled.median, doubled.q3, doubled.n) == (3.0, 4.0, 5.0, 3)


def test_a_slow_disk_is_given_a_small_file(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "timed_s", lambda work: 0.1)  # 40 MiB/s
    path = tmp_path / "probe"
    assert storage.affordable_bytes(path, 10**9, 0.05) == storage.BLOCK_BYTES
    assert storage.affordable_bytes(path, 10**9, 4.0) == 5 * storage.BLOCK_BYTES
    assert storage.affordable_bytes(path, 2 * storage.BLOCK_BYTES, 4.0) == 2 * storage.BLOCK_BYTES
    assert not path.exists()


def test_a_rate_keeps_its_spread_and_its_source():
    found = rate(10.0, [1.0, 2.0, 5.0], "emulated", "why")
    assert (found.median, found.n, found.source, found.detail) == (5.0, 3, "emulated", "why")
    assert found.q1 < found.median < found.q3


def test_unstable_and_drifting_samples_are_doubted():
    assert doubts("x", [1.0, 1.01, 0.99, 1.0, 1.02, 1.0]) == []
    unstable = doubts("x", [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0])
    assert any("x is not stable" in line for line in unstable)
    drifting = doubts("x", [1.0, 1.0, 1.0, 1.2, 1.3, 1.4, 1.5, 1.5, 1.5])
    assert any("x drifted by +50%" in line for line in drifting)


def test_latency_and_bandwidth_are_found_again():
    sizes = np.array(copies.SIZES_BYTES, float)
    latency_s, bandwidth = copies.fit_latency(sizes, 2e-5 + sizes / 25e9)
    assert latency_s == pytest.approx(2e-5, rel=1e-6)
    assert bandwidth == pytest.approx(25e9, rel=1e-6)
    with pytest.raises(ValueError, match="at least two copy sizes"):
        copies.fit_latency([1.0], [1.0])


def test_copies_without_a_gpu_say_that_they_are_emulated():
    found, _ = copies.measure_copies(cuda=False, size_bytes=1 << 20, budget_s=0.01)
    assert {found[name].source for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_factor")} == {"emulated"}
    assert found["pageable_h2d_bytes_per_s"] is None
    assert found["copy_latency_s"] >= 0
    assert 0.3 < found["duplex_factor"].median <= 1.2


def test_adam_rates(deepspeed_ops):
    by_threads, _ = adam.host_adam_by_threads(TINY, [1, 2], 0.01)
    apart = adam.host_adam_out_of_place(TINY, 2, 0.01)
    assert apart.n >= 5
    assert 0.05 < apart.median < 5
    assert sorted(by_threads) == [1, 2]
    assert {q.source for q in by_threads.values()} == {"measured"}
    assert adam.stock_host_adam(TINY, 0.01).source == "measured"
    assert adam.device_adam(TINY, 0.01, cuda=False).source == "emulated"


def test_memory_and_contention():
    triad, _ = copies.triad(TINY, 1, 0.01)
    assert "16 bytes" in triad.detail
    assert copies.host_copy(TINY, 1, 0.01).median > 0


def test_contention_is_measured_both_ways_for_what_runs_side_by_side(tmp_path):
    with storage.file_to_write(tmp_path / "written", storage.BLOCK_BYTES) as file:
        matrix = contention.measure_contention(False, TINY, 1, file, 0.05)
    assert set(matrix) == {
        "host_adam_while_copy",
        "copy_while_host_adam",
        "copy_while_compute",
        "compute_while_copy",
        "host_adam_while_storage_write",
        "storage_write_while_host_adam",
        "passes_while_storage_write",
        "storage_write_while_passes",
    }
    assert matrix["host_adam_while_storage_write"].source == "measured"
    assert matrix["copy_while_compute"].source == "emulated", "without a GPU the rate is emulated"


def test_storage_leaves_nothing_behind(tmp_path):
    found, _ = storage.measure_storage(tmp_path / "new", storage.BLOCK_BYTES, 0.01)
    assert found["storage_write_bytes_per_s"].median > 0
    assert found["storage_fsync_s"] > 0
    assert 0 < found["storage_duplex_factor"].median <= 1
    assert 0 < found["writer_s_per_byte"].median < 1e-7
    assert found["writer_s_per_byte"].source == "measured"
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(("at_once_s", "factor"), [(4.0, 0.5), (3.0, 1.0), (3.5, 2 / 3), (9.0, 1 / 7), (0.1, 1.0)])
def test_what_reads_and_writes_leave_of_each_other(at_once_s, factor):
    # The remaining writes take 2 s more. So a measured total of 4 s must give a factor of 0.5.
    assert storage.duplex_factor(at_once_s, [3.0] * 3, [1.0] * 3) == pytest.approx(factor)


def test_a_writer_gathers_what_it_writes_from_far_more_memory_than_its_buffer(tmp_path):
    # If it hashed the same buffer again and again, the data would come from a CPU cache.
    path = tmp_path / "written"
    with storage.file_to_write(path, 3 * storage.BLOCK_BYTES) as file:
        file.write()
        plain = path.read_bytes()
        file.write(2, as_checkpoints=True)
        gathered = path.read_bytes()
    assert len(set(plain)) > 1, "a plain block must have random bytes"
    assert set(gathered) == {1}, "the file must hold the ones of the gathered memory"
    assert len(gathered) == 3 * storage.BLOCK_BYTES
    assert storage.GATHERED_BYTES >= 32 * storage.BLOCK_BYTES


def test_a_drive_is_measured_as_the_store_uses_it(tmp_path):
    size = 6 * storage.BLOCK_BYTES
    found = storage.measure_drive(tmp_path / "new", size, 0.05)
    assert not list((tmp_path / "new").iterdir())
    assert found.read_bytes_per_s.source == "measured"
    assert storage.DEPTH == store.DEPTH
    assert f"{storage.DEPTH} blocks under way" in found.write_bytes_per_s.detail
    with storage.file_to_write(tmp_path / "f", size) as file:
        file.write()
        blocks, preadv = [], os.preadv
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", lambda fd, b, at: blocks.append(at) or preadv(fd, b, at))
            file.read(4)
    assert sorted(blocks) == list(range(0, size, storage.BLOCK_BYTES))


def test_what_a_drive_has_just_written_is_not_what_it_reads(tmp_path):
    # A cache could otherwise answer such a read, and the drive would seem faster than it is.
    written, read = [], []
    with storage.file_to_write(tmp_path / "f", 32 * storage.BLOCK_BYTES) as file:
        parts, pwrite, preadv = storage._Parts(file), os.pwrite, os.preadv

        def note(fd, block, at):
            written.append((at, np.frombuffer(block, np.uint8).ctypes.data))
            return pwrite(fd, block, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", note)
            patch.setattr(os, "preadv", lambda fd, b, at: read.append(at) or preadv(fd, b, at))
            for _ in range(4):
                parts.both()
    blocks = 4 * parts.size_bytes // storage.BLOCK_BYTES
    assert len(written) == len(read) == blocks
    assert len({at for at, _ in written}) == len({place for _, place in written}) == blocks
    assert not {at for at, _ in written} & set(read)


def test_storage_removes_its_file_when_the_disk_fails(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        storage.measure_storage(tmp_path, storage.BLOCK_BYTES, 0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_is_measured_once_and_remembered(tmp_path, monkeypatch, deepspeed_ops):
    from ebbtide.runtime.kernels import host

    host.load()  # from the usual cache, because only the machine file must be new
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "MOST_TIMES", 1)  # tests disturb each other's measurements
    stages = []
    first = measure_machine(seconds=0.1, elements=TINY, progress=lambda done, total, stage: stages.append(stage))
    assert stages[0] == "kernels"
    assert stages[-1] == ""
    assert first.unified_memory
    assert first.device_kind == "emulated"
    assert first.h2d_bytes_per_s.source == "emulated"
    assert first.stock_host_adam_params_per_s.source == "measured"
    assert first.device_flops_per_s.source == "emulated", "estimates of models need a compute rate"
    assert first.device_memory_bytes_per_s.median > 0
    assert stages[:-1] == list(STAGES), "progress must name each stage as it begins"
    assert "memlock_bytes" in first.facts
    assert measure_machine(seconds=0.1, elements=TINY) == first
    assert measure_machine(seconds=0.1, elements=TINY, fresh=True) != first
    assert Machine.load(next(tmp_path.glob("machine-*.json"))).fingerprint == first.fingerprint


def test_a_measurement_that_was_disturbed_is_repeated_and_the_best_one_counts(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="ebbtide")
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path))
    bad = ("other processes used 39% of the cores during the measurement, so the measured rates are too low", "a note")
    worse = (*bad, "host copies is not stable: its interquartile range is 155% of the median")
    coming = [made_machine(warnings=warnings) for warnings in (bad, worse, worse, bad, ("a note",))]
    monkeypatch.setattr(machine, "_watched", lambda wanted: coming.pop(0))

    assert measure_machine().warnings == bad
    assert not caplog.messages
    assert [measure_machine().warnings for _ in range(4)] == [bad] * 4
    again = f"measuring this machine's rates again (time {{}} of at most 3): {bad[0]}"
    assert caplog.messages == [again.format(2), again.format(3)], "a second start says why it measures again"
    assert len(coming) == 2, "three measurements, then the cache answers"
    assert measure_machine(fresh=True).warnings == bad
    assert measure_machine().warnings == ("a note",)
    assert measure_machine().warnings == ("a note",)
    assert coming == []


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="seconds must be > 0"):
        measure_machine(seconds=0)
    with pytest.raises(ValueError, match="at most 60"):
        measure_machine(seconds=61)
    with pytest.raises(ValueError, match=r"at most \d+ \(the number of cores\), but got 10000"):
        measure_machine(ranks=10_000)


def test_saving_goes_by_the_tensor():
    found = storage.measure_save(0.01)
    assert 0 < found.median < 0.1
    assert found.source == "measured"


def test_beside_a_gpu_updates_are_measured_in_the_runtimes_kind_of_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    addresses = []
    monkeypatch.setattr(adam.host, "host_update", lambda state, *_, **__: addresses.extend(map(_advised, state)))

    adam.host_adam_by_threads(2**20, [1], 0.0)

    assert addresses
    assert all(addresses)


def _advised(tensor: torch.Tensor) -> bool:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and name == "VmFlags:":
            return "hg" in line.split()
    return False
