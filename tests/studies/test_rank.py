import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ebbtide.runtime.hardware import launcher
from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from ebbtide.tuner.doctor import memory

from studies.bench.rank import become_only_rank, remove_left_buffers
from studies.trials.phase_process import PhaseProcess, report

_BUFFERS = Path("/dev/shm")


def run(for_ever):
    import deepspeed

    become_only_rank()
    deepspeed.init_distributed()
    report(1, 1, os.environ["MASTER_PORT"])
    if for_ever:
        time.sleep(600)
    deepspeed.comm.destroy_process_group()


def left(port):
    return list(_BUFFERS.glob(f"deepspeed_*_{port}_*"))


@pytest.mark.parametrize("kill", [False, True])
def test_a_run_leaves_no_shared_memory(kill, deepspeed_ops, tmp_path, monkeypatch):
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "1")  # all ranks run here, so the buffers are made immediately
    with PhaseProcess(run, {"for_ever": kill}, tmp_path / "log") as child:
        port = next(child.progress()).note
        if kill:
            assert left(port)  # there are buffers to remove
            child.kill()
        else:
            child.finish()
            assert not left(port)  # the run has removed its buffers
    assert not left(port)


def test_only_the_job_s_own_buffers_are_removed():
    port, other = free_port(), free_port()
    mine, theirs = (_BUFFERS / f"deepspeed_allreduce_buffer_0_test_{p}_0" for p in (port, other))
    mine.touch()
    theirs.touch()
    try:
        remove_shared_buffers(port)
        assert theirs.exists()
        assert not mine.exists()
    finally:
        theirs.unlink()


def test_what_no_process_has_mapped_is_left_and_what_one_has_is_not(monkeypatch, tmp_path):
    port = free_port()
    names = [f"deepspeed_allreduce_buffer_0_left_{port}_{rank}" for rank in range(3)]
    monkeypatch.setattr(launcher, "SHARED", tmp_path)
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    with (tmp_path / names[1]).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert launcher.left_shared_buffers() == []  # a new buffer may be about to be mapped
        monkeypatch.setattr(launcher, "_YOUNG_S", -1.0)
        assert [path.name for path in launcher.left_shared_buffers()] == [names[0], names[2]]
        found = memory.shared_memory()[0]
        assert (found.state, names[0] in found.fix, "2 buffers" in found.detail) == ("slow", True, True)
        remove_left_buffers()
    assert [path.name for path in tmp_path.iterdir()] == [names[1]]


def test_a_launcher_s_rank_is_kept(child_environment):
    script = (
        "import os; from studies.bench.rank import become_only_rank; become_only_rank();"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**child_environment, "RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "2"]
