"""Tests of the tables that `tune plan` prints: the predicted times of ways to train, and the peak memory of each kind
of data, such as parameters or gradients.
"""

import io

from ebbtide.simulator import preset
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.tuner.answer.report import memory, show_plan, strategies, wide_console
from ebbtide.tuner.answer.rows import alternatives, compare
from ebbtide.tuner.placements.planning import quick_plan
from rich.console import Console

from tests.machines import node, workload


def planned(on, **changes):
    work = workload((10**9,) * 4, 0.1, 0.2, device_base_bytes=12 * GIB, **changes)
    limits = Limits.of(work, on)
    plan = quick_plan(work, on, limits)
    return plan.model_copy(update={"alternatives": alternatives(compare(work, on, limits, plan, others=False))})


def cells(plan):
    return [[*column.cells] for column in memory(plan).columns]


def test_memory_is_told_by_kind_beside_its_limit():
    plan = planned(node())
    names, *columns = cells(plan)
    assert names[-2:] == ["total", "limit"]
    told = plan.prediction
    by_name = dict(zip(names, columns[0], strict=True))
    assert by_name["parameters"] == f"{told.memory['device']['parameters'] / GIB:.2f}"
    assert by_name["total"] == f"{told.device_peak_bytes / GIB:.2f}"
    assert by_name["limit"] == f"{told.limits['device'] / GIB:.2f}"
    headers = [str(column.header).replace("\n", " ") for column in memory(plan).columns[1:]]
    assert headers == ["GPU plan", "GPU stock", "GPU no offload", "host plan", "host stock"]


def test_a_plan_of_an_older_ebbtide_has_none():
    plan = planned(node())
    older = plan.prediction.model_copy(update={"memory": {}, "limits": {}})
    console = Console(file=io.StringIO(), width=200)
    show_plan(plan.model_copy(update={"prediction": older}), console)
    assert "peak memory, GiB per rank" not in console.file.getvalue()


def test_one_memory_has_one_limit():
    on = preset("h100-node").model_copy(update={"unified_memory": True})
    assert set(planned(on).prediction.limits) == {"host"}


def test_the_tables_fit_80_columns_and_say_what_is_missing():
    plan = planned(node())
    told = plan.prediction.model_copy(update={"loop_s": 1.0, "storage_bytes": 300 * GIB})
    long = told.model_copy(
        update={
            "strategy": "Deep Optimizer States, stride 2, of 16 threads",
            "iteration_s": 170.318,
            "device_peak_bytes": told.limits["device"] + 3 * GIB,
            "note": "needs 3.0 GiB more GPU memory",
        }
    )
    table = strategies([told, long])
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "170.32" in shown
    assert "stride 2, of 16 threads needs 3.0 GiB more GPU memory" in " ".join(shown.split())
    for column in table.columns[1:]:  # the numbers of a row are on one line
        assert all(cell in shown for cell in column.cells)
    console = Console(file=io.StringIO(), width=80)
    console.print(memory(plan))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    assert "…" not in console.file.getvalue()


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert wide_console().width == 80
    monkeypatch.delenv("COLUMNS")
    assert wide_console().width == 120
