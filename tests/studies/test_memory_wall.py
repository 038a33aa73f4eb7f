"""Tests of `studies.memory_wall`, which repeats measurements of the paper "Breaking the Memory Wall". They check how
results are computed from made-up samples, and run the study once at a tiny size.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from studies.memory_wall import __main__ as memory_wall
from studies.memory_wall.__main__ import LinkCounters, LinkSample, MemoryInUse, Passage, Sampler, claims, phase_row

PASSAGES = [
    Passage("forward", 0.0, 1.0, 0.5, 400),
    Passage("backward", 1.0, 3.0, 1.0, 900),
    Passage("step", 3.0, 7.0, 8.0, 200),
]
MEMORY = [MemoryInUse(0.5, 10, 300), MemoryInUse(2.0, 20, 800), MemoryInUse(4.0, 30, 100), MemoryInUse(8.0, 99, 1)]
LINKS = [LinkSample(2.0, 1e9, 4e9, 0.9), LinkSample(4.0, 2e9, 1e9, 0.1), LinkSample(6.0, 4e9, 3e9, 0.3)]


def rows(links=LINKS):
    return {p: phase_row(p, PASSAGES, MEMORY, links) for p in memory_wall.PHASES}


def test_samples_belong_to_the_phase_they_were_taken_in():
    step = rows()["step"]
    assert step == {
        "seconds": 4.0,
        "cpu_cores_busy": 2.0,
        "host_peak_bytes": 30,
        "device_peak_bytes": 200,
        "device_trough_bytes": 100,
        "gpu_utilisation": pytest.approx(0.2),
        "to_device_bytes_per_s": 3e9,
        "from_device_bytes_per_s": 2e9,
    }
    assert rows()["forward"]["to_device_bytes_per_s"] is None, "no sample was taken during forward"
    with pytest.raises(ValueError, match="must contain the phase 'step'"):
        phase_row("step", PASSAGES[:2], MEMORY, LINKS)


def test_claims_are_answered_from_the_rows():
    varies, link, utilisation, update = (c["measured"] for c in claims(rows(), 10e9))
    assert varies == pytest.approx(100 / 900)
    assert link == {"forward": None, "backward": 0.4, "step": pytest.approx(0.3)}
    assert utilisation["backward"] == pytest.approx(0.9)
    assert update == pytest.approx(4 / 7)


def test_without_a_gpu_nothing_is_claimed_about_one():
    passages = [Passage(p.phase, p.begun_s, p.ended_s, p.cpu_s, None) for p in PASSAGES]
    memory = [MemoryInUse(s.t_s, s.host_bytes, None) for s in MEMORY]
    found = {p: phase_row(p, passages, memory, []) for p in memory_wall.PHASES}
    varies, link, utilisation, _ = (c["measured"] for c in claims(found, None))
    assert varies is None
    assert set(link.values()) == set(utilisation.values()) == {None}


def test_what_a_sampler_meets_is_raised_where_it_is_used():
    def fail():
        raise RuntimeError("the counter is gone")

    with pytest.raises(RuntimeError, match="the counter is gone"), Sampler(fail, 0.0):
        pass
    with Sampler(lambda: 7, 0.0) as sampler:
        pass
    assert sampler.found[0] == 7


class FakeNvml(SimpleNamespace):
    """A stand-in for NVIDIA's management library (NVML), which the test machine may not have."""

    class NVMLError(Exception):
        pass

    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = "rx", "tx"
    generation, forbidden = 5, False

    def nvmlInit(self):
        if self.forbidden:
            raise self.NVMLError("Insufficient Permissions")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu):
        return self.generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu):
        return 16

    def nvmlDeviceGetPcieThroughput(self, gpu, counter):
        return {"rx": 3_000_000, "tx": 1_000_000}[counter]

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=25)


def test_counters_are_turned_into_bytes_and_directions(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(memory_wall, "handle_of", lambda nvml, index: "gpu 0")
    counters = LinkCounters(0)
    sample = counters.read()
    assert (sample.to_device_bytes_per_s, sample.from_device_bytes_per_s) == (3e9, 1e9)
    assert sample.gpu_utilisation == 0.25
    assert counters.capacity_bytes_per_s == pytest.approx(63e9, rel=0.01)
    nvml.generation = 99
    assert LinkCounters(0).capacity_bytes_per_s is None
    nvml.forbidden = True
    with pytest.raises(RuntimeError, match=r"NVML.*Insufficient Permissions"):
        LinkCounters(0)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what a machine without a GPU says")
def test_a_real_run_marks_what_is_no_device(tmp_path, only_rank):
    path = tmp_path / "memory_wall.json"
    memory_wall.main(["--json", str(path), "--quick", "--steps", "2", "--sequence", "32", "--subgroup", "20000"])
    record = json.loads(path.read_text())
    assert record["device_kind"] == "cpu"
    assert "no GPU" in record["memory_source"]
    assert record["links"] == []
    assert [p["phase"] for p in record["passages"]] == ["forward", "backward", "step"] * 2
    assert all(row["host_peak_bytes"] is None or row["host_peak_bytes"] > 0 for row in record["phases"].values())
    assert all(row["device_peak_bytes"] is None for row in record["phases"].values())


def test_bad_input_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        memory_wall.main(["--json", str(tmp_path / "x.json"), "--steps", "0"])
    assert ended.value.code == 2
    assert "--steps must be >= 1, but got 0" in capsys.readouterr().err
