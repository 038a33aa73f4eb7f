import signal

import pytest

from studies.trials.phase_process import PhaseError, PhaseProcess, Progress, report


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a piece of Python as a phase's module."""

    def _start(source):
        (tmp_path / "some_phase.py").write_text(
            "from studies.trials.phase_process import report\n" + source
        )
        monkeypatch.chdir(tmp_path)
        return PhaseProcess("some_phase", ["x"], tmp_path / "log")

    return _start


def test_reports_arrive_in_order_and_output_goes_to_the_log(start, tmp_path):
    with start("import sys\nprint(sys.argv[1:])\nreport(1, 2, 'half')\nreport(2, 2)") as child:
        assert list(child.progress()) == [Progress(1, 2, "half"), Progress(2, 2)]
        child.finish()
    assert (tmp_path / "log").read_text() == "['x']\n"


def test_a_failure_shows_the_end_of_the_log(start):
    with start("report(1, 2)\nraise RuntimeError('no such disk')") as child:
        list(child.progress())
        with pytest.raises(PhaseError, match="no such disk"):
            child.finish()


def test_kill_is_sigkill_and_leaving_the_block_kills(start):
    source = "import time\nreport(0, 1)\ntime.sleep(600)"
    with start(source) as child:
        next(child.progress())
        assert child.kill() == -signal.SIGKILL
    with start(source) as child:
        next(child.progress())
        assert child.running
    assert not child.running


def test_report_without_a_parent_is_silent(monkeypatch):
    monkeypatch.delenv("EBBTIDE_PROGRESS_FD", raising=False)
    report(1, 1)
