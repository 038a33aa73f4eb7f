"""The measurements of the ``tune profile`` command: a machine's bandwidths and compute speeds, or the workload of a
training script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from ebbtide.tuner.answer.report import show_machine, show_workload, wide_console
from ebbtide.tuner.files import written
from ebbtide.tuner.progress import progress_after
from pydantic import BaseModel
from rich.console import Console

if TYPE_CHECKING:
    from ebbtide.profiler.launch import Launcher

T = TypeVar("T", bound=BaseModel)


def machine_profile(
    output: str, storage_dir: str | None, drives: Sequence[str], seconds: float, ranks: int, fresh: bool, as_json: bool
) -> None:
    """Measure the rates (such as bandwidths) of this machine, and write them to a file as the machine's profile."""
    from ebbtide.profiler import measure_machine

    stages = []

    # DeepSpeed logs to standard output while it is imported, but standard output is for the result only.
    with progress_after(0.0) as tell, redirect_stdout(sys.stderr):

        def progress(done: int, total: int, stage: str) -> None:
            stages.append(stage)
            tell(done / total, f"{stage} {done}/{total}")

        machine = measure_machine(
            storage_dir, seconds=seconds, ranks=ranks, fresh=fresh, drives=drives, progress=progress
        )
    if not stages:
        click.echo("note: these are the cached results of an earlier measurement. --fresh measures again", err=True)
    with written("--output", output):
        machine.save(output)
    _tell(machine, show_machine, output, as_json)


def script_profile(
    output: str,
    script: str,
    arguments: tuple[str, ...],
    *,
    launcher: Launcher,
    ranks: int = 1,
    iterations: int = 3,
    go_on: bool = False,
    as_json: bool = False,
) -> None:
    """Run an unchanged training script under a launcher of ranks, such as torchrun, and write the script's measured
    workload to a file.

    Raises:
        LaunchError: The script reported no workload, or failed after its report. Its output was shown.
    """
    from ebbtide.profiler.launch import LaunchError, ScriptRun, profile_script

    run = ScriptRun(
        script, arguments, launcher, ranks=ranks, iterations=iterations, go_on=go_on, shown=go_on and not as_json
    )
    try:
        with progress_after(0.0) as tell:
            workload = profile_script(
                run, Path(output), lambda done, total: tell(done / total, f"optimizer steps {done}/{total}")
            )
    except LaunchError as error:
        if error.output:
            click.echo(error.output, err=True)
        raise
    _tell(workload, show_workload, output, as_json)


def _tell(made: T, show: Callable[[T, Console], None], output: str, as_json: bool) -> None:
    if as_json:
        click.echo(made.model_dump_json(indent=2))
        return
    console = wide_console()
    show(made, console)
    console.print(f"written to {output}")
