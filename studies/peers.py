"""ebbtide and its peers: one process after another, same model, memory cap, seeds and steps.

    python -m studies.peers --json peers.json --size 3b --cap-gib 24
    python -m studies.peers --json peers.json --device emulated      # tiny, without a GPU

Twin-Flow is run at several ratios, its best one that fits counts. ZenFlow trains with stale updates
and torchao with 16-bit masters: both are marked as not exact. A peer that fails is a row that says
how. Without a GPU every device is host memory: no figure of such a run is a GPU figure.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from studies.bench.record import write_record
from studies.byte_gpt import SIZES
from studies.gpu.suite import Figures, Suite

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5)
PEERS = ("superoffload", "twin_flow", "zenflow", "torchao", "no_offload")
EXACT = ("stock", "superoffload", "twin_flow")


def main() -> None:
    """Entry point of ``python -m studies.peers``."""
    args = _arguments()
    import torch

    emulated = args.device == "emulated" or (
        args.device == "auto" and not torch.cuda.is_available()
    )
    suite = Suite(
        out=args.json.parent / f"{args.json.stem}.runs",
        size=args.size or ("tiny" if emulated else "3b"),
        cap_gib=args.cap_gib, subgroup=args.subgroup or (20_000 if emulated else 100_000_000),
        emulated=emulated, deadline_s=time.monotonic() + 60 * args.minutes,
    )  # fmt: skip
    suite.out.mkdir(parents=True, exist_ok=True)
    figures = compare(suite, args.only)
    if emulated:
        figures["device_kind"] = "emulated"
    write_record(args.json, "peers", figures)
    show(figures, emulated)
    if figures["correct"] is False:
        sys.exit("ebbtide's bits differ from stock's")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
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
    """Runs everybody; ebbtide under the tuner's plan within the cap.

    Args:
        only: some of PEERS; stock and ebbtide always run.

    Returns:
        ``rows``, ``speedup`` against stock, ``speedup_over_best_exact_peer``, and ``correct``:
        ebbtide's bits are stock's (None: one of the two failed).
    """
    suite.plan()
    stock = suite.trial("stock", "--variant", "stock")
    ours = suite.trial("ebbtide", "--variant", "ebbtide", "--plan", str(suite.out / "plan.json"))
    rows = [stock, ours]
    unclipped: Figures = {"failed": "not run"}
    if "superoffload" in only:
        without = ("--clipping", "0")
        unclipped = suite.trial("stock_no_clipping", "--variant", "stock", *without)
        rows += [
            unclipped,
            suite.trial("superoffload", "--variant", "superoffload"),
            suite.trial("superoffload_no_clipping", "--variant", "superoffload", *without),
        ]
    rows += _twin_flow(suite) if "twin_flow" in only else []
    rows += [suite.trial(n, "--variant", n) for n in ("zenflow", "torchao", "no_offload")
             if n in only]  # fmt: skip
    for row in rows:
        _compared(row, unclipped if str(row.get("name")).endswith("no_clipping") else stock)
    return {
        "rows": rows,
        "speedup": ours.get("speedup"),
        "speedup_over_best_exact_peer": _over_best(rows, ours),
        "correct": ours.get("bit_identical"),
    }


def _compared(row: Figures, reference: Figures) -> None:
    if "failed" not in row and "failed" not in reference:
        row["bit_identical"] = row["hash"] == reference["hash"]
        row["speedup"] = reference["iteration_s"] / row["iteration_s"]


def _twin_flow(suite: Suite) -> list[Figures]:
    """All ratios that were tried; the fastest is marked ``best``."""
    ratios = RATIOS[:2] if suite.emulated else RATIOS
    rows = [suite.trial(f"twin_flow_{r}", "--variant", f"twin_flow:{r}") for r in ratios]
    ran = [row for row in rows if "failed" not in row]
    if ran:
        min(ran, key=lambda row: row["iteration_s"])["best"] = True
    return rows


def _over_best(rows: list[Figures], ours: Figures) -> float | None:
    """Against the fastest exact peer that offloads as clipping demands, stock among them."""
    if "failed" in ours:
        return None
    others = [
        row["iteration_s"]
        for row in rows
        if "failed" not in row
        and row["variant"].split(":")[0] in EXACT
        and not row["name"].endswith("no_clipping")
    ]
    return min(others) / ours["iteration_s"] if others else None


def show(figures: Figures, emulated: bool) -> None:
    """Prints a row each."""
    table = Table(title="no GPU: every device is host memory" if emulated else "peers")
    columns = ("peer", "iteration", "forward", "backward", "step", "device", "host", "tokens/s",
               "loss", "bits", "speed-up")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("peer", "bits") else "right")
    for row in figures["rows"]:
        table.add_row(*_cells(row))
    Console(width=150).print(table)


def _cells(row: Figures) -> list[str]:
    name = str(row.get("name") or row["variant"])
    if "failed" in row:
        return [name, f"failed: {row['failed']}"[:60]]
    times = [f"{row[f'{key}_s'] * 1e3:.0f} ms" for key in ("iteration", "forward", "backward",
                                                            "step")]  # fmt: skip
    memory = [_gib(row["device_peak_bytes"]), _gib(row["host_peak_bytes"])]
    told: dict[Any, str] = {True: "same", False: "differ"}
    same = told.get(row.get("bit_identical"), "")
    bits = same if row["exact"] else f"{same} (not exact)"
    speedup = f"{row['speedup']:.2f}x" if "speedup" in row else ""
    best = " (best)" if row.get("best") else ""
    return [name + best, *times, *memory, f"{row['tokens_per_s']:.0f}", f"{row['loss']:.4f}", bits,
            speedup]  # fmt: skip


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
