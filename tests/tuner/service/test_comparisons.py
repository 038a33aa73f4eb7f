"""Tests of sweeps and of the comparison of machines: they are as good as the answers beside them."""

from itertools import pairwise

import pytest

JOBS = [
    {"model": "Llama 3.2 3B", "machine": "rtx4090", "sequence": 1024, "host_memory_bytes": 2**36},
    {"model": {"layers": 12, "hidden": 1536, "heads": 12, "vocabulary": 32_000}, "machine": "gh200", "zero_stage": 2},
]
GIB = 2**30
# A plan's ops may meet on a faster link in an order that takes a little longer, and tests search with few simulations.
ALIKE = 1.003
MORE = {
    "link_bytes_per_s": [n * 1e9 for n in (10, 16, 17, 25, 26, 64)],
    "device_memory_bytes": [n * GIB for n in (6, 10, 16, 23, 24, 48)],
    "host_memory_bytes": [n * GIB for n in (24, 48, 64, 96, 128)],
}


@pytest.mark.parametrize("job", JOBS, ids=["3B", "small, ZeRO-2"])
@pytest.mark.parametrize("varied", MORE)
def test_more_is_never_slower_in_a_sweep(server, job, varied):
    changes = [{varied: value} for value in MORE[varied]]
    points = server.post("/sweep", {**job, "changes": changes}).json()["points"]
    for role in ("plan", "stock"):
        rows = [next(row for row in point["rows"] if row["role"] == role) for point in points if not point["refused"]]
        assert rows
        fitting = [row["iteration_s"] for row in rows if row["fits"]]
        assert all(later <= earlier * ALIKE for earlier, later in pairwise(fitting)), fitting
        if varied != "link_bytes_per_s":
            assert [row["fits"] for row in rows] == sorted(row["fits"] for row in rows)


def test_a_sweep_is_as_good_as_the_answer_beside_it(server):
    asked = {**JOBS[0], "peers": False, "timelines": False}
    answer = server.post("/answer", asked).json()
    beside = next(row["iteration_s"] for row in answer["rows"] if row["role"] == "plan")
    near = server.post("/sweep", {**JOBS[0], "changes": [{"link_bytes_per_s": 24e9}]}).json()["points"][0]
    known = {"plans": [answer["plan"], near["plan"]], "search": False}
    changes = [{"link_bytes_per_s": 25e9}, {"gpus": 3}, {"sequence": -1}, {"device_memory_bytes": GIB}]
    points = server.post("/sweep", {**JOBS[0], **known, "changes": changes}).json()["points"]
    assert points[0]["rows"][0]["iteration_s"] <= beside
    assert ["refused" in point and bool(point["refused"]) for point in points] == [False, True, True, False]
    unfit = next(row for row in points[3]["rows"] if row["role"] == "plan")
    assert not unfit["fits"]
    assert "GPU memory" in unfit["reason"]


def test_each_card_has_the_figures_of_its_own_answer(server):
    asked = {"model": "Llama 3.2 1B", "sequence": 512}
    rows = server.post("/cards", {**asked, "machines": ["rtx4090", "rtx4090-x2", "h200"]}).json()["rows"]
    assert {row["machine"]: row["gpus"] for row in rows} == {"rtx4090": 1, "rtx4090-x2": 2, "h200": 1}
    assert [row["tokens_per_s"] for row in rows] == sorted((row["tokens_per_s"] for row in rows), reverse=True)
    for row in rows:
        own = server.post("/answer", {**asked, "machine": row["machine"], "gpus": row["gpus"], "peers": False}).json()
        assert own["verdict"] == row["verdict"]
        same = next(one for one in own["rows"] if one["role"] == row["role"])
        assert (same["iteration_s"], same["tokens_per_s"]) == (row["iteration_s"], row["tokens_per_s"])


def test_what_no_card_can_train_is_said(server):
    asked = {"model": "Llama 3 70B", "sequence": 65_536, "machines": ["rtx4080"]}
    (row,) = server.post("/cards", asked).json()["rows"]
    assert (row["role"], row["iteration_s"]) == (None, None)
    assert "short" in row["reason"]
    refused = server.post("/cards", {**asked, "machines": ["nowhere"]})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["key"] == "machines"
    assert server.post("/cards", {**asked, "machine": "h200"}).status_code == 422
