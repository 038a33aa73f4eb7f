"""All checks and measurements of ebbtide that need a GPU, in one command or part by part.

    python -m studies.gpu --out DIR [--part smoke] [--minutes 9]
    python -m studies.gpu --rehearse [--out DIR]     every part without a GPU, at toy sizes
    python -m studies.gpu --plot DIR                 pictures of the results in DIR

The parts are smoke (quick checks), contract (are results bit-identical to stock DeepSpeed's?), stages (the cost of each
ZeRO stage, with small and large batches), baseline (speed against stock DeepSpeed), peers (speed against other
offloading systems), speed (efficiency, gain of each feature, accuracy of predictions), parameters (16-bit parameters in
host memory) and checkpoints (stalls). By default, stages, baseline and speed train a model of 1.3 B parameters, and
peers and parameters a model of 3 B. A part consists of sections, which can also be named after --part. Each section
runs in its own process, which writes its result to DIR/SECTION.json and its output to DIR/logs/. If a section fails,
the others still run. If the command is started again, it continues with what is missing. DIR/results.tar.gz holds all
results.
"""

import argparse
import json
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from studies.bench.byte_gpt import SIZES
from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.gpu.parts import BUDGET_S, CAPS_GIB, PARTS, SECTIONS, SIZES_OF_PARTS, sections_of
from studies.gpu.pictures import draw_parts
from studies.gpu.suite import OutOfTimeError, Suite

ARCHIVE = "results.tar.gz"
ARCHIVED_BYTES = 8 * 2**20  # largest file in the archive, which excludes leftovers of the storage benchmark


def main(arguments: list[str] | None = None) -> None:
    """Run the command that checks and measures ebbtide on a GPU.

    The command exits with code 1 if a check or measurement fails, or if training under ebbtide differs from stock
    DeepSpeed in a bit.
    """
    args = _arguments(arguments)
    if args.plot is not None:
        for picture in draw_parts(args.plot):
            print(picture)
        return
    if args.section is not None:
        _section(args.section, args)
        return
    if args.rehearse and args.out is None:
        with tempfile.TemporaryDirectory(prefix="ebbtide-rehearsal-") as folder:
            args.out = Path(folder)
            _run(args)
        return
    _run(args)


def _run(args: argparse.Namespace) -> None:
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit(
            "studies.gpu: --device cuda needs a CUDA GPU, but torch finds none: "
            "use --rehearse, which runs every part at toy sizes"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * args.minutes
    results = {}
    for part, section in sections_of(args.part):
        suite = _suite(args, part, deadline_s)
        results[section] = _in_a_process(section, suite, args)
        archive(args.out)
    _show(results, args.rehearse)
    bad = [
        n
        for n, f in results.items()
        if f.get("failed") or f.get("correct") is False or (args.rehearse and f.get("skipped"))
    ]
    if bad:
        sys.exit(f"studies.gpu: failed or with other bits: {', '.join(bad)}")


def _suite(args: argparse.Namespace, part: str, deadline_s: float) -> Suite:
    size = "tiny" if args.rehearse else args.size or SIZES_OF_PARTS.get(part, "1.3b")
    return Suite(
        out=args.out,
        size=size,
        cap_gib=args.cap_gib or CAPS_GIB.get(part, 24.0),
        subgroup=20_000 if args.rehearse else args.subgroup,
        emulated=args.rehearse,
        deadline_s=deadline_s,
        again=args.again,
        at_once=2 if args.rehearse else 1,
        host_gib=args.host_gib,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*PARTS, *(s for s in SECTIONS if s not in PARTS)]
    parser.add_argument("--out", type=Path, help="folder for the results of this study")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="only draw pictures of the results in DIR")
    parser.add_argument(
        "--part",
        "--only",
        nargs="+",
        choices=names,
        default=[],
        metavar="NAME",
        help=f"run only these parts of the study, or only these sections of a part: {', '.join(names)}",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which the command stops")
    parser.add_argument("--rehearse", action="store_true", help="run the whole study without a GPU, with tiny models")
    parser.add_argument("--again", action="store_true", help="also repeat sections that have a result in --out")
    parser.add_argument("--size", help="size of the model, a key of studies.bench.byte_gpt.SIZES")
    parser.add_argument(
        "--model-b",
        type=float,
        help="size of the model in billions of parameters (1.3, 3 or 7). This option replaces --size",
    )
    parser.add_argument("--cap-gib", type=float, help="limit on GPU memory, in GiB")
    parser.add_argument(
        "--host-gib", type=float, help="host memory in GiB for which plans are made (default: as the system reports it)"
    )
    parser.add_argument(
        "--subgroup", type=int, default=100_000_000, help="elements per subgroup (DeepSpeed's sub_group_size)"
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "emulated"],
        default="cuda",
        help="device that trains the models: cuda, or emulated (no GPU is used, as with --rehearse)",
    )
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    return parser


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    args.rehearse = args.rehearse or args.device == "emulated"
    if args.plot is None and args.out is None and not args.rehearse:
        parser.error("one of --out DIR and --plot DIR must be given")
    if args.model_b is not None:
        args.size = f"{args.model_b:g}b"
    if args.size is not None and args.size not in SIZES:
        parser.error(f"--size (or --model-b) must be one of {', '.join(SIZES)}, but got {args.size}")
    for name, value in (("cap-gib", args.cap_gib), ("host-gib", args.host_gib), ("minutes", args.minutes)):
        if value is not None and not 0 < value < 1e6:
            parser.error(f"--{name} must be > 0, but got {value}")
    return args


