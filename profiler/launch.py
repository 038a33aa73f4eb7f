"""Profiling of a training script: a launcher starts the script in separate processes, which measure its workload."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ebbtide.profiler.progress import FAILED, first_error, read_progress
from ebbtide.runtime.hardware.launcher import free_port, only_rank, remove_shared_buffers
from ebbtide.simulator.workload import Workload

Launcher = Literal["none", "torchrun", "deepspeed"]
LAUNCHERS: tuple[Launcher, ...] = ("none", "torchrun", "deepspeed")
POLL_S = 0.1
SHOWN_LINES = 30  # most lines of a failed script's output that are shown
END_S = 10.0  # time in which an interrupted launcher must end its ranks


class LaunchError(RuntimeError):
    """An error: a training script could not be profiled, so that there is no measured workload."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class ScriptRun:
    """A training script to profile, and the way to run it.

    Attributes:
        launcher: Program that starts the ranks. ``none`` runs ``python script``.
        iterations: Number of optimizer steps to measure.
        go_on: True if the script runs to its end after the profile is complete. Otherwise it is stopped.
        shown: True if the script's output is shown. Otherwise it is shown only after a failure.
    """

    script: str
    arguments: tuple[str, ...] = ()
    launcher: Launcher = "torchrun"
    ranks: int = 1
    iterations: int = 3
    go_on: bool = False
    shown: bool = False

    def __post_init__(self) -> None:
        if not Path(self.script).is_file():
            raise ValueError(f"the script must be a file, but got {self.script} (--train-script)")
        if self.launcher not in LAUNCHERS:
            raise ValueError(
                f"the launcher must be one of {', '.join(LAUNCHERS)}, but got {self.launcher!r} (--launcher)"
            )
        if self.ranks < 1 or (self.launcher == "none" and self.ranks > 1):
            raise ValueError(
                "ranks must be >= 1, and 1 without a launcher, but got "
                f"{self.ranks} with launcher {self.launcher!r} (--ranks, --launcher)"
            )
        if self.iterations < 1:
            raise ValueError(f"iterations must be >= 1, but got {self.iterations} (--iterations)")

    def command(self, out: Path, report: Path, port: int) -> list[str]:
        """Return the launcher's command line that runs a training script under the profiler, as a list of arguments."""
        python = [sys.executable, "-m"]
        ours = [
            "ebbtide.profiler.script",
            "--out",
            str(out),
            "--report",
            str(report),
            "--iterations",
            str(self.iterations),
        ]
        ours += ["--continue"] * self.go_on + ["--", self.script, *self.arguments]
        if self.launcher == "torchrun":
            count = f"--nproc-per-node={self.ranks}"
            return [*python, "torch.distributed.run", count, f"--master-port={port}", "-m", *ours]
        if self.launcher == "deepspeed":
            # Without the empty option, the machine's host file would also start ranks on other nodes.
            here = ["--hostfile=", f"--num_gpus={self.ranks}", f"--master_port={port}", "--module"]
            return [*python, "deepspeed.launcher.runner", *here, *ours]
        return [*python, *ours]


def profile_script(run: ScriptRun, out: Path, progress: Callable[[int, int], object] | None = None) -> Workload:
    """Run an unchanged training script until the profiler has measured its workload, and write the workload to a file.

    Args:
        progress: Called with the number of optimizer steps that the slowest rank has taken, and the number needed.

    Raises:
        LaunchError: The script ended too early, crashed, or cannot be profiled.
    """
    out = out.resolve()
    if not out.parent.is_dir():
        raise LaunchError(f"the workload file (-o) must lie in a folder that exists, but got {out}")
    with tempfile.TemporaryDirectory() as scratch:
        fresh, log = Path(scratch) / "workload.json", Path(scratch) / "output.txt"
        code = _run(run, fresh, log, progress)
        workload = Workload.load(fresh) if fresh.exists() else None
        if workload is not None:
            workload.save(out)
        if code or workload is None:
            reason = first_error(read_progress(fresh.parent)) or _silent_end(run, code)
            raise LaunchError(reason, _end_of(log))
    return workload


def _run(run: ScriptRun, fresh: Path, log: Path, progress: Callable[[int, int], object] | None) -> int:
    port = free_port()
    command = run.command(fresh, fresh.parent, port)
    with ExitStack() as stack:
        to = None if run.shown else stack.enter_context(log.open("w", encoding="utf-8"))
        stack.callback(remove_shared_buffers, port)
        environment = {**os.environ, **(only_rank(os.environ) if run.launcher == "none" else {})}
        process = subprocess.Popen(command, stdout=to, stderr=to and subprocess.STDOUT, env=environment)
        stack.callback(_end, process)
        while True:
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                _tell(fresh.parent, progress)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    failed = next((n for n, line in enumerate(lines) if FAILED in line), len(lines))
    return "\n".join(lines[max(0, failed - SHOWN_LINES) : failed])


def _tell(report: Path, progress: Callable[[int, int], object] | None) -> None:
    ranks = read_progress(report)
    if ranks and progress is not None:
        slowest = min(ranks, key=lambda rank: rank.steps)
        progress(slowest.steps, slowest.needed)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _silent_end(run: ScriptRun, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    who = "the script" if run.launcher == "none" else f"the {run.launcher} launcher"
    return f"the script must run until its steps are profiled, but {who} {how} before that"
