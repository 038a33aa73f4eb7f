"""Two tiers: kills, faults and damage on the way from the fast folder to the durable one."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from ebbtide.runtime.checkpoint.deepspeed.restore import newest_of_tiers
from ebbtide.runtime.checkpoint.deepspeed.saving import _tiers
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import DRAIN_POINTS, Files
from ebbtide.runtime.checkpoint.format import memory
from ebbtide.runtime.checkpoint.format.output import Pace
from ebbtide.runtime.checkpoint.protocol.drain import DamagedSourceError, Drain, Drainer, Tiers, next_to_drain
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, prune, verify
from ebbtide.runtime.checkpoint.protocol.retention import being_read
from ebbtide.simulator import CheckpointPlan
from pydantic import ValidationError

from tests.runtime.checkpoint.conftest import Bench, FaultyFiles, some_state


@pytest.fixture
def tiers(tmp_path):
    return Tiers(tmp_path / "fast", tmp_path / "durable")


def drain(tiers, files=None):
    found = next_to_drain(tiers)
    Drain(tiers, files or Files(), Pace(None)).run(found)
    return found.folder.name


def tags(folder):
    return [entry.tag for entry in list_checkpoints(folder)]


def assert_whole(*folders):
    for folder in folders:
        for tag in tags(folder):
            assert verify(folder, tag) == []


def test_the_durable_tier_gets_the_same_bytes(tiers):
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    assert drain(tiers) == "a"
    fast, durable = tiers.fast / "a", tiers.durable / "a"
    names = sorted(p.relative_to(fast) for p in fast.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(durable) for p in durable.rglob("*") if p.is_file())
    assert all((fast / n).read_bytes() == (durable / n).read_bytes() for n in names)
    assert (tiers.durable / "latest").read_text() == "a"
    assert next_to_drain(tiers) is None
    assert verify(tiers.durable, "a") == []


def test_a_drain_locks_no_pages(tiers, monkeypatch):
    """It copies from file to file: no GPU reads or writes its buffer."""
    Bench(tiers.fast).save(some_state(1), "a")
    locked = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *a: locked.append(a) or 0, cudaHostUnregister=lambda *a: 0)
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory.torch.cuda, "cudart", lambda: runtime)
    memory.Slots(1, 4096).close()
    assert len(locked) == 1, "else this tests nothing"
    assert drain(tiers) == "a"
    assert len(locked) == 1


def test_each_tier_keeps_its_own_count(tmp_path):
    tiers = Tiers(tmp_path / "fast", tmp_path / "durable", keep=2)
    bench = Bench(tiers.fast)
    for number in range(4):
        bench.save(some_state(number), f"s{number}", keep=1)
        drain(tiers)
    assert tags(tiers.fast) == ["s3"]
    assert tags(tiers.durable) == ["s3", "s2"]


def test_a_checkpoint_being_drained_is_not_pruned(tiers):
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    pruned = []

    class Prunes(Files):
        def point(self, name):
            if name == "drain_half":
                bench.save(some_state(2), "b")
                pruned.append(prune(tiers.fast, 1))

    drain(tiers, Prunes())
    assert pruned == [[]]  # it was tried, at the right moment
    assert verify(tiers.durable, "a") == []
    assert prune(tiers.fast, 1) == ["a"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_system_call_of_a_drain_fails_in_turn(tmp_path, error):
    counted = Tiers(tmp_path / "c" / "fast", tmp_path / "c" / "durable")
    Bench(counted.fast).save(some_state(0, 4000), "a")
    counter = FaultyFiles()
    drain(counted, counter)
    assert len(counter.calls) > 20
    heard = 0
    for at in range(len(counter.calls)):
        tiers = Tiers(tmp_path / f"{at}" / "fast", tmp_path / f"{at}" / "durable")
        shutil.copytree(counted.fast, tiers.fast)
        files = FaultyFiles(at, error)
        try:
            drain(tiers, files)
        except (OSError, CheckpointError):
            heard += 1
        assert files.fired == 1
        assert_whole(tiers.fast, tiers.durable)
        assert tags(tiers.fast) == ["a"]
        if next_to_drain(tiers) is not None:
            assert drain(tiers) == "a"  # the next attempt is not hindered
        assert tags(tiers.durable) == ["a"]
    assert heard > len(counter.calls) / 2


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from ebbtide.runtime.checkpoint.protocol.drain import Drain, Tiers, next_to_drain
    from ebbtide.runtime.checkpoint.files import Files
    from ebbtide.runtime.checkpoint.format.output import Pace
    folder = Path(sys.argv[1])
    tiers = Tiers(folder / "fast", folder / "durable", keep=1)
    points = sys.argv[2:]

    class Kills(Files):
        def point(self, name):
            if name == at:
                os.kill(os.getpid(), signal.SIGKILL)

    for at in points:
        child = os.fork()
        if child == 0:
            Drain(tiers, Kills(), Pace(None)).run(next_to_drain(tiers))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(at, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "alive", flush=True)
        state = folder / "after" / at
        state.mkdir(parents=True)
        os.system(f"cp -r {tiers.durable} {state}/durable && cp -r {tiers.fast} {state}/fast")
        os.system(f"rm -rf {tiers.durable} && cp -r {folder}/before {tiers.durable}")
"""


