"""A command group for click that imports each command when needed, and suggests similar names for a mistyped command.

With ``--json``, errors are printed as JSON.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

# Parameters of commands that name a file or a folder, so that Tab completes paths.
PATHS = {
    *("plan_file", "ds_config", "workload", "output", "out", "emit_deepspeed", "trace", "plot", "run", "runs"),
    *("checkpoint_dir", "plan", "directory", "folder", "to", "train_script", "storage_dir", "drive", "db", "json_file"),
}
# Headings of `--help` -> parameters below them. All others are options of the command itself.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "The machine": ("machine", "gpu_memory", "host_memory", "memory_margin", "flops", "gpu_bandwidth", "link"),
    "The training job": (
        *("workload", "model", "ds_config", "sequence", "micro_batch", "accumulation", "zero_stage", "global_batch"),
        *("data_parallel", "tensor_parallel", "pipeline_parallel", "gpus", "launcher", "omp_threads", "clip_rate"),
    ),
    "How the model computes": (
        *("keep_activations", "recompute_share", "kernels", "fused_loss", "no_flash_attention", "flash_version"),
    ),
    "Drives and checkpoints": (*("storage", "endurance", "mtbf", "restart", "checkpoint_dir", "checkpoint_rate"),),
    "Output": ("output", "out", "emit_deepspeed", "trace", "plot", "why", "as_json"),
}
MANY = 12  # options above which `--help` has headings


class Later:
    """Parameters of a command that are made when they are first read, so that ``tune --help`` is fast."""

    def __init__(self, make: Callable[[], Sequence[click.Parameter]]) -> None:
        self.make = make


class Command(click.Command):
    """A click command. Its help shows many options under headings, and keeps each example on one line."""

    declared: list[Any]

    @property
    def params(self) -> list[click.Parameter]:
        self.declared = [made for one in self.declared for made in (one.make() if isinstance(one, Later) else (one,))]
        return self.declared

    @params.setter
    def params(self, given: list[Any]) -> None:
        self.declared = given

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {p.name: record for p in self.get_params(ctx) if (record := p.get_help_record(ctx)) is not None}
        if len(records) <= MANY:
            super().format_options(ctx, formatter)
            return
        named = {name for names in GROUPS.values() for name in names}
        own = ("Options", tuple(name for name in records if name not in named))
        for heading, names in (*GROUPS.items(), own):
            if rows := [records[name] for name in records if name in names]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        _write_examples(self.epilog, formatter)


def _write_examples(epilog: str | None, formatter: click.HelpFormatter) -> None:
    """Write each example on a line that is never broken, so that it can be copied."""
    if epilog:
        formatter.write_paragraph()
        for number, example in enumerate(epilog.removeprefix("Example: ").split("; ")):
            formatter.write(f"{'Example: ' if not number else '         '}{example}\n")


def completed(command: click.Command) -> click.Command:
    """Let Tab complete paths for those parameters of a command that name a file or a folder."""
    for parameter in command.declared if isinstance(command, Command) else command.params:
        if not isinstance(parameter, Later) and parameter.name in PATHS and parameter.type is click.STRING:
            parameter.type = click.Path()
    return command


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
        return completed(getattr(import_module(module), name))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        _write_examples(self.epilog, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with its whole first sentence."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(10_000)) for name, one in named if one is not None])

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
        for stream in (sys.stdout, sys.stderr):  # a locale of ASCII only must not stop a command
            if isinstance(stream, TextIOWrapper) and stream.encoding.lower() in ("ascii", "ansi_x3.4-1968", "us-ascii"):
                stream.reconfigure(errors="backslashreplace")
        run: Any = super().main  # Any, because the type of click's `main` does not allow further arguments
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        if not standalone_mode or "--json" not in own or own[:1] == ["run"]:
            return run(args, *more, standalone_mode=standalone_mode, **extra)
        try:
            code = run(args, *more, standalone_mode=False, **extra)
        except click.ClickException as error:
            key = getattr(error, "key", "") or getattr(getattr(error, "param", None), "name", "") or ""
            broken = {"key": key, "rule": error.format_message(), "value": None} | getattr(error, "fields", {})
            click.echo(json.dumps({"errors": [broken]}, indent=2))
            code = error.exit_code
        except click.Abort:
            code = 1
        sys.exit(code if isinstance(code, int) else 0)
