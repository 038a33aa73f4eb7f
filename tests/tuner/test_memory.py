"""Tests of the margin of GPU memory and of host memory that a plan leaves free for safety."""

import pytest
from ebbtide.simulator import Quantity
from ebbtide.simulator.limits import LEAST_MARGIN, SIGMAS, SOLD_AS, UNKNOWN_MARGIN, Limits
from ebbtide.tuner.quantities import share

from tests.machines import machine, workload

SIZE = 1_000_000


def limits(peaks, **fields):
    have = machine(device_memory_bytes=SIZE, host_memory_bytes=2 * SIZE)
    return Limits.of(workload(memory_peaks=peaks), have, **fields)


def peak(q1, median, q3, n=5):
    return Quantity(median=median, q1=q1, q3=q3, n=n, source="measured")


def test_it_comes_from_the_spread_of_the_profiled_peaks():
    found = limits({"device": peak(500_000, 520_000, 540_000), "host": peak(7e5, 7e5, 7e5)})
    sigma = 40_000 / 1.349
    assert found.device_bytes == int(SIZE - LEAST_MARGIN * SIZE - SIGMAS * sigma)
    assert found.host_bytes == int(2 * SIZE * (1 - LEAST_MARGIN))
    assert "three standard deviations" in found.explained[0]
    assert "of 5 profiled peaks" in found.explained[0]


def test_a_profile_that_varies_more_leaves_more_free():
    steady = limits({"device": peak(500_000, 520_000, 530_000)})
    varying = limits({"device": peak(400_000, 520_000, 600_000)})
    assert varying.device_bytes < steady.device_bytes < SIZE


@pytest.mark.parametrize("peaks", [{}, {"device": peak(5e5, 5e5, 5e5, n=1)}])
def test_without_a_spread_a_fixed_share_stays_free(peaks):
    found = limits(peaks)
    assert found.device_bytes == int(SIZE * (1 - UNKNOWN_MARGIN))
    assert "no profile shows how much peaks vary" in found.explained[0]


def test_a_given_margin_goes_before_the_profile():
    found = limits({"device": peak(400_000, 520_000, 600_000)}, margin=0.25)
    assert (found.device_bytes, found.host_bytes) == (750_000, 1_500_000)
    assert "25.0% as requested" in found.explained[0]
    assert limits({}, margin=0.0).device_bytes == SIZE


def test_more_spread_than_memory_leaves_nothing_not_less():
    assert limits({"device": peak(1.0, 500_000, 5e6)}).device_bytes == 0


@pytest.mark.parametrize("bad", [-0.1, 1.0, float("nan")])
def test_a_margin_that_is_no_share_is_refused(bad):
    with pytest.raises(ValueError, match=r"memory_margin must lie in \[0%, 100%\)"):
        limits({}, margin=bad)


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("0", 0), (" 50%", 0.5)])
def test_shares_as_people_write_them(text, value):
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("bad", ["100%", "5", "-1%", "nan", "much", ""])
def test_no_shares(bad):
    with pytest.raises(ValueError, match="such as 5%"):
        share(bad)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_host_memory_is_that_of_the_machine_and_its_ranks_share_it(ranks):
    have, work = machine(host_memory_bytes=2 * SIZE), workload(ranks_per_node=ranks)
    whole = Limits.of(work, have).host_bytes
    for asked in (2 * SIZE, int(2 * SIZE * (1 + SOLD_AS / 2))):
        assert Limits.of(work, have, host_memory_bytes=asked).host_bytes == whole
    half = work.model_copy(update={"ranks_per_node": 2 * ranks})
    assert Limits.of(work, have, host_memory_bytes=SIZE).host_bytes == Limits.of(half, have).host_bytes
    beyond = int(2 * SIZE * (1 + SOLD_AS)) + 2
    with pytest.raises(ValueError, match=r"host_memory_bytes must be at most") as refused:
        Limits.of(work, have, host_memory_bytes=beyond)
    assert refused.value.key == "host_memory_bytes"
