"""The ``tune report`` command, which writes a training plan as a web page for readers without ebbtide."""

from pathlib import Path

import click
from ebbtide.simulator.page import write_whole
from ebbtide.tuner.commands.options import guarded
from ebbtide.tuner.files import BadInputError, check_kind, read_plan, written
from ebbtide.tuner.lazy_group import Command


@click.command(cls=Command, epilog="Example: tune report plan.json --run runs/demo/trace.json -o report.html")
@click.argument("plan_file", metavar="PLAN")
@click.option("--run", help="Measured timeline: a trace.json written by the demo or the runtime.")
@click.option("-o", "--output", default="report.html", show_default=True, help="File to write.")
@guarded
def report(plan_file: str, run: str | None, output: str) -> None:
    """Write a self-contained web page about a plan: its reasons, and a measured timeline if one is given."""
    from ebbtide.tuner.service.report import read_timelines, report_html

    plan = read_plan(plan_file)
    timelines = []
    if run is not None:
        check_kind("--run", run, "a trace file")
        try:
            timelines = read_timelines(Path(run).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"--run must be a trace file that training under a plan has written, but got {run}: {error}"
            ) from None
    text = report_html(plan, timelines)
    with written("--output", output):
        write_whole(output, text)
    click.echo(f"report written to {output}")
