"""A comparison of ebbtide with other offloading systems on a GPU: training speed, and bit-identity of results."""

from collections.abc import Mapping, Sequence

from studies.gpu.speed import against_control
from studies.gpu.suite import Figures, Suite

RATIOS = (0.8, 0.6, 0.9, 0.7, 0.5)
UNCLIPPED = "_no_clipping"
PEERS = ("superoffload", "twin_flow", "zenflow", "torchao", "no_offload", "deepcompile", "features")
# The technique that each row lacks, compared with a plan that uses all techniques.
WITHOUT: Mapping[str, Figures] = {
    "all_on": {},
    "without_speculation": {"early": False},
    "without_device_sums": {"sum_on_device": False},
}
ACCUMULATING = "stock_accumulating"
MICRO_BATCHES = 4
EXACT = ("stock", "superoffload", "twin_flow")


def compare(suite: Suite, only: Sequence[str] = PEERS) -> Figures:
    """Train with each offloading system of the comparison and with ebbtide, within the same memory limit.

    ebbtide trains under the tuner's plan. Stock DeepSpeed trains twice: the second run is a control.

    Args:
        only: The systems of `PEERS` to run. Stock DeepSpeed and ebbtide always run.

    Returns:
        A dict. ``rows``: results of each system. ``speedup``: iteration time of stock DeepSpeed divided by that of
        ebbtide. ``speedup_over_best_exact_peer``: iteration time of the fastest system with the numerics of stock
        DeepSpeed, divided by that of ebbtide. ``control_identical``: True if the optimizer state of the two stock runs
        is bit-identical. ``noise``: iteration time of the second stock run divided by that of the first. ``correct``:
        True if the optimizer state of ebbtide and stock DeepSpeed is bit-identical. None if a run failed, or if the
        two stock runs also differ.
    """
    suite.plan()
    features = _features(suite) if "features" in only else {}
    rows = suite.trials({**_trials(suite, only), **features})
    stock, control, ours = (rows[name] for name in ("stock", "stock_again", "ebbtide"))
    _mark_best(rows)
    for name, row in rows.items():
        _compared(row, rows.get(_reference(name), {"failed": "not run"}))
    figures = against_control(stock, control, ours)
    if figures["correct"] and any(rows[n].get("bit_identical") is False for n in features):
        figures["correct"] = False
    return {"rows": list(rows.values()), **figures, "speedup_over_best_exact_peer": _over_best(rows, ours)}


def _reference(name: str) -> str:
    if name in WITHOUT or name == ACCUMULATING:
        return ACCUMULATING
    return f"stock{UNCLIPPED}" if name.endswith(UNCLIPPED) else "stock"


def _features(suite: Suite) -> dict[str, list[str]]:
    # There is a run with all features, one without each feature, and one of stock DeepSpeed.
    # No step clips, but each step waits for the norm.
    own = ["--accumulation", str(MICRO_BATCHES), "--clip-rate", "0"]
    trials, plan = {ACCUMULATING: ["--variant", "stock", *own]}, suite.plan_all_on(MICRO_BATCHES)
    for name, fields in WITHOUT.items():
        path = suite.save_plan(name, plan.with_bits(**fields))
        trials[name] = ["--variant", "ebbtide", "--plan", str(path), *own]
    return trials


def _trials(suite: Suite, only: Sequence[str]) -> dict[str, list[str]]:
    # The runs are of stock DeepSpeed, ebbtide and other offloading systems. The most important ones come first, because
    # the time limit may end the comparison early.
    trials: dict[str, list[str]] = {
        "stock": ["--variant", "stock"],
        "ebbtide": ["--variant", "ebbtide", "--plan", str(suite.plan_path)],
        "stock_again": ["--variant", "stock"],
    }
    ratios = (RATIOS[:1] if suite.emulated else RATIOS) if "twin_flow" in only else ()
    flows = {f"twin_flow_{r}": ["--variant", f"twin_flow:{r}"] for r in ratios}
    trials |= dict(list(flows.items())[:1])
    for name in ("superoffload", "no_offload", "zenflow", "torchao", "deepcompile"):
        if name in only:
            trials[name] = ["--variant", name]
    if "superoffload" in only:  # SuperOffload does not overlap if gradients are clipped
        for name in ("stock", "superoffload"):
            trials[name + UNCLIPPED] = ["--variant", name, "--clipping", "0"]
    return trials | flows


def _compared(row: Figures, reference: Figures) -> None:
    if "failed" not in row and "failed" not in reference:
        row["bit_identical"] = row["hash"] == reference["hash"]
        row["speedup"] = reference["iteration_s"] / row["iteration_s"]


def _mark_best(rows: dict[str, Figures]) -> None:
    ran = [r for n, r in rows.items() if n.startswith("twin_flow") and "failed" not in r]
    if ran:
        min(ran, key=lambda row: row["iteration_s"])["best"] = True


def _over_best(rows: Mapping[str, Figures], ours: Figures) -> float | None:
    if "failed" in ours:
        return None
    others = [
        row["iteration_s"]
        for name, row in rows.items()
        if "failed" not in row and row["variant"].split(":")[0] in EXACT and _reference(name) == "stock"
    ]
    return min(others) / ours["iteration_s"] if others else None
