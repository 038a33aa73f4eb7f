"""A script that writes the reference pages docs/cli.md and docs/plan-file.md from the code.

Run it as ``python scripts/reference.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import click
from ebbtide.simulator import plan
from ebbtide.simulator.update.order import UpdateOrder
from ebbtide.simulator.workload import TrainedAs
from ebbtide.tuner.cli import main
from pydantic import BaseModel

NOTE = "<!-- Written by scripts/reference.py from the code; a test compares the two. -->\n"
MODELS = (plan.Plan, plan.WayRun, UpdateOrder, plan.CheckpointPlan, TrainedAs, plan.Prediction)


def pages() -> dict[str, str]:
    """Return a dict from the file name below docs/ to the text of each page that is generated from the code."""
    return {"cli.md": cli_page(), "plan-file.md": plan_page()}


def cli_page() -> str:
    """Return the text of docs/cli.md: every visible command of ``tune`` with its flags."""
    context = click.Context(main, info_name="tune")
    lines = [
        NOTE,
        "# The `tune` command\n",
        "`tune --version` prints the version of ebbtide. Shell completion: "
        '`eval "$(_TUNE_COMPLETE=bash_source tune)"` (also `zsh_source`, `fish_source`).\n',
    ]
    for name, command in _commands(main, context, "tune"):
        lines.append(f"## `{name}`\n")
        lines.append(f"{_paragraphs(command.help or '')}\n")
        rows = [_flag(parameter) for parameter in command.params]
        if rows:
            lines += ["| flag | meaning |", "|---|---|", *filter(None, rows), ""]
        if command.epilog:
            lines.append(f"{_code(command.epilog)}\n")
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: click.Group, context: click.Context, prefix: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{prefix} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, context, f"{prefix} {name}")


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _code(epilog: str) -> str:
    commands = epilog.removeprefix("Example: ").split("; ")
    return "\n".join(f"    {command}" for command in commands)


def _flag(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return f"| `{(parameter.metavar or parameter.name or '').upper()}` | |"
    assert isinstance(parameter, click.Option)
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    about = " ".join((parameter.help or "").split())
    if parameter.show_default and not parameter.is_flag and parameter.default is not None:
        about += f" Default: `{parameter.default}`."
    if isinstance(parameter.type, click.Choice):
        about += f" One of {', '.join(f'`{choice}`' for choice in parameter.type.choices)}."
    if parameter.required:
        about += " Required."
    return f"| {names} | {about.strip().replace('|', chr(92) + '|')} |"


def plan_page() -> str:
    """Return the text of docs/plan-file.md: every field of a plan's file."""
    lines = [
        NOTE,
        "# The plan file\n",
        "A plan file is a JSON file that `tune plan` writes. A plan file with a field that ebbtide does not know is "
        'refused. The JSON schema of plan files is [plan.schema.json](plan.schema.json). In the key `"ebbtide"` of '
        "DeepSpeed's JSON, the field `plan` takes the path of a plan file or the fields of a plan. The field "
        '`checkpoint` of the key `"ebbtide"` takes the fields of CheckpointPlan.\n',
    ]
    for model in MODELS:
        lines += [
            f"## {model.__name__}\n",
            f"{_paragraphs(_summary(model))}\n",
            "| field | type | default | |",
            "|---|---|---|---|",
        ]
        about = _attributes(model)
        for name, field in model.model_fields.items():
            text = " ".join((field.description or about.get(name, "")).split())
            default = "required" if field.is_required() else f"`{_default(field)}`"
            lines.append(f"| `{name}` | {_type(field.annotation)} | {default} | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(value)


def _type(annotation: Any) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", name.replace("NoneType", "None"))
    return f"`{name}`".replace("|", "\\|")


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").partition("Attributes:")[0].strip()


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    text = (model.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+(?:, \w+)*): (.*?)(?=^ {8}\w|\Z)", text, re.DOTALL | re.MULTILINE)
    return {name: about for names, about in found for name in names.split(", ")}


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / "docs" / name).write_text(text)
