"""Tests that all parts of ebbtide that look up the available memory or the number of cores respect the limits of a
container.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ebbtide.profiler.hardware import look
from ebbtide.runtime.execution.allocated import threads_of
from ebbtide.runtime.execution.stored import free_host_bytes
from ebbtide.runtime.hardware import usable as module
from ebbtide.runtime.hardware.usable import cpu_quota, memory_limit, usable
from ebbtide.runtime.zero.checks.guard import ConfigError
from ebbtide.runtime.zero.host_memory import check_host_memory
from ebbtide.simulator import Plan
from ebbtide.tuner.doctor import memory as doctor

GIB, TIB = 2**30, 2**40
ROOT = Path(__file__).parents[2]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Simulate a host with 1 TiB of memory and 64 cores, and return the folder that is its root."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": TIB // 4096}
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sysconf", pages.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=TIB, total=TIB))
    return tmp_path


def contain(root, limit=32 * GIB, used=2 * GIB, quota="max"):
    """Write the control-group files by which Docker and Kubernetes limit a process's memory and cores, below
    the root of a simulated host.
    """
    write(root / "proc/self/cgroup", "0::/pod/container")
    group = root / "sys/fs/cgroup/pod/container"
    write(group / "memory.max", limit)
    write(group / "memory.current", used)
    write(group / "memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file 0")
    write(group / "cpu.max", f"{quota} 100000")


def test_without_a_container_all_is_the_machines(host):
    found = usable()
    assert (found.memory_bytes, found.free_bytes, found.cores) == (TIB, TIB, 64)
    assert (found.limit_bytes, found.quota) == (None, None)


def test_everything_that_asks_has_the_containers_memory(host):
    contain(host)
    plan = Plan(subgroup_size=10**9, subgroups=(10**9,) * 6, placement=Plan.runs(["host"] * 6), staging_slots=0)
    with pytest.raises(ConfigError, match=r"31\.00 GiB free"):  # less than the 78 GiB that the plan takes
        check_host_memory(plan, {"bf16": {"enabled": True}})
    assert free_host_bytes() < 31 * GIB
    assert look(cuda=False).host_memory_bytes == 32 * GIB
    assert doctor.host_memory(usable().free_bytes, plan, 1).state == "bad"
    assert "32.0 GiB of memory" in doctor.limits(usable()).detail


def test_everything_that_asks_has_the_containers_cores(host):
    contain(host, quota="800000")
    assert usable().cores == 8
    assert look(cuda=False).cores == 8
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"]), staging_slots=0)
    assert threads_of(plan, SimpleNamespace(cores=[], unified=False)) == 8
    assert doctor.limits(usable()).state == "slow"


ASKS = ("virtual_memory", "sched_getaffinity", "cpu_count", "SC_PHYS_PAGES")
MAY_ASK = {
    "runtime/hardware/usable.py",
    "runtime/hardware/cores.py",  # binds threads to cores
    "tuner/service/pool.py",  # counts its workers
}


def test_nobody_else_asks_the_machine():
    found = set()
    for package in ("simulator", "profiler", "tuner", "runtime"):
        for path in (ROOT / package).rglob("*.py"):
            if any(name in path.read_text() for name in ASKS):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= MAY_ASK


def test_the_tightest_limit_counts_and_cache_is_not_used(host):
    assert memory_limit() == (None, 0)
    contain(host, limit="max")
    assert memory_limit() == (None, 0)
    write(host / "sys/fs/cgroup/pod/memory.max", GIB)
    write(host / "sys/fs/cgroup/pod/memory.current", 1000)
    assert memory_limit() == (GIB, 1000)
    contain(host, limit=GIB // 2, used=GIB + 5)
    assert memory_limit() == (GIB // 2, 5)


def test_version_1_of_control_groups(host):
    write(host / "proc/self/cgroup", "5:cpu,cpuacct:/docker\n4:memory:/docker")
    group = host / "sys/fs/cgroup"
    write(group / "memory/docker/memory.limit_in_bytes", 2**20)
    write(group / "memory/docker/memory.usage_in_bytes", 10)
    write(group / "memory/memory.limit_in_bytes", 2**63 - 4096)
    write(group / "cpu/docker/cpu.cfs_quota_us", 250000)
    write(group / "cpu/docker/cpu.cfs_period_us", 100000)
    assert memory_limit() == (2**20, 10)
    assert cpu_quota() == 2.5
    assert usable().cores == 2


def test_a_gpus_memory_is_not_the_hosts(host):
    nodes = host / "sys/devices/system/node"
    for number, cores, gib in ((0, "0-63", 928), (1, "", 96)):
        write(nodes / f"node{number}/cpulist", cores)
        lines = [f"Node {number} {name}: {gib * 2**20} kB" for name in ("MemTotal", "MemFree")]
        write(nodes / f"node{number}/meminfo", "\n".join(lines))
    assert usable().memory_bytes == usable().free_bytes == 928 * GIB
    contain(host, limit=TIB)
    assert usable().memory_bytes == 928 * GIB


def test_a_limit_that_is_used_up_leaves_nothing(host):
    contain(host, used=40 * GIB)
    assert usable().free_bytes == 0
