"""The program that profiles an unchanged training script: it runs the script and measures the script's workload.

    python -m ebbtide.profiler.script --out workload.json -- train.py --epochs 1

The program can also be started by the script's launcher: ``torchrun --nproc-per-node 2 -m
ebbtide.profiler.script ...`` or ``deepspeed --num_gpus 2 --module ebbtide.profiler.script ...``.

It wraps ``deepspeed.initialize`` in order to profile the first training steps of the script's engine. Then
rank 0 writes the workload to the file, and the script is stopped.
"""

import argparse
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.profiler.engine import PassiveProfile, steps_needed
from ebbtide.profiler.progress import FAILED, ProgressFile
from ebbtide.runtime.hardware.launcher import rank


class ScriptError(RuntimeError):
    """An error: no workload could be measured from a training script, or the script failed after the measurement."""


class _StopError(BaseException):
    """An exception that stops a training script in the middle of its own loop, once its profile is complete.

    The base class is BaseException, so that the script's handlers for Exception do not catch the exception.
    """


def main(argv: list[str] | None = None) -> None:
    """Run a training script and measure its workload, as ``python -m ebbtide.profiler.script`` does.

    On failure, print the reason to stderr and exit with code 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not words or not Path(words[0]).is_file():
        parser.error(f"the script must be a file, but got {words[0] if words else 'nothing'}")
    if args.iterations < 1:
        parser.error(f"--iterations must be >= 1, but got {args.iterations}")
    if not args.out.resolve().parent.is_dir():
        parser.error(f"--out must lie in a folder that exists, but got {args.out}")
    number = rank()
    # The deepspeed launcher passes this argument to the script, which may require it.
    own = [f"--local_rank={args.local_rank}"] if args.local_rank is not None else []
    profiled = ProfiledScript(
        args.out.resolve(), args.iterations, number, ProgressFile(args.report, number), go_on=args.go_on
    )
    try:
        profiled.run(Path(words[0]), [*own, *words[1:]])
        _leave_job()
    except ScriptError as error:
        profiled.tell(str(error))
        sys.stdout.flush()
        print(f"{FAILED} {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ebbtide.profiler.script",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="path of the workload file to write")
    parser.add_argument("--iterations", type=int, default=5, help="number of optimizer steps to profile")
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="let the training script run to its end after the profiled steps, instead of stopping it",
    )
    parser.add_argument(
        "--report",
        type=Path,
        help="folder in which each rank writes a file with the number of optimizer steps that it has taken",
    )
    parser.add_argument(
        "--local_rank", "--local-rank", help="local rank from the launcher, passed on to the training script"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- and then the training script and its arguments")
    return parser


def initialize(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Leave an engine with the key ``"ebbtide"`` to DeepSpeed, which is profiled. `frontdoor.hook` calls this."""
    return original(*args, **kwargs)


class ProfiledScript:
    """A run of a training script, during which the script's first DeepSpeed engine is profiled."""

    def __init__(self, out: Path, iterations: int, rank: int, progress: ProgressFile, *, go_on: bool) -> None:
        self._out, self._iterations, self._rank = out, iterations, rank
        self._progress, self._go_on = progress, go_on
        self._profiles: list[PassiveProfile] = []
        self._refusal = ""
        self._written = False

    def run(self, script: Path, arguments: list[str]) -> None:
        """Run a training script until its workload is measured and written, or to its end if the user asked for that.

        Raises:
            ScriptError: The script ended too early, failed, or cannot be profiled.
        """
        from ebbtide.runtime.frontdoor import hook

        hook.enable("ebbtide.profiler.script", tells=False)  # before Accelerate reads the key "ebbtide"
        import deepspeed

        original = deepspeed.initialize

        def initialize(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._watch(result[0])
            return result

        deepspeed.initialize = initialize
        try:
            failure = _run_as_main(script, arguments)
        finally:
            deepspeed.initialize = original
            hook.disable()
            for profile in self._profiles:
                profile.stop()
        self._judge(failure)

    def tell(self, error: str = "") -> None:
        """Write this rank's number of optimizer steps so far, and an error if any, to the rank's progress file."""
        steps = max((profile.steps for profile in self._profiles), default=0)
        self._progress.tell(steps, steps_needed(self._iterations), error)

    def _watch(self, engine: Any) -> None:
        if self._written or getattr(engine, "optimizer", None) is None:
            return
        try:
            profile = PassiveProfile(engine, self._iterations, self._after_step)
        except ValueError as error:
            self._refuse(error)
        self._profiles.append(profile)
        self.tell()

    def _after_step(self, profile: PassiveProfile) -> None:
        self.tell()
        if profile.problem is not None:
            self._refuse(profile.problem)
        if profile.workload is None or self._written:
            return
        if self._rank == 0:
            profile.workload.save(self._out)
        self._written = True
        if not self._go_on:
            raise _StopError

    def _refuse(self, error: ValueError) -> None:
        self._refusal = str(error)
        raise _StopError from error

    def _judge(self, failure: str) -> None:
        needed = steps_needed(self._iterations)
        steps = max((profile.steps for profile in self._profiles), default=0)
        if self._refusal:
            raise ScriptError(f"the script cannot be profiled: {self._refusal}")
        if self._written and failure:
            raise ScriptError(f"the workload was written, but later the script {failure}")
        if failure:
            raise ScriptError(
                f"the script must run until {needed} optimizer steps are taken (--iterations), "
                f"but it {failure} after {steps}"
            )
        if not self._profiles:
            raise ScriptError(
                "the script must train an engine made by deepspeed.initialize, but ended without "
                "one: nothing was written"
            )
        if not self._written:
            raise ScriptError(
                f"the script must take at least {needed} optimizer steps on a DeepSpeed "
                f"engine (--iterations), but ended after {steps}: nothing was written"
            )


def _run_as_main(script: Path, arguments: list[str]) -> str:
    ours = sys.argv, sys.path[0]
    sys.argv = [str(script), *arguments]
    # ``python -m`` puts the current folder there, but ``python script`` the script's folder.
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _StopError:
        return ""
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return f"exited with code {ended.code!r}" if ended.code else ""
    except Exception as error:  # the script may raise any error, which is reported
        traceback.print_exc()
        return f"raised {type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[0] = ours
    return ""


def _leave_job() -> None:
    """Destroy torch's process group, since the exit of a rank may fail while the group is open."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
