"""The ``tune doctor`` command: a list of this machine's problems for training, each with its fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from ebbtide.tuner.commands.options import JSON, guarded
from ebbtide.tuner.files import check_contents, read_plan
from ebbtide.tuner.lazy_group import Command

if TYPE_CHECKING:
    from ebbtide.tuner.doctor.finding import Finding

_COLOURS = {"ok": "green", "slow": "yellow", "bad": "red"}


@click.command(cls=Command, epilog="Example: tune doctor --plan plan.json --ranks 8 --checkpoint-dir /checkpoints")
@click.option("--plan", "plan_file", help="Plan file whose need of host memory is checked.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks on this machine."
)
@click.option(
    "--checkpoint-dir", help="Checkpoint folder whose disk is checked (default: checkpoint.dir in the plan file)."
)
@click.option(
    "--ds-config",
    help="DeepSpeed config to check: whether it can train under a plan, and which known defects of the"
    " installed DeepSpeed it would meet.",
)
@JSON
@guarded
def doctor(plan_file: str | None, ranks: int, checkpoint_dir: str | None, ds_config: str | None, as_json: bool) -> None:
    """Look for problems of this machine that would stop or slow down training.

    Exit code 0: No problem, or only settings that make training slower, which are shown. Exit code 1: A problem
    must be fixed first.
    """
    from ebbtide.simulator.estimates.deepspeed_keys import read_file
    from ebbtide.simulator.page import DEEPSPEED_CONFIG
    from ebbtide.tuner.doctor.examination import whole

    plan = read_plan(plan_file, "--plan") if plan_file is not None else None
    config = None
    if ds_config is not None:
        config = read_file(ds_config)
        check_contents("--ds-config", ds_config, config, DEEPSPEED_CONFIG)
    folder = checkpoint_dir or (plan.checkpoint.dir if plan is not None else None)
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output while it is imported
        findings = whole(plan, ranks, folder, config)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings)
    sys.exit(int(any(finding.state == "bad" for finding in findings)))


def show(findings: Sequence[Finding], *, err: bool = False) -> None:
    """Print a line for each problem that ``tune doctor`` found, with its fix below. Colors are for terminals only."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=err, soft_wrap=True)  # rich handles NO_COLOR, TERM=dumb and pipes
    for finding in findings:
        line = Text(f"{finding.state:5}", style=_COLOURS[finding.state])
        line.append(f"{finding.name:18} {finding.detail}", style="default")
        console.print(line)
        if finding.fix:
            console.print(Text(f"     fix: {finding.fix}"))
