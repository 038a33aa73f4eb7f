"""Readers and writers of the files that ``tune`` commands name on the command line.

An invalid file is refused with an error that names the flag.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ebbtide.simulator.plan import Plan

T = TypeVar("T")
LONGEST = 4000  # most characters of an error message. The list of changes with which a job fits is long


class BadInputError(click.ClickException):
    """An error: an input on the command line is invalid. The exit code is 2.

    The message states the violated rule, the given value (cut if it is long) and the flag to change.

    Attributes:
        fields: Further fields of the error in the output of ``--json``.
    """

    exit_code = 2

    def __init__(self, message: str, key: str = "", **fields: Any) -> None:
        from ebbtide.simulator.rules import cut

        super().__init__(cut(message, LONGEST))
        self.key, self.fields = key, fields


def check_kind(flag: str, path: str, wanted: str) -> Mapping[str, Any]:
    """Return the contents of an input file, if the file is of the wanted kind (see `check_contents`).

    The contents are empty if the file cannot be read or contains no JSON object, which the file's reader reports.
    """
    from ebbtide.simulator.estimates.deepspeed_keys import read_file

    try:
        given = read_file(path)
    except ValueError:
        return {}
    check_contents(flag, path, given, wanted)
    return given


def check_contents(flag: str, path: str, given: Mapping[str, Any], wanted: str) -> None:
    """Refuse an input file of another kind than the wanted one.

    Args:
        flag: Flag or argument of the running ``tune`` command that names the file.
        wanted: Kind of the file, such as ``"a machine file"`` (see `kind_of`).

    Raises:
        BadInputError: The file is of another kind. The message names the flag for this kind, if the command has one.
    """
    from ebbtide.simulator.page import DEEPSPEED_CONFIG, MODEL_CONFIG, kind_of

    kind = kind_of(given)
    if kind in ("", wanted):
        return
    flags = {option for parameter in click.get_current_context().command.params for option in parameter.opts}
    own = {"a trace file": "--run", MODEL_CONFIG: "--model", DEEPSPEED_CONFIG: "--ds-config"}.get(kind)
    own = own or f"--{kind.split()[1]}"  # "a plan file" is given as --plan
    hint = f". Give it as {own}" if own in flags else ""
    raise BadInputError(f"{flag} must be {wanted}, but {path} is {kind}{hint}", flag.strip("-").replace("-", "_"))


def read_config(path: str | None) -> Mapping[str, Any] | None:
    """Load the DeepSpeed config at a path. Return None if the path is None."""
    from ebbtide.simulator.estimates.deepspeed_keys import loaded, read_file
    from ebbtide.simulator.page import DEEPSPEED_CONFIG

    if path is None:
        return None
    try:
        config = read_file(path)
        check_contents("--ds-config", path, config, DEEPSPEED_CONFIG)
        return loaded(config)
    except ValueError as error:
        raise BadInputError(f"--ds-config {path}: {error}") from None


def check_distinct(flag: str, path: str | None) -> None:
    """Refuse an output file that another parameter of the running ``tune`` command names too.

    Args:
        path: Path of the output file. None if the user gave none.
    """
    context = click.get_current_context(silent=True)
    if path is None or context is None:
        return
    for parameter in context.command.params:
        given = context.params.get(parameter.name or "")
        others = given if isinstance(given, tuple) else (given,)
        named = any(isinstance(other, str) and Path(other).resolve() == Path(path).resolve() for other in others)
        if named and flag not in parameter.opts:
            other = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise BadInputError(f"{flag} must be another file than {other}, but got {path} for both")


def read_plan(path: str, flag: str = "PLAN") -> Plan:
    """Load a training plan from the plan file that a flag or an argument of a ``tune`` command names."""
    from ebbtide.simulator.plan import Plan

    return read(Plan, path, flag)


def read(kind: type[T], path: str, flag: str) -> T:
    """Load a machine, a workload or a plan from the file that a flag of a ``tune`` command names."""
    check_kind(flag, path, f"a {kind.__name__.lower()} file")
    try:
        return kind.load(path)  # type: ignore[attr-defined, no-any-return]
    except ValueError as error:
        raise BadInputError(f"{flag}: {error}") from None


def check_folder(flag: str, path: str | None) -> None:
    """Check that an output file can be written, before a ``tune`` command starts work that takes minutes.

    Raises:
        BadInputError: The folder of ``path`` does not exist or cannot be written to.
    """
    if path is None:
        return
    if path == "-":
        raise BadInputError(f"{flag} must be a file, but got -. For standard output, give /dev/stdout")
    folder = Path(path).resolve().parent
    wrong = "cannot be written to" if folder.is_dir() else "is not a folder"
    if not (os.access(folder, os.W_OK) or os.access(path, os.W_OK)):
        raise BadInputError(f"{flag} must be a file that can be written, but got {path}: {folder} {wrong}")


@contextmanager
def written(flag: str, path: str) -> Iterator[None]:
    """Catch an error that is raised while an output file is written. Raise a BadInputError with the name of the file's
    flag instead.
    """
    check_folder(flag, path)
    check_distinct(flag, path)
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file format
        raise BadInputError(f"{flag} must be a file that can be written, but got {path}: {error}") from None
