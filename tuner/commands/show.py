"""The ``tune show`` command, which prints a training plan as text."""

import click
from ebbtide.tuner.commands.options import JSON, guarded
from ebbtide.tuner.files import read_plan
from ebbtide.tuner.lazy_group import Command


@click.command(cls=Command, epilog="Example: tune show plan.json")
@click.argument("plan_file", metavar="PLAN")
@JSON
@guarded
def show(plan_file: str, as_json: bool) -> None:
    """Show a plan: its placements, its prediction, the alternatives that are slower, and the reasons."""
    from ebbtide.tuner.answer.report import show_plan, wide_console

    result = read_plan(plan_file)
    if as_json:
        click.echo(result.model_dump_json(indent=2))
    else:
        show_plan(result, wide_console())