# -- a section -----------------------------------------------------------------------------------


def _in_a_process(name: str, suite: Suite, args: argparse.Namespace) -> dict[str, Any]:
    path = suite.out / f"{name}.json"
    if not suite.again and (known := _whole(path, suite)) is not None:
        return known
    path.unlink(missing_ok=True)
    try:
        limit_s = suite.left_s(BUDGET_S[name])
    except OutOfTimeError as error:
        return {"skipped": str(error)}
    command = [
        "studies.gpu",
        "--section",
        name,
        "--out",
        str(suite.out),
        "--size",
        suite.size,
        "--cap-gib",
        str(suite.cap_gib),
        "--subgroup",
        str(suite.subgroup),
        "--minutes",
        str(max(0.05, limit_s / 60 - 0.1)),
        *(["--host-gib", str(args.host_gib)] if args.host_gib else []),
        *(["--rehearse"] if args.rehearse else []),
        *(["--again"] if suite.again else []),
    ]
    # A section ends itself at its limit. If it does not, it is ended ten seconds later.
    failed = suite.run(name, command, limit_s + 10.0)
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if failed is not None and "failed" not in figures:
        figures["failed"] = failed
        write_record(path, f"gpu.{name}", _marked(figures, suite))
    return figures


def _whole(path: Path, suite: Suite) -> dict[str, Any] | None:
    if not path.exists():
        return None
    known: dict[str, Any] = json.loads(path.read_text())
    rows = known.get("rows", [])
    failed = known.get("failed") or any("failed" in row for row in rows)
    same = known.get("size") == suite.size
    return known if same and not failed and not known.get("left_out") else None


def _section(name: str, args: argparse.Namespace) -> None:
    begun = time.monotonic()
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit("a section needs a CUDA GPU, but torch finds none: use --rehearse")
    become_only_rank()
    part = next(part for part, sections in PARTS.items() if name in sections)
    suite = _suite(args, part, begun + 60 * args.minutes)
    try:
        suite.left_s()
        figures = SECTIONS[name](suite)
    except Exception as error:  # the record has a short form, and stderr the whole traceback
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}"}
    figures |= {"seconds": round(time.monotonic() - begun, 1), "size": suite.size}
    write_record(suite.out / f"{name}.json", f"gpu.{name}", _marked(figures, suite))


def _marked(figures: dict[str, Any], suite: Suite) -> dict[str, Any]:
    return figures | {"device_kind": "emulated"} if suite.emulated else figures


# -- what comes of it ----------------------------------------------------------------------------


def archive(folder: Path) -> Path:
    """Pack all results, logs and pictures of the GPU suite's folder into one archive, and return the archive's path.

    The archive is written whole or not at all.
    """
    path = folder / ARCHIVE
    temporary = path.with_suffix(".part")
    kept = {".json", ".png", ".stderr", ".stdout", ".command"}
    with tarfile.open(temporary, "w:gz") as tar:
        for file in sorted(folder.rglob("*")):
            if file.suffix in kept and file.stat().st_size <= ARCHIVED_BYTES:
                tar.add(file, file.relative_to(folder))
    temporary.replace(path)
    return path


def _show(results: dict[str, dict[str, Any]], emulated: bool) -> None:
    table = Table(title="emulated: no GPU figures" if emulated else torch.cuda.get_device_name())
    for column in ("section", "result", "seconds"):
        table.add_column(column)
    shown = (
        "differing",
        "summary",
        "speedup",
        "speedup_over_best_exact_peer",
        "noise",
        "efficiency",
        "median_abs_pct_error",
        "failed",
        "skipped",
        "correct",
    )
    for name, figures in results.items():
        words = [f"{key}: {figures[key]}" for key in shown if figures.get(key) not in (None, [])]
        table.add_row(name, "; ".join(words)[:200] or "done", str(figures.get("seconds", "")))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
