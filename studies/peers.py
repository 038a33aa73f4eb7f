"""Comparison of ebbtide with other offloading systems: same model, memory limit, seeds and steps.

    python -m studies.peers --json peers.json --size 3b --cap-gib 24
    python -m studies.peers --json peers.json --device emulated      # tiny, without a GPU

Each system runs in its own process, one after the other. Stock DeepSpeed runs twice, with pinned
memory and bound to cores near the GPU. The second run is the control: bits are compared only if it
trains the same bits as the first one. Twin-Flow runs at several ratios, and the best ratio that fits
counts. ZenFlow trains with stale updates, torchao with 16-bit masters, and DeepCompile with other
kernels, so these systems are marked as not exact. If a system fails, its row tells how.

Further rows show ebbtide with all features of a plan, and with one feature off at a time. Their
steps have several micro-batches and never clip. They are compared with stock DeepSpeed on such
steps. Without a GPU, host memory stands in for the device, and no number is a GPU measurement.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from studies.bench.byte_gpt import SIZES
from studies.bench.console import study_parser
from studies.bench.record import write_record
from studies.gpu.speed import against_control
from studies.gpu.suite import Figures, Suite

RATIOS = (0.8, 0.6, 0.9, 0.7, 0.5)
UNCLIPPED = "_no_clipping"
PEERS = ("superoffload", "twin_flow", "zenflow", "torchao", "no_offload", "deepcompile", "features")
# Of a plan that has all of it, what each row is without.
WITHOUT: Mapping[str, Figures] = {
    "all_on": {},
    "without_speculation": {"early": False},
    "without_device_sums": {"sum_on_device": False},
}
ACCUMULATING = "stock_accumulating"
MICRO_BATCHES = 4
HIGH_BOUND = 1e4  # on the norm: none of the steps is clipped, though each waits to know it
EXACT = ("stock", "superoffload", "twin_flow")


def main() -> None:
    args = _arguments()
    import torch

    emulated = args.device == "emulated" or (args.device == "auto" and not torch.cuda.is_available())
    suite = Suite(
        out=args.json.parent / f"{args.json.stem}.runs",
        size=args.size or ("tiny" if emulated else "3b"),
        cap_gib=args.cap_gib,
        subgroup=args.subgroup or (20_000 if emulated else 100_000_000),
        emulated=emulated,
        deadline_s=time.monotonic() + 60 * args.minutes,
    )
    suite.out.mkdir(parents=True, exist_ok=True)
    figures = compare(suite, args.only)
    if emulated:
        figures["device_kind"] = "emulated"
    write_record(args.json, "peers", figures)
    show(figures, emulated)
    if figures["correct"] is False:
        sys.exit("ebbtide's bits differ from stock's")


def _arguments() -> argparse.Namespace:
    parser = study_parser("peers", __doc__)
    parser.add_argument("--size", choices=sorted(SIZES), help="of the model; 3b on a GPU")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory to live within")
    parser.add_argument("--subgroup", type=int, help="sub_group_size")
    parser.add_argument("--minutes", type=float, default=30.0, help="nothing runs beyond that")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=PEERS, help="these peers")
    parser.add_argument("--device", choices=["auto", "cuda", "emulated"], default="auto")
    args = parser.parse_args()
    for name in ("cap_gib", "minutes"):
        value = getattr(args, name)
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name.replace('_', '-')} must be > 0, but got {value}")
    return args


def compare(suite: Suite, only: Sequence[str] = PEERS) -> Figures:
    """Train with each compared system, and with ebbtide under the tuner's plan within the memory limit.

    Args:
        only: The systems of `PEERS` to run. Stock DeepSpeed and ebbtide always run.

    Returns:
        ``rows``: Results of each system. ``speedup``: ebbtide over stock DeepSpeed.
        ``speedup_over_best_exact_peer``: ebbtide over the fastest system with the same numerics.
        ``control_identical`` and ``noise``: Bits and time of the second stock run over the first.
        ``correct``: True if ebbtide's bits equal stock's. None if a run failed, or if the two stock
        runs differ.
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
    """Return the name of the stock DeepSpeed run that a system's run is compared with."""
    if name in WITHOUT or name == ACCUMULATING:
        return ACCUMULATING
    return f"stock{UNCLIPPED}" if name.endswith(UNCLIPPED) else "stock"


def _features(suite: Suite) -> dict[str, list[str]]:
    """Return the command-line arguments of the runs that show the gain of each of ebbtide's features.

    There is a run with all features, one without each feature, and one of stock DeepSpeed.
    """
    own = ["--accumulation", str(MICRO_BATCHES), "--clipping", str(HIGH_BOUND)]
    trials, plan = {ACCUMULATING: ["--variant", "stock", *own]}, suite.plan_all_on(MICRO_BATCHES)
    for name, fields in WITHOUT.items():
        path = suite.save_plan(name, plan.with_bits(**fields))
        trials[name] = ["--variant", "ebbtide", "--plan", str(path), *own]
    return trials


def _trials(suite: Suite, only: Sequence[str]) -> dict[str, list[str]]:
    """Return the command-line arguments of all systems' runs, by name.

    The most important runs come first, because the time limit may end the comparison early.
    """
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
    if "superoffload" in only:  # with clipping it does not overlap
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
    """Return ebbtide's speed-up over the fastest exact system that offloads and clips.

    Exact systems train with the numerics of stock DeepSpeed. Stock DeepSpeed itself is one of them.
    """
    if "failed" in ours:
        return None
    others = [
        row["iteration_s"]
        for name, row in rows.items()
        if "failed" not in row and row["variant"].split(":")[0] in EXACT and _reference(name) == "stock"
    ]
    return min(others) / ours["iteration_s"] if others else None


def show(figures: Figures, emulated: bool) -> None:
    """Print a table of the results, with a row for each compared offloading system."""
    table = Table(title="no GPU: every device is host memory" if emulated else "peers")
    columns = (
        "peer",
        "iteration",
        "forward",
        "backward",
        "step",
        "device",
        "host",
        "tokens/s",
        "loss",
        "bits",
        "speed-up",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("peer", "bits") else "right")
    for row in figures["rows"]:
        table.add_row(*_cells(row))
    Console(width=150).print(table)


def _cells(row: Figures) -> list[str]:
    name = str(row.get("name") or row["variant"])
    if "failed" in row:
        return [name, f"failed: {row['failed']}"[:60]]
    times = [f"{row[f'{key}_s'] * 1e3:.0f} ms" for key in ("iteration", "forward", "backward", "step")]
    memory = [_gib(row["device_peak_bytes"]), _gib(row["host_peak_bytes"])]
    words: dict[Any, str] = {True: "same", False: "differ"}
    same = words.get(row.get("bit_identical"), "")
    bits = same if row["exact"] else f"{same} (not exact)"
    speedup = f"{row['speedup']:.2f}x" if "speedup" in row else ""
    best = " (best)" if row.get("best") else ""
    return [name + best, *times, *memory, f"{row['tokens_per_s']:.0f}", f"{row['loss']:.4f}", bits, speedup]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
