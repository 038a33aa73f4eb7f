"""A command group for click that imports each command when needed, and suggests similar names for a mistyped command.

With ``--json``, errors are printed as JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A click group that imports each command from ``"module:attribute"`` when it is needed.

    Args:
        commands_at: Import location by command name. Its order is the order in the help.
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands_at, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.commands_at.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the click command that the arguments name.

        Raises:
            click.UsageError: There is no such command. The error suggests the nearest name.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            near = get_close_matches(args[0].lower(), names, 1)
            meant = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(names)}."
            raise click.UsageError(f"{error.message.rstrip('.')}. {meant}", ctx) from None

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a ``tune`` command. With ``--json`` an error is printed as JSON, in the planning service's format."""
        run: Any = super().main  # Any, because the type of click's `main` does not allow further arguments
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        if not standalone_mode or "--json" not in own or own[:1] == ["run"]:
            return run(args, *more, standalone_mode=standalone_mode, **extra)
        try:
            code = run(args, *more, standalone_mode=False, **extra)
        except click.ClickException as error:
            key = getattr(error, "key", "") or getattr(getattr(error, "param", None), "name", "") or ""
            broken = {"key": key, "rule": error.format_message(), "value": None}
            click.echo(json.dumps({"errors": [broken]}, indent=2))
            code = error.exit_code
        except click.Abort:
            code = 1
        sys.exit(code if isinstance(code, int) else 0)