def test_a_kill_at_every_point_leaves_both_tiers_consistent(tmp_path):
    points = [*DRAIN_POINTS, "tag_renamed", "parent_fsynced"]
    tiers = Tiers(tmp_path / "fast", tmp_path / "durable", keep=1)
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    drain(tiers)
    shutil.copytree(tiers.durable, tmp_path / "before")
    bench.save(some_state(2), "b")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), *points],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    fired = dict(line.split() for line in done.stdout.splitlines())
    assert fired == dict.fromkeys(points, str(int(signal.SIGKILL)))
    for point in points:
        left = Tiers(tmp_path / "after" / point / "fast", tmp_path / "after" / point / "durable", 1)
        assert_whole(left.fast, left.durable)
        assert set(tags(left.durable)) & {"a", "b"}
        assert (left.durable / "latest").read_text() in tags(left.durable)
        assert newest_of_tiers([left.fast, left.durable]).tag == "b"
        if next_to_drain(left) is not None:
            drain(left)
        assert "b" in tags(left.durable)
        assert not [p for p in left.durable.glob(".*.partial") if next_to_drain(left)]


def flip(path, at=5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_in_the_fast_tier_does_not_spread(tiers):
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    drain(tiers)
    bench.save(some_state(2), "b")
    flip(tiers.fast / "b" / "rank0_optim_states.pt")
    with pytest.raises(DamagedSourceError, match=r"rank0_optim_states\.pt: bytes 0 to"):
        drain(tiers)
    assert tags(tiers.durable) == ["a"]
    assert not list(tiers.durable.glob(".*.partial"))


def test_restore_looks_in_all_tiers(tiers):
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    drain(tiers)
    both = [tiers.fast, tiers.durable]
    assert newest_of_tiers(both).directory == tiers.fast
    flip(tiers.fast / "a" / "rank0_optim_states.pt")
    choice = newest_of_tiers(both)
    assert (choice.tag, choice.directory) == ("a", tiers.durable)
    assert list(choice.passed_over) == [str(tiers.fast / "a")]
    shutil.rmtree(tiers.fast)  # the local disk is gone
    assert newest_of_tiers(both).directory == tiers.durable


def test_numbers_go_on_when_the_fast_tier_is_lost(tiers):
    bench = Bench(tiers.fast)
    for tag in ("a", "b"):
        bench.save(some_state(1), tag)
        drain(tiers)
    shutil.rmtree(tiers.fast)
    bench.save(some_state(3), "c", other_tier=tiers.durable)
    assert newest_of_tiers([tiers.fast, tiers.durable]).tag == "c"
    assert drain(tiers) == "c"
    assert tags(tiers.durable) == ["c", "b", "a"]


def test_training_hears_of_a_failed_drain_and_the_next_one_goes_on(tiers):
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    files = FaultyFiles(10, errno.ENOSPC)
    drainer = Drainer(tiers, files, Pace(None), 20.0)
    drainer.wake()
    with pytest.raises(CheckpointError, match=r"drain_dir\) failed"):
        drainer.wait()
    assert files.fired == 1
    drainer.reap()  # told once
    drainer.wake()
    drainer.wait()
    assert tags(tiers.durable) == ["a"]


def test_a_durable_tier_that_hangs_is_an_error_not_a_hang(tiers):
    import threading

    Bench(tiers.fast).save(some_state(1), "a")
    hung, go_on = threading.Event(), threading.Event()

    class Hangs(Files):
        def point(self, name):
            if name == "drain_half":
                hung.set()
                go_on.wait(30)

    drainer = Drainer(tiers, Hangs(), Pace(None), 0.3)
    drainer.wake()
    assert hung.wait(20)
    with pytest.raises(CheckpointError, match="made no progress"):
        drainer.wait()
    assert tags(tiers.durable) == []
    go_on.set()
    drainer._thread.join(20)
    assert tags(tiers.durable) == ["a"]


def test_damage_left_behind_by_an_earlier_run_is_logged_only(tiers, caplog):
    Bench(tiers.fast).save(some_state(1), "a")
    flip(tiers.fast / "a" / "rank0_optim_states.pt")
    drainer = Drainer(tiers, Files(), Pace(None), 20.0)
    drainer.wake(catching_up=True)
    drainer.wait()
    assert "not drained" in caplog.text
    drainer.wake()
    with pytest.raises(CheckpointError, match="must match"):
        drainer.wait()


def test_readers_of_the_durable_tier_are_left_alone(tmp_path):
    tiers = Tiers(tmp_path / "fast", tmp_path / "durable", keep=1)
    bench = Bench(tiers.fast)
    bench.save(some_state(1), "a")
    drain(tiers)
    with being_read(tiers.durable / "a"):
        bench.save(some_state(2), "b")
        drain(tiers)
        assert tags(tiers.durable) == ["b", "a"]


def test_tiers_are_two_folders(tmp_path):
    for other in (tmp_path, tmp_path / "inside"):
        with pytest.raises(CheckpointError, match="two folders"):
            Tiers(tmp_path, other)
    with pytest.raises(ValidationError, match=r"drain_dir needs checkpoint\.dir"):
        CheckpointPlan(drain_dir=str(tmp_path))
    assert CheckpointPlan.model_validate({"dir": "x", "keep": 2}).drain_dir is None
    assert _tiers(CheckpointPlan(dir="x", drain_dir="y", drain_keep=3)).keep == 3
