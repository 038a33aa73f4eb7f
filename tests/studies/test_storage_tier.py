"""The study of state on storage: what it trains, where it goes, and what it compares."""

import pytest

from studies.storage_tier.command import DURABLE, _attach, run, share_within

pytestmark = pytest.mark.usefixtures("only_rank")


def test_a_share_of_the_state_is_stored_and_the_bits_are_those_of_stock_in_memory(tmp_path):
    stock = run("stock in memory", "tiny", 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    ours = run("ebbtide, half in memory", "tiny", 2, tmp_path)
    assert list(tmp_path.iterdir()) != []
    assert (ours["state"], ours["losses"]) == (stock["state"], stock["losses"])
    assert len(ours["losses"]) == 4
    assert ours["updates_s"] > 0
    assert ours["host_peak_bytes"] > 2**20
    assert ours["update_s"] > 0
    assert ours["resume_identical"] is True
    assert ours["extra_state_bytes_per_checkpoint"] == 0
    assert 0 < ours["resume_read_bytes"] < 12 * ours["params"]
    assert abs(ours["host_bytes_predicted_over_measured"] - 1) < 0.03
    assert set(DURABLE) <= set(ours)


@pytest.mark.parametrize(("share", "hosted"), [(0.0, 0), (0.5, 6), (0.9, 11)])
def test_shares_are_even(share, hosted, tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr("runtime.attach", lambda _, plan: plans.append(plan))
    monkeypatch.setattr("runtime.zero.cuts.subgroups_of", lambda *_: [1] * 12)

    class Optimizer:
        sub_group_size = 1

    class Engine:
        optimizer = Optimizer()

    _attach(Engine(), share, tmp_path)
    assert plans[0].count("host") == hosted
    assert plans[0].count("stored") == 12 - hosted


@pytest.mark.parametrize(("spare", "share"), [(-5, 0.0), (119, 0.0), (359, 0.5), (9999, 0.75)])
def test_the_share_within_a_limit_is_of_whole_subgroups_and_never_above_it(spare, share):
    assert share_within(spare, [10, 10, 10, 4]) == share
