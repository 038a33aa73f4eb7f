"""Tests of which CPU cores host updates run on: near the GPU, divided among the ranks, and with one core
left to the training thread.
"""

import os
import threading
from types import SimpleNamespace

import pytest
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.execution.allocated import threads_of
from ebbtide.runtime.hardware import cores
from ebbtide.runtime.hardware.launcher import VARIABLES, local_ranks
from ebbtide.simulator import Plan

from tests.prepared import run

GPU = "0000:3b:00.0"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Simulate a machine with 16 cores on two NUMA nodes and a GPU on the second one."""
    device = tmp_path / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for number, listed in enumerate(("0-7", "8-11,12-15")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for name in ("TORCHELASTIC_RUN_ID", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_one_rank_takes_its_gpus_node_less_one_core(node):
    assert cores.update_cores(GPU, node) == list(range(9, 16))
    assert cores.spared_cores(GPU, node) == [8]


def test_updates_and_the_training_thread_share_no_core(node, monkeypatch):
    for core in range(16):
        folder = node / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core // 2 * 2}-{core // 2 * 2 + 1}\n")
    for ranks in (1, 2, 4, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        spared, updated = set(), set()
        for rank in range(ranks):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            spared |= set(cores.spared_cores(GPU, node))
            updated |= set(cores.update_cores(GPU, node))
        assert not spared & updated
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9})
    assert cores.spared_cores(GPU, node) == []


@pytest.mark.parametrize(("rank", "expected"), [(0, [9, 10, 11]), (1, [13, 14, 15]), (2, [9, 10, 11])])
def test_ranks_on_a_node_divide_it(node, monkeypatch, rank, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert cores.update_cores(GPU, node) == expected


def test_ranks_of_a_node_are_told_by_every_launcher(node, monkeypatch):
    assert local_ranks() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "8")
    assert local_ranks() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # Accelerate sets it under any launcher
    assert local_ranks() == 2
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert local_ranks() == 4
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert local_ranks() == 2


OTHER = "0000:af:00.0"


@pytest.mark.parametrize(
    ("rank", "address", "expected"), [(0, GPU, [9]), (1, GPU, [11]), (2, GPU, [13]), (3, OTHER, list(range(1, 8)))]
)
def test_ranks_are_counted_where_their_gpus_are(node, monkeypatch, rank, address, expected):
    folder = node / "bus/pci/devices" / OTHER
    folder.mkdir()
    (folder / "numa_node").write_text("0\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert cores.update_cores(address, node, [GPU, GPU, GPU, OTHER]) == expected


def test_a_gpu_of_no_node_may_use_all_cores(node):
    (node / "bus/pci/devices" / GPU / "numa_node").write_text("-1\n")
    assert cores.update_cores(GPU, node) == list(range(1, 16))


def test_the_deepspeed_launchers_variable_counts_too(node, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cores.update_cores(GPU, node) == [13, 14, 15]


def test_what_a_launcher_has_bound_is_not_divided_again(node, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9, 10})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores.update_cores(GPU, node) == [9, 10]


SET = {8, 9, 10, 11, 12, 13, 14, 15}  # the cores of a container, the same for all ranks


@pytest.mark.parametrize(("rank", "expected"), [(0, [9]), (1, [11]), (2, [13]), (3, [15])])
def test_a_containers_cores_are_divided(node, monkeypatch, rank, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: SET)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert cores.update_cores(GPU, node, masks=[SET] * 4) == expected


def test_masks_that_differ_are_a_launchers(node, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9, 10})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores.update_cores(GPU, node, masks=[{8, 9, 10}, {11, 12, 13}]) == [9, 10]


@pytest.mark.parametrize(("rank", "expected"), [(0, [9, 10, 11]), (1, [13, 14, 15])])
def test_ranks_that_a_launcher_has_bound_alike_divide_what_they_have(node, monkeypatch, rank, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: SET)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    other = set(range(8))
    assert cores.update_cores(GPU, node, masks=[SET, SET, other, other]) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("bound", [False, True])
def test_no_core_has_two_ranks_and_each_rank_spares_one(node, monkeypatch, ranks, bound):
    for core in range(16):
        folder = node / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        first = core // 8 * 8 + core % 4
        (folder / "thread_siblings_list").write_text(f"{first},{first + 4}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if bound:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: SET)
    mask, seen = SET if bound else set(range(16)), []
    for rank in range(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        seen.append(cores.update_cores(GPU, node, [GPU] * ranks, [mask] * ranks))
    physical = [{(core // 8, core % 4) for core in own} for own in seen]
    assert all(not a & b for i, a in enumerate(physical) for b in physical[:i])
    if ranks <= 2:  # otherwise there is one physical core for each rank
        assert sum(len(own) for own in physical) == 4 - ranks


def test_a_cpu_quota_limits_the_threads(node, monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: 8.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores.update_cores(GPU, node, [GPU, OTHER]) == [9, 10, 11]


@pytest.mark.parametrize(("quota", "threads"), [(None, 14), (16.0, 15)])
def test_as_many_threads_are_measured_as_update(node, monkeypatch, quota, threads):
    for core in range(16):
        folder = node / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.threads_of_updates(16, node) == threads
    assert cores.threads_of_updates(1, node) == 1


def test_an_unknown_node_means_all_cores(node):
    assert cores.update_cores("0000:00:00.0", node) == list(range(1, 16))


def test_a_single_core_is_not_taken_away(node, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert cores.update_cores(GPU, node) == [3]


def test_the_kernels_notation():
    assert cores.parse_cpulist("0-2,7,9-9\n") == [0, 1, 2, 7, 9]
    assert cores.parse_cpulist("\n") == []


def test_a_lane_is_bound_and_the_training_thread_is_not():
    before = os.sched_getaffinity(0)
    core = max(before)
    lane = LaneQueue("bound", begin=lambda: cores.bind([core]))
    seen, done = [], Completion()
    lane.submit(lambda: seen.append((os.sched_getaffinity(0), threading.get_ident())), [], done)
    done.wait_host()
    lane.close()
    assert seen[0][0] == {core}
    assert seen[0][1] != threading.get_ident()
    assert os.sched_getaffinity(0) == before


OWN_THREADS = """
import os
from ebbtide.profiler.rates.adam import AdamBuffers
buffers = AdamBuffers(1 << 20)
buffers.host_update(1)
before = len(os.listdir("/proc/self/task"))
buffers.host_update(4)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_the_update_has_its_threads_under_torchrun():
    # A host update has four threads under torchrun, although torchrun sets OMP_NUM_THREADS=1.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    told = run(["-c", OWN_THREADS], env=environment, timeout=400)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split()[-1] == "3"


def test_the_threads_of_a_rank_are_its_cores(node, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    device = SimpleNamespace(cores=[], unified=False)
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"]), staging_slots=0)
    assert threads_of(plan, device) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert threads_of(plan, device) == 4
    assert threads_of(plan, SimpleNamespace(cores=[1, 2, 3], unified=False)) == 3
