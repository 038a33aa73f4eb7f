import os
import signal
import threading
import time
from pathlib import Path

import pytest

from studies.trials import phase_process
from studies.trials.phase_process import PhaseError, PhaseProcess, PhaseProgress, pause, report


def say(words):
    print(words)
    report(1, 2, "half")
    report(2, 2)


def fail():
    report(1, 2)
    raise RuntimeError("no such disk")


def last_for_ever():
    report(0, 1)
    time.sleep(600)


def build(folder):
    from ebbtide.runtime.hardware.builds import tell_builds
    from torch.utils import cpp_extension

    threading.Timer(60, os._exit, (1,)).start()  # the test fails if nothing is told
    tell_builds(cpp_extension, lambda: 0)
    cpp_extension.load("nothing", [str(Path(folder) / "nothing.cpp")], build_directory=folder)


def take_turns(path):
    for number in range(2):
        report(number, 2)
        pause()
        Path(path).write_text(str(number))


def test_reports_arrive_in_order_and_output_goes_to_the_log(tmp_path):
    with PhaseProcess(say, {"words": "good morning"}, tmp_path / "log") as child:
        assert list(child.progress()) == [PhaseProgress(1, 2, "half"), PhaseProgress(2, 2)]
        child.finish()
    assert (tmp_path / "log").read_text() == "good morning\n"


def test_a_failure_shows_the_end_of_the_log(tmp_path):
    with PhaseProcess(fail, {}, tmp_path / "log") as child:
        list(child.progress())
        with pytest.raises(PhaseError, match="no such disk"):
            child.finish()


def test_kill_is_sigkill_and_leaving_the_block_kills(tmp_path):
    with PhaseProcess(last_for_ever, {}, tmp_path / "log") as child:
        next(child.progress())
        assert child.kill() == -signal.SIGKILL
    with PhaseProcess(last_for_ever, {}, tmp_path / "log") as child:
        next(child.progress())
        assert child.running
    assert not child.running


def test_what_a_silent_process_waits_for_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(phase_process, "_QUIET_S", 0.2)
    told = []
    (tmp_path / "nothing.cpp").touch()
    (tmp_path / "lock").touch()  # left by a build that was killed
    with PhaseProcess(build, {"folder": str(tmp_path)}, tmp_path / "log") as child:

        def tell(line):
            told.append(line)
            child.kill()

        assert list(child.progress(tell)) == []
    assert len(told) == 1
    assert f"rm {tmp_path / 'lock'}" in told[0]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])  # the study uses spawn with CUDA
def test_a_pause_ends_when_the_parent_says_so(tmp_path, monkeypatch, method):
    monkeypatch.setattr(phase_process, "_start_method", lambda: method)
    path = tmp_path / "turn"
    with PhaseProcess(take_turns, {"path": str(path)}, tmp_path / "log") as child:
        assert list(child.progress()) == [PhaseProgress(0, 2)]
        assert child.waits
        assert not path.exists()
        child.go_on()
        assert list(child.progress()) == [PhaseProgress(1, 2)]
        assert path.read_text() == "0"
        child.go_on()
        assert list(child.progress()) == []
        assert not child.waits
        child.finish()
    assert path.read_text() == "1"


def test_without_a_parent_reports_are_silent_and_nobody_waits():
    report(1, 1)
    pause()
