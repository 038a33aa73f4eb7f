"""Tests of how the runtime learns the number of ranks of a training job and the number of its own rank, whoever starts
the job: torchrun, MPI, or a script that gives both numbers to ``torch.distributed.init_process_group``.
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

RUNTIME = Path(ebbtide.runtime.__file__).parent
READS = re.compile(r"(environ(\.get\(|\[)|getenv\()\s*\"(RANK|WORLD_SIZE)\"")


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


@pytest.fixture
def alone(monkeypatch):
    """Remove all traces of a job from this process. Return the patch, which tests use to add others."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name in (*launcher.RANKS, *launcher.WORLD_SIZES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_that_nobody_started_is_the_only_rank(alone):
    assert (launcher.rank(), launcher.world_size()) == (0, 1)


@pytest.mark.parametrize("started", [by_group, by_torchrun, by_mpi])
def test_every_way_to_start_ranks_gives_the_same_answers(alone, tmp_path, started):
    """Check the bucket size that ebbtide gives DeepSpeed, which could change the bits of sums over four ranks, and the
    rank that a store of optimizer state belongs to. Two ranks with one number would share their files.
    """
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


def test_no_other_module_reads_the_ranks_from_the_environment():
    """Check that no module of the runtime reads the variables of torchrun itself. They are missing in jobs that other
    launchers start.
    """
    found = [str(path) for path in RUNTIME.rglob("*.py") if READS.search(path.read_text(encoding="utf-8"))]
    assert found == []
