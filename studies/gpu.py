"""Everything that wants a GPU, in one command.

    python -m studies.gpu --out DIR [--minutes 9] [--only PART ...]

Each part writes its JSON as it finishes, so that an interrupted run brings home what it has. On a
machine without a GPU, ``--device emulated`` runs all parts at a tiny size: a smoke test.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from studies.gpu_parts import PARTS, Suite
from studies.rank import become_only_rank
from studies.record import write_record


def main() -> None:
    """Entry point of ``python -m studies.gpu``; exit code 1 if a correctness part fails."""
    args = _arguments()
    emulated = args.device == "emulated"
    if not emulated and not torch.cuda.is_available():
        sys.exit("studies.gpu: --device cuda needs a CUDA GPU, but torch finds none: "
                 "use --device emulated for a smoke test")  # fmt: skip
    become_only_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(
        out=args.out, size="tiny" if emulated else args.size, cap_gib=args.cap_gib,
        subgroup=20_000 if emulated else args.subgroup, emulated=emulated,
    )  # fmt: skip
    deadline = time.monotonic() + 60 * args.minutes
    results = {name: _part(name, suite, deadline) for name in args.only or PARTS}
    _show(results, emulated)
    if any(figures.get("correct") is False for figures in results.values()):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part starts after that")
    parser.add_argument("--size", default="3b", help="of the model, see studies.byte_gpt.SIZES")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory to live within")
    parser.add_argument("--subgroup", type=int, default=100_000_000, help="sub_group_size")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    return parser.parse_args()


def _part(name: str, suite: Suite, deadline: float) -> dict[str, Any]:
    if time.monotonic() > deadline:
        return {"skipped": "out of time (--minutes)"}
    begun = time.monotonic()
    try:
        figures = PARTS[name](suite)
    except Exception as error:  # noqa: BLE001 - the other parts still run; the record says how
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}"}
    figures["seconds"] = round(time.monotonic() - begun, 1)
    if suite.emulated:
        figures["device_kind"] = "emulated"
    write_record(suite.out / f"{name}.json", f"gpu.{name}", figures)
    return figures


def _show(results: dict[str, dict[str, Any]], emulated: bool) -> None:
    table = Table(title="emulated: no GPU figures" if emulated else torch.cuda.get_device_name())
    for column in ("part", "result", "seconds"):
        table.add_column(column)
    told = ("differing", "summary", "speedup", "efficiency", "median_abs_pct_error", "failed",
            "skipped", "correct")  # fmt: skip
    for name, figures in results.items():
        words = [f"{key}: {figures[key]}" for key in told if figures.get(key) not in (None, [])]
        table.add_row(name, "; ".join(words)[:120] or "done", str(figures.get("seconds", "")))
    Console().print(table)


if __name__ == "__main__":
    main()
