"""Tests of the plan search with a drive for optimizer state: it stores only the state that memory cannot
hold, within the drive's limit, and counts the time of reads and writes.
"""

import math
from dataclasses import replace
from itertools import product
from random import Random

import ebbtide.tuner
import pytest
from ebbtide.simulator import Machine, Plan, PlanError, Quantity, build_schedule, simulate
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import StorageRates, shares
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.tuner.placements import parameters_and_early
from ebbtide.tuner.placements.candidate import CHOICES, STORED, Candidate, Freedom, choices, evenly
from ebbtide.tuner.placements.decision import PlanQuestion, anneal
from ebbtide.tuner.placements.division import ImpossibleError
from ebbtide.tuner.placements.parameters_and_early import begun
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.service.requests import MODELS

from tests.tuner.test_search import machine
from tests.tuner.test_search import workload as twenty

GIB, TB = 2**30, 10**12
FAST = {"storage_read_bytes_per_s": Quantity.exact(6e9)}
SHORT = {"device_memory_bytes": 5 * GIB, "host_memory_bytes": 7 * GIB}


def workload(**changes):
    return twenty(12, 5 * 10**7, **changes)


def q(value):
    return Quantity.exact(value)


def planned(**changes):
    work, have = workload(), machine(**FAST)
    return ebbtide.tuner.plan(work, have, **{**SHORT, "storage": {"/nvme": TB}, **changes})


@pytest.fixture(scope="module")
def stored():
    return planned(endurance_bytes=1.2e15, effort=1.0)


def test_what_does_not_fit_into_memory_is_stored_and_the_plan_keeps_all_three_limits(stored):
    work = workload()
    with pytest.raises(ImpossibleError, match="Keep state on a drive"):
        ebbtide.tuner.plan(work, machine(), **SHORT)
    assert 0 < stored.count("stored") < 12
    held = footprint(work, stored)
    assert stored.prediction.storage_bytes == held["storage"] == stored.count("stored") * 24 * 5e7
    assert stored.prediction.host_peak_bytes <= SHORT["host_memory_bytes"] * 0.95
    timeline = simulate(build_schedule(work, stored), machine(**FAST))
    assert stored.prediction.iteration_s == pytest.approx(timeline.iteration_s)
    assert timeline.storage_bytes == held["storage"]
    assert stored.storage_dir == "/nvme"
    assert 0 < stored.prediction.lower_bound_s < timeline.iteration_s


def test_no_numbers_of_placements_are_better(stored):
    work, have = workload(), machine(**FAST)
    search = Search(work, have, Limits.of(work, have, *SHORT.values(), storage_bytes=TB))
    best_s = math.inf
    for residents, spilled, slots in product(range(5), range(8), (1, 2, 3)):
        numbers = {"resident": residents, "stored": spilled, "host": 12 - residents - spilled}
        tried = replace(evenly(numbers), host_slots=slots)
        best_s = min(best_s, search.score(tried).iteration_s)
    assert stored.prediction.iteration_s <= best_s < math.inf


def test_the_search_with_drives_uses_the_simulations_of_the_one_without_and_finds_the_same(monkeypatch):
    have = preset("h100-node")
    work = estimated(Job.of_deepspeed(MODELS["Llama 3 8B"], accumulation=4), have).recut(10**9)
    asked = PlanQuestion.of(work, have, storage={"/nvme": TB}, device_memory_bytes=14 * GIB)
    evaluate, simulated, searches = PlanSweep.evaluate, [], []

    def counted(*args):
        simulated.append(args)
        return evaluate(*args)

    def shared(*args, **options):
        searches.append(Search(*args, **options))
        return searches[-1]

    def alone(*args, like=None, **options):
        return shared(*args, **options)

    monkeypatch.setattr(PlanSweep, "evaluate", counted)
    counts = []
    for new in (shared, alone):
        monkeypatch.setattr(parameters_and_early, "Search", new)
        begun(work, asked.machine, asked.limits)
        counts.append(len(simulated))
    assert len(searches) == 4
    for one, other in zip(searches[:2], searches[2:], strict=True):
        assert one.scores == other.scores
        assert (one.best(), one.best_s, one.plain_s) == (other.best(), other.best_s, other.plain_s)
    assert counts[0] < counts[1] - counts[0]


def test_as_little_is_stored_as_memory_allows(stored):
    work = workload()
    limits = Limits.of(work, machine(), *SHORT.values())
    for number, placement in enumerate(stored.placements):
        if placement == "stored":
            less = [*stored.placements]
            less[number] = "host"
            held = footprint(work, stored.placed(less))
            assert held["host"] > limits.host_bytes


def test_where_memory_suffices_the_plan_is_that_without_storage():
    work, have = workload(), machine()
    some = {"device_memory_bytes": 6 * GIB}
    assert ebbtide.tuner.plan(work, have, **some, storage={"/nvme": TB}) == ebbtide.tuner.plan(work, have, **some)


def test_the_endurance_of_drives_that_are_not_needed_is_answered():
    some = {"device_memory_bytes": 6 * GIB, "storage": {"/nvme": TB}, "effort": 0.1}
    plain, asked = (ebbtide.tuner.plan(workload(), machine(), **some, endurance_bytes=n) for n in (None, 6e14))
    assert {*asked.reasons} - {*plain.reasons} == {"memory holds all optimizer state, so no drive is worn"}


def test_storage_that_is_too_small_is_told():
    with pytest.raises(ImpossibleError, match=r"memory is .* GiB short.*a drive"):
        planned(storage={"/nvme": GIB})
    with pytest.raises(ValueError, match="storage_bytes must be > 0"):
        Limits.of(workload(), machine(), storage_bytes=0)


