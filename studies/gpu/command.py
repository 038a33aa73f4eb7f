"""Everything that wants a GPU, in one command.

    python -m studies.gpu --out DIR [--minutes 9] [--only PART ...]
    python -m studies.gpu --plot DIR

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

from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.byte_gpt import SIZES
from studies.gpu.parts import PARTS
from studies.gpu.pictures import draw_parts
from studies.gpu.suite import OutOfTimeError, Suite


def main() -> None:
    """Entry point of ``python -m studies.gpu``; exit code 1 if a correctness part fails."""
    args = _arguments()
    if args.plot is not None:
        for picture in draw_parts(args.plot):
            print(picture)
        return
    emulated = args.device == "emulated"
    if not emulated and not torch.cuda.is_available():
        sys.exit("studies.gpu: --device cuda needs a CUDA GPU, but torch finds none: "
                 "use --device emulated for a smoke test")  # fmt: skip
    become_only_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(
        out=args.out, size="tiny" if emulated else args.size, cap_gib=args.cap_gib,
        subgroup=20_000 if emulated else args.subgroup, emulated=emulated,
        deadline_s=time.monotonic() + 60 * args.minutes,
    )  # fmt: skip
    results = {name: _part(name, suite) for name in args.only or PARTS}
    _show(results, emulated)
    if any(figures.get("correct") is False for figures in results.values()):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON files")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw what is in DIR; no GPU needed"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs beyond that")
    parser.add_argument("--size", default="3b", help="of the model, see studies.byte_gpt.SIZES")
    parser.add_argument(
        "--model-b", type=float, help="the same in billions of parameters: 1.3, 3, 7"
    )
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory to live within")
    parser.add_argument("--subgroup", type=int, default=100_000_000, help="sub_group_size")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    args = parser.parse_args()
    if args.plot is None and args.out is None:
        parser.error("one of --out DIR and --plot DIR must be given")
    if args.model_b is not None:
        args.size = f"{args.model_b:g}b"
    if args.size not in SIZES:
        parser.error(
            f"--size (or --model-b) must be one of {', '.join(SIZES)}, but got {args.size}"
        )
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes must be > 0, but got {args.minutes}")
    return args


def _part(name: str, suite: Suite) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        suite.left_s()
        figures = PARTS[name](suite)
    except OutOfTimeError as error:
        return {"skipped": str(error)}
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
