"""Tests of what the profiler reports about links, clocks, NUMA nodes, the limit on locked memory, and other processes.
The tests make up the system files that the profiler reads.
"""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from ebbtide.profiler import hardware, machine, neighbours, nvml
from ebbtide.profiler.rates.adam import AdamBuffers


class FakeNvml(types.ModuleType):
    """A fake of NVIDIA's management library (NVML) for one GPU. Its attributes set what the library reports."""

    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 0, 1
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonSwPowerCap = 4

    def __init__(self):
        super().__init__("pynvml")
        self.width, self.generations, self.reasons = 16, [1, 5], 0
        self.busy, self.link_kb, self.replays, self.asked = 0, 0, [7, 7], ""

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        return "gpu"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=self.busy)

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        return self.link_kb

    def nvmlDeviceGetPcieReplayCounter(self, handle):
        return self.replays.pop(0)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return self.generations.pop(0) if len(self.generations) > 1 else self.generations[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self.width

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons


@pytest.fixture
def fake(monkeypatch):
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    properties = types.SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return module


def watched():
    with nvml.GpuWatch(0) as watch:
        pass
    return watch


def test_a_sound_gpu_is_not_warned_about(fake):
    found = watched()
    assert found.warnings == []
    assert fake.asked == b"GPU-1234-abcd", "the UUID is used, because torch and NVML may number devices differently"
    assert found.facts["pcie"] == "generation 5 of 5, 16 lanes of 16"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"width": 8}, "runs with 8 lanes of 16"),
        ({"generations": [1, 3]}, "generation 3 of 5 even under load"),
        ({"reasons": 8 | 4}, "clocks were throttled: HwSlowdown, SwPowerCap"),
        ({"busy": 40}, "busy for 40% of the time before anything is measured"),
        ({"link_kb": 2_000_000}, "4.00 GB/s cross the PCIe link before anything is copied"),
        ({"replays": [7, 19]}, "retransmitted 12 packets"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said(fake, state, message):
    for name, value in state.items():
        setattr(fake, name, value)
    warnings = watched().warnings
    assert len(warnings) == 1
    assert message in warnings[0]


def test_clocks_that_are_throttled_only_meanwhile_are_noticed(fake):
    with nvml.GpuWatch(0) as watch:
        fake.reasons = 32
        watch._sample()
        fake.reasons = 0
    assert watch.warnings == ["the GPU's clocks were throttled: SwThermalSlowdown"]


def test_an_nvml_that_refuses_is_a_warning(fake):
    fake.nvmlInit = lambda: 1 / 0
    found = watched()
    assert found.warnings == ["NVML does not report the PCIe link's width and the GPU's clocks: division by zero"]
    assert found.facts == {}


def numa_tree(root, gpu_node="1"):
    for node, cores in ((0, "0-63"), (1, "64-127")):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    gpu = root / "sys/bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(gpu_node + "\n")
    return root


@pytest.mark.parametrize(
    ("cores", "gpu_node", "warned"), [({64, 65}, "1", False), ({0, 64}, "1", True), ({0, 64}, "-1", False)]
)
def test_a_process_away_from_its_gpu_is_warned(tmp_path, monkeypatch, cores, gpu_node, warned):
    monkeypatch.setattr(hardware, "allowed_cores", lambda: cores)
    facts, warnings = hardware.numa_layout("0000:3b:00.0", numa_tree(tmp_path, gpu_node))
    assert facts["numa_node1_cores"] == "64-127"
    assert ["outside the GPU's NUMA node 1" in line for line in warnings] == [True] * warned


@pytest.mark.parametrize("gpu_node", ["0", "2"])
def test_the_memory_of_a_superchips_gpu_is_no_numa_node(tmp_path, monkeypatch, gpu_node):
    numa_tree(tmp_path, gpu_node)
    for node in range(2, 10):  # HBM, and the empty nodes of its possible partitions
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir()
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text("\n")
    monkeypatch.setattr(hardware, "allowed_cores", lambda: {0, 1})
    facts, warnings = hardware.numa_layout("0000:3b:00.0", tmp_path)
    assert [name for name in facts if name.endswith("_cores")] == ["numa_node0_cores", "numa_node1_cores"]
    assert not warnings


def test_a_low_memlock_limit_is_a_fact_and_no_warning(monkeypatch):
    # A low limit does no harm, because the GPU driver does not charge page-locked memory to this limit.
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda which: (2**16, 2**16))
    found = hardware.look(cuda=False)
    assert found.facts["memlock_bytes"] == "65536"
    assert not [line for line in found.warnings if "lock" in line]


@pytest.mark.parametrize(("cuda", "threads"), [(True, 6), (False, 8)])
def test_beside_a_gpu_updates_leave_a_core_to_the_training_thread(monkeypatch, tmp_path, cuda, threads):
    gpu = SimpleNamespace(name="H200", total_memory=1)
    for name, value in (("current_device", 0), ("device_count", 1), ("get_device_properties", gpu)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(hardware, "usable", lambda: SimpleNamespace(cores=8, memory_bytes=2**30))
    monkeypatch.setattr(hardware, "address_of", lambda _: None)
    monkeypatch.setattr(hardware, "threads_of_updates", lambda cores: cores - 2)
    facts = hardware.look(cuda)
    assert (facts.update_threads, facts.fields["cpu_cores"]) == (threads, 8)

    used = []
    wanted = machine._Wanted(facts, False, None, 0.1, 1000, 1, machine._silent)
    monkeypatch.setattr(AdamBuffers, "host_update", lambda self, threads, source=None: used.append(threads))
    machine._host_rates(wanted, lambda: None)
    machine._contention(wanted, tmp_path)
    assert max(used) == threads
    assert set(used) <= {1, threads // 2, threads}


def host_tree(root, busy, stolen=0, throttled=0, hot=0):
    ticks = neighbours._TICKS_PER_S
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {busy * ticks} 0 0 0 0 0 0 {stolen * ticks} 0 0\ncpu0 0\ncpu1 0\nintr 5\n")
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/cpu.stat").write_text(f"usage_usec 1\nnr_throttled {throttled}\n")
    core = root / "sys/devices/system/cpu/cpu0/thermal_throttle"
    core.mkdir(parents=True, exist_ok=True)
    (core / "core_throttle_count").write_text(f"{hot}\n")


@pytest.mark.parametrize(
    ("after", "messages"),
    [
        ({"busy": 101}, []),
        ({"busy": 110}, ["other processes used 45% of the cores"]),
        ({"busy": 101, "stolen": 4}, ["the hypervisor took 20%"]),
        ({"busy": 101, "throttled": 2}, ["CPU quota (cpu.max) throttled this process"]),
        ({"busy": 101, "hot": 3}, ["a core's clock was throttled"]),
    ],
)
def test_neighbours_of_the_host_are_noticed(tmp_path, monkeypatch, after, messages):
    clock, own = iter([0.0, 10.0]), iter([5.0, 6.0])
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: next(clock))
    times = lambda: types.SimpleNamespace(user=next(own), system=0, children_user=0, children_system=0)
    monkeypatch.setattr(neighbours.os, "times", times)
    host_tree(tmp_path, busy=100)
    with neighbours.HostWatch(tmp_path) as watch:
        host_tree(tmp_path, **after)
    assert len(watch.warnings) == len(messages)
    for line, message in zip(watch.warnings, messages, strict=True):
        assert message in line
