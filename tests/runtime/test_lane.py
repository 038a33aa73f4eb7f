"""Tests of the runtime's lanes: a lane runs its ops in order, each op waits for the ops that it depends
on, and the first failure reaches every waiter.
"""

import threading

import pytest
from ebbtide.runtime.devices import lane as lane_module
from ebbtide.runtime.devices.lane import BackgroundError, Completion, LaneQueue


@pytest.fixture
def lane():
    made = LaneQueue("test")
    yield made
    made.close()


def test_ops_run_in_the_order_of_submission(lane):
    seen, last = [], Completion()
    for number in range(50):
        lane.submit(lambda n=number: seen.append(n), [], Completion())
    lane.submit(lambda: None, [], last)
    last.wait_host()
    assert seen == list(range(50))


def test_an_op_waits_for_what_it_is_told_to(lane):
    other, begun = LaneQueue("other"), threading.Event()
    release, first, second = threading.Event(), Completion("first"), Completion("second")
    other.submit(lambda: release.wait(10), [], first)
    lane.submit(begun.set, [first], second)
    assert not begun.wait(0.05), "the op started before the op that it waits for had ended"
    release.set()
    second.wait_host()
    assert begun.is_set()
    assert first.end_s <= second.start_s
    other.close()


def test_the_first_failure_reaches_everybody_as_itself(lane):
    other = LaneQueue("other")
    failed, behind, elsewhere = Completion("failed"), Completion("behind"), Completion("elsewhere")

    def fail():
        raise OSError("no space")

    lane.submit(fail, [], failed)
    lane.submit(lambda: None, [], behind)
    other.submit(lambda: None, [behind], elsewhere)
    for completion in (failed, behind, elsewhere):
        with pytest.raises(BackgroundError) as found:
            completion.wait_host()
        assert isinstance(found.value.__cause__, OSError), completion.label
    other.close()


def test_an_op_after_a_failure_does_not_run(lane):
    ran, failed, behind = [], Completion(), Completion()

    def fail():
        raise OSError("no space")

    lane.submit(fail, [], failed)
    lane.submit(lambda: ran.append(1), [], behind)
    with pytest.raises(BackgroundError):
        behind.wait_host()
    assert ran == []


def test_a_stuck_lane_is_told_instead_of_waited_for(lane, monkeypatch):
    monkeypatch.setattr(lane_module, "WAIT_DEADLINE_S", 0.05)
    release, stuck = threading.Event(), Completion("copy of subgroup 3")
    lane.submit(lambda: release.wait(10), [], stuck)
    with pytest.raises(BackgroundError, match="'copy of subgroup 3' was not started within"):
        stuck.wait_host()
    assert not stuck.ended
    release.set()


def test_what_is_done_needs_no_wait():
    assert Completion.done().ended
    Completion.done().wait_host()


def test_the_cause_stands_in_the_errors_own_line(lane):
    # A background op's error is in the message itself, since a user may see only the last line.
    failed = Completion("state read s0")
    lane.submit(lambda: int("a flipped bit"), [], failed)
    with pytest.raises(BackgroundError, match=r"'state read s0' failed in the background: ValueError: .*flipped bit"):
        failed.wait_host()


@pytest.mark.parametrize("own_thread", [True, False])
def test_a_closed_lane_fails_what_is_submitted_to_it(own_thread):
    # An op that is submitted after the end of its lane fails, so that nothing waits for it for ever.
    lane, late, ran = LaneQueue("late", own_thread=own_thread), Completion("op"), []
    lane.close()
    lane.submit(lambda: ran.append(1), [], late)
    assert late.issued.is_set()
    with pytest.raises(BackgroundError, match=r"'op' failed .*lane 'late' is closed"):
        late.wait_host()
    assert ran == []
