"""Comparison of ebbtide with other offloading systems: same model, memory limit, seeds and steps.

    python -m studies.peers --json peers.json --size 3b --cap-gib 24
    python -m studies.peers --json peers.json --device emulated      # tiny, without a GPU

Each system runs in its own process, one after the other. Stock DeepSpeed runs twice, with pinned memory and bound to
cores near the GPU. The second run is the control: if it is not bit-identical to the first one, a difference between
ebbtide and stock DeepSpeed does not count as an error. Twin-Flow runs at several ratios, and the best ratio that fits
counts. ZenFlow trains with stale updates, torchao with 16-bit masters, and DeepCompile with other kernels, so these
systems are marked as not exact. If a system fails, the result table gives the reason.

Further runs are made with ebbtide: with all features of a plan, and with one feature off at a time. The steps of these
runs have several micro-batches and never clip gradients. The runs are compared with a run of stock DeepSpeed with such
steps. Without a GPU, host memory stands in for the device, and no number is a GPU measurement.
"""

import argparse
import math
import sys
import time

from rich.console import Console

from studies.bench.byte_gpt import SIZES
from studies.bench.console import study_parser, tables
from studies.bench.record import write_record
from studies.gpu.comparison import PEERS, compare
from studies.gpu.suite import Figures, Suite

# Fields of a row that the table shows. The record also has the machine, the versions and the command.
TIMES = ("iteration_s", "forward_s", "backward_s", "step_s", "tokens_per_s", "speedup")
SHOWN = ("name", *TIMES, "device_peak_bytes", "host_peak_bytes", "loss", "exact", "bit_identical", "best")


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
    show(figures)
    if figures["correct"] is False:
        sys.exit("ebbtide's bits differ from stock's")


def show(figures: Figures) -> None:
    """Print a table of the offloading systems that ran, and why the others failed."""
    ran = [{key: row[key] for key in SHOWN if key in row} for row in figures["rows"] if "failed" not in row]
    console = Console(width=170)
    console.print(*tables("peers", figures | {"rows": ran}))
    for row in figures["rows"]:
        if "failed" in row:
            console.print(f"{row['variant']} failed: {row['failed']}")


def _arguments() -> argparse.Namespace:
    parser = study_parser("peers", __doc__)
    parser.add_argument("--size", choices=sorted(SIZES), help="model size (default on a GPU: 3b)")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="limit on GPU memory, in GiB")
    parser.add_argument("--subgroup", type=int, help="elements per subgroup (DeepSpeed's sub_group_size)")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes after which the comparison stops")
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="offloading systems to compare (default: all)"
    )
    parser.add_argument("--device", choices=["auto", "cuda", "emulated"], default="auto")
    args = parser.parse_args()
    for name in ("cap_gib", "minutes"):
        value = getattr(args, name)
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name.replace('_', '-')} must be > 0, but got {value}")
    return args


if __name__ == "__main__":
    main()
