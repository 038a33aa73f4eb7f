"""Takes a workload from an unchanged training script.

    python -m profiler.script --out workload.json -- train.py --epochs 1

Also under a launcher, as the script itself would be: ``torchrun --nproc-per-node 2 -m
profiler.script ...``. ``deepspeed.initialize`` is wrapped, so that the first steps of the engine it
returns are profiled; then rank 0 writes the workload and the script is stopped.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiler.workload import WARMUP_STEPS, PassiveProfile


class _EnoughError(BaseException):
    """Ends the script from inside its own loop; not an Exception, so that none swallows it."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``python -m profiler.script``."""
    parser = argparse.ArgumentParser(
        prog="python -m profiler.script",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="where workload.json goes")
    parser.add_argument("--iterations", type=int, default=5, help="optimizer steps to profile")
    parser.add_argument("--continue", dest="go_on", action="store_true",
                        help="let the script run to its end afterwards")  # fmt: skip
    parser.add_argument("script", nargs="+", help="the training script and its arguments")
    args = parser.parse_args(argv)
    script = Path(args.script[0])
    if not script.is_file():
        parser.error(f"the script must be a file, but got {script}")
    written = run(script, args.script[1:], args.out, args.iterations, go_on=args.go_on)
    if not written:
        needed = args.iterations + WARMUP_STEPS
        parser.error(
            f"the script must take at least {needed} optimizer steps on a DeepSpeed ZeRO-3 engine, "
            "but ended before: nothing was written (--iterations)"
        )


def run(script: Path, arguments: list[str], out: Path, iterations: int, *, go_on: bool) -> bool:
    """Runs the script; True once the workload is written."""
    import deepspeed

    written: list[bool] = []
    original = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _watch(result[0], out, iterations, lambda: _done(written, go_on))
        return result

    deepspeed.initialize = initialize
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _EnoughError:
        pass
    finally:
        deepspeed.initialize = original
    return bool(written)


def _done(written: list[bool], go_on: bool) -> None:
    written.append(True)
    if not go_on:
        raise _EnoughError


def _watch(engine: Any, out: Path, iterations: int, done: Callable[[], None]) -> None:
    """Profiles the engine's first steps, whoever drives them."""
    profile = PassiveProfile(engine, iterations)
    step = engine.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        workload = profile.on_step()
        if workload is not None:
            engine.step = step
            if int(os.environ.get("RANK", "0")) == 0:
                workload.save(out)
            done()
        return result

    engine.step = stepped


if __name__ == "__main__":
    main()
