"""The ``tune`` command line. Each subcommand has its own file in ``tuner/commands/``."""

import click
from ebbtide.tuner.lazy_group import LazyGroup

# Name -> "module:command", in the order of `tune --help`. A module is imported only when its command is called or
# listed, so that the imports of one command neither slow down nor break another one.
COMMANDS = {
    "profile": "ebbtide.tuner.commands.profile:profile",
    "plan": "ebbtide.tuner.commands.plan:plan",
    "show": "ebbtide.tuner.commands.show:show",
    "simulate": "ebbtide.tuner.commands.simulate:simulate",
    "search": "ebbtide.tuner.commands.search:search",
    "run": "ebbtide.tuner.commands.run:run",
    "verify": "ebbtide.tuner.commands.verify:verify",
    "doctor": "ebbtide.tuner.commands.doctor:doctor",
    "report": "ebbtide.tuner.commands.report:report",
    "serve": "ebbtide.tuner.commands.serve:serve",
    "checkpoint": "ebbtide.tuner.commands.checkpoint:checkpoint",
    "calibrate": "ebbtide.tuner.commands.calibrate:calibrate",
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"max_content_width": 120},
    epilog="Example: tune plan --machine machine.json --workload workload.json -o plan.json",
)
@click.version_option(package_name="ebbtide")
def main() -> None:
    """Plan and run training with CPU-offloaded optimizer state: the same results bit by bit, in less time."""


if __name__ == "__main__":
    main()