def test_the_ranks_of_a_node_share_the_storage():
    limits = Limits.of(workload(ranks_per_node=4), machine(), storage_bytes=4 * TB)
    assert limits.storage_bytes == pytest.approx(TB, rel=0.02)
    assert limits.missing(0, 0, 2 * TB) == {"storage": 2 * TB - limits.storage_bytes}


def test_it_says_what_memory_would_save_and_how_long_the_drive_lasts(stored):
    memory, wear = stored.reasons[-2:]
    assert "GiB more, the same plan would take" in memory
    step = stored.count("stored") * 5e7 * 12
    day = step * 86400 / stored.prediction.iteration_s
    assert f"writes {step / 1e9:.2f} GB of state in each step, {day / 1e12:.1f} TB in a day" in wear
    assert f"rated for 1,200 TB last {1.2e15 / day:.1f} days" in wear
    faster = float(memory.partition("would take ")[2].split()[0]) / 1e3
    work = workload()
    hosted = stored.placed(["host" if p == "stored" else p for p in stored.placements])
    expected = simulate(build_schedule(work, hosted), machine(**FAST)).iteration_s
    assert faster == pytest.approx(expected, rel=1e-3)
    assert faster < stored.prediction.iteration_s


def test_stock_beside_it_stores_too(stored):
    stock = next(p for p in stored.alternatives if p.strategy.startswith("stock ZeRO-3 offload"))
    assert "nvme" in stock.strategy
    assert stock.storage_bytes == 12 * 5e7 * 16


def test_a_machine_without_a_gpu_stores_what_its_memory_cannot_hold():
    have = machine(unified_memory=True, device_shares_host_cores=True, **FAST)
    work = workload()
    found = begun(work, have, Limits.of(work, have, storage_bytes=TB, host_memory_bytes=9 * GIB))
    best = found.best()
    assert set(best.placements) == {"host", "stored"}
    assert set(choices(have, storage=True)) == {"host", "stored"}


def two_drives():
    return {
        "/fast": StorageRates(write_bytes_per_s=q(4e9), read_bytes_per_s=q(6e9)),
        "/slow": StorageRates(write_bytes_per_s=q(1e9), read_bytes_per_s=q(2e9), duplex_factor=q(0.5)),
    }


def test_several_directories_are_as_fast_as_their_shares_let_them():
    drives = two_drives()
    part = shares(drives)
    assert part == pytest.approx({"/fast": 6 / 7, "/slow": 1 / 7})
    both = StorageRates.together(drives)
    assert both.read_bytes_per_s.median == pytest.approx(6e9 * 7 / 6)
    assert both.write_bytes_per_s.median == pytest.approx(4e9 * 7 / 6)
    # Reading and writing at once takes 1/4 ns x 6/7 per byte in each direction, as long as writing alone.
    assert both.duplex_factor.median == pytest.approx((1 / 7 + 3 / 14) / (3 / 14) / 2)


def test_several_directories_share_the_state_and_the_smallest_share_limits_it():
    have = machine(drives=two_drives())
    assert Machine.model_validate(have.model_dump()) == have
    one = have.storing_in(["/slow"])
    assert (one.storage_write_bytes_per_s.median, one.storage_duplex_factor.median) == (1e9, 0.5)
    assert have.storing_in(["/elsewhere"]).storage_write_bytes_per_s.median == 2e9
    found = ebbtide.tuner.plan(workload(), have, **SHORT, storage={"/fast": TB, "/slow": TB})
    assert found.storage_shares == {"/fast": 0.8571, "/slow": 0.1429}
    assert found.storage_dir is None
    assert found.drives == found.storage_shares
    slow = simulate(build_schedule(workload(), found), one).iteration_s
    assert found.prediction.iteration_s < 0.5 * slow
    with pytest.raises(ImpossibleError):
        ebbtide.tuner.plan(workload(), have, **SHORT, storage={"/fast": GIB, "/slow": TB})


def test_a_plan_names_its_folders_in_one_way():
    with pytest.raises(ValueError, match=r"storage_dir must be absent if plan\.storage_shares"):
        Plan(subgroup_size=1, placement=Plan.runs(["stored"]), storage_dir="/a", storage_shares={"/b": 1.0})
    with pytest.raises(PlanError, match="greater than 0"):
        Plan.from_fields(
            {"subgroup_size": 1, "placement": [{"placement": "stored", "count": 1}], "storage_shares": {"/b": 0}}
        )


def test_a_search_stores_no_other_subgroups_than_it_may():
    work, have = twenty(6), machine(**FAST)
    limits = Limits.of(work, have, 5 * GIB, 2 * GIB, storage_bytes=TB)
    search = Search(work, have, limits, storable={0, 1, 2, 3})
    search.score(Candidate.of(("stored",) * 4 + ("resident",) * 2))
    assert search.fits
    anneal(search, 300)
    known = [c for c, score in search.scores.items() if score.iteration_s < 1e9]
    assert len(known) > 1
    assert not [c for c in known if "stored" in c.placements[4:]]


def test_moves_choose_host_slots_only_where_something_may_be_stored():
    some = ((*CHOICES, "stored"), CHOICES)
    stores, plain = (Candidate(bytes(6), 1, 0).movable(Freedom(each)) for each in some)  # code 0 is host
    rng = Random(1)
    for _ in range(200):
        stores, plain = stores.moved(rng), plain.moved(rng)
        assert stores.host_slots >= 1
        assert plain.host_slots == 3
        assert STORED.isdisjoint(plain.placements)
    assert stores.host_slots != 3 or "stored" in stores.placements
