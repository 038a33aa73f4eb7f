"""The ``tune`` command. Each of its commands lives in a file of its own under tuner/commands/."""

import click

from tuner.lazy_group import LazyGroup

# Name -> "module:command", in the order of `tune --help`. A module is imported when its command is
# called or listed, so that one command's needs never slow down or break another's.
COMMANDS = {
    "profile": "tuner.commands.profile:profile",
    "plan": "tuner.commands.plan:plan",
    "show": "tuner.commands.show:show",
    "simulate": "tuner.commands.simulate:simulate",
    "search": "tuner.commands.search:search",
    "run": "tuner.commands.run:run",
    "verify": "tuner.commands.verify:verify",
    "doctor": "tuner.commands.doctor:doctor",
    "report": "tuner.commands.report:report",
    "serve": "tuner.commands.serve:serve",
    "checkpoint": "tuner.commands.checkpoint:checkpoint",
    "calibrate": "tuner.commands.calibrate:calibrate",
    "profile-script": "tuner.commands.profile:profile_script",
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    epilog="Example: tune plan --machine machine.json --workload workload.json -o plan.json",
)
@click.version_option(package_name="ebbtide")
def main() -> None:
    """Plans training with CPU-offloaded optimizer state: same bits, less time."""


if __name__ == "__main__":
    main()
