"""Tests of how the runtime learns the number of ranks of a training job and the number of its own rank, whoever starts
the job: torchrun, MPI, Slurm, or a script that gives both numbers to ``torch.distributed.init_process_group``.
"""

import re
from pathlib import Path

import ebbtide.runtime
import pytest
import torch.distributed
from ebbtide.runtime.execution.stored import open_store
from ebbtide.runtime.hardware import launcher
from ebbtide.simulator import Plan

from studies.bench.byte_gpt import ds_config

TOP = Path(ebbtide.runtime.__file__).parents[1]
NAMES = "|".join(sorted(launcher.VARIABLES))
READS = re.compile(rf"(environ(\.get\(|\[)|getenv\()\s*\"({NAMES})\"")


def by_group(patch, rank, ranks):
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_rank", lambda *_, **__: rank)
    patch.setattr(torch.distributed, "get_world_size", lambda *_, **__: ranks)


def by_torchrun(patch, rank, ranks):
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(ranks))


def by_mpi(patch, rank, ranks):
    patch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    patch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))


def by_srun(patch, rank, ranks):
    patch.setenv("SLURM_PROCID", str(rank))
    patch.setenv("SLURM_STEP_NUM_TASKS", str(ranks))


@pytest.fixture
def alone(monkeypatch):
    """Remove all traces of a job from this process. Return the patch, which tests use to add others."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NODEID", *launcher.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_that_nobody_started_is_the_only_rank(alone):
    assert (launcher.rank(), launcher.world_size()) == (0, 1)


@pytest.mark.parametrize("started", [by_group, by_torchrun, by_mpi, by_srun])
def test_every_way_to_start_ranks_gives_the_same_answers(alone, tmp_path, started):
    # Two ranks with one number would share their files.
    import deepspeed

    started(alone, 3, 4)
    assert (launcher.rank(), launcher.world_size(), launcher.one_node()) == (3, 4, False)
    seen = []

    def initialize(*args, config, **kwargs):
        seen.append(config["zero_optimization"].get("reduce_bucket_size"))
        raise InterruptedError

    alone.setattr(deepspeed, "initialize", initialize)
    config = ds_config(2, 1000)
    config["zero_optimization"].pop("reduce_bucket_size", None)
    with pytest.raises(InterruptedError):
        ebbtide.runtime.initialize(config=config, plan="auto")
    assert seen == [None], "on four ranks DeepSpeed's own size must stay"
    plan = Plan(subgroup_size=1024, placement=Plan.runs(["stored"]), storage_dir=str(tmp_path))
    store = open_store(plan, {0: 1024}, 3)
    store.close()
    assert store.rank == 3


def test_a_process_group_is_believed_before_the_environment(alone):
    by_torchrun(alone, 0, 1)
    by_group(alone, 1, 2)
    assert (launcher.rank(), launcher.world_size()) == (1, 2)


@pytest.mark.parametrize("started", launcher.LAUNCHERS, ids=lambda started: f"{started.rank} {started.local_size}")
def test_each_launcher_tells_a_rank_its_place(alone, started):
    places = (5, 8, 1, 4)
    for name, value in zip(started, places, strict=True):
        alone.setenv(name, str(value))
    assert (launcher.rank(), launcher.world_size(), launcher.local_rank(), launcher.local_ranks()) == places


@pytest.mark.parametrize(("node", "tasks"), [(0, 2), (2, 2), (3, 1), (4, 5)])
def test_slurm_tells_the_tasks_of_each_node(alone, node, tasks):
    alone.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1,5")
    alone.setenv("SLURM_NODEID", str(node))
    assert launcher.local_ranks() == tasks


def test_a_batch_script_of_slurm_is_no_rank_of_the_tasks_it_may_start(alone):
    for name, value in {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_PROCID": "0"}.items():
        alone.setenv(name, value)
    assert (launcher.rank(), launcher.world_size(), launcher.local_ranks()) == (0, 1, 1)


def test_no_other_module_reads_the_ranks_from_the_environment():
    files = [path for folder in ("runtime", "profiler", "tuner") for path in (TOP / folder).rglob("*.py")]
    found = [path.name for path in files if READS.search(path.read_text(encoding="utf-8"))]
    assert found == [Path(launcher.__file__).name]
