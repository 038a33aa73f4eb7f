"""The ``tune checkpoint`` commands, which list, verify, prune and export training checkpoints."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from ebbtide.tuner.commands.options import JSON, guarded
from ebbtide.tuner.files import BadInputError


@click.group(epilog="Example: tune checkpoint list checkpoints/")
def checkpoint() -> None:
    """List, verify, prune and export training checkpoints."""


FOLDERS = click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)


@checkpoint.command("list", epilog="Example: tune checkpoint list checkpoints/")
@FOLDERS
@JSON
@guarded
def list_(folders: tuple[str, ...], as_json: bool) -> None:
    """List the complete checkpoints of one or more folders, the newest first."""
    from ebbtide.runtime.storage.folder import list_checkpoints

    roots = _columns(folders)
    rows = [{**column, **_row(item)} for root, column in roots for item in list_checkpoints(root)]
    _print_rows(rows, as_json, _LISTED)
    if not rows and not as_json:
        click.echo(f"no checkpoint in {', '.join(folders)}. {_where_some_are(roots[0][0])}", err=True)


@checkpoint.command(epilog="Example: tune checkpoint verify checkpoints/ --tag global_step100")
@FOLDERS
@click.option("--tag", help="Tag of one checkpoint to check (default: all checkpoints).")
@JSON
@guarded
def verify(folders: tuple[str, ...], tag: str | None, as_json: bool) -> None:
    """Compare every byte of the checkpoints with the checksums in their manifests.

    Exit code 2 if a checkpoint is damaged.
    """
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints
    from ebbtide.runtime.checkpoint.protocol.inspect import verify as check
    from ebbtide.runtime.storage.reader import stored_problems

    rows = []
    roots = _columns(folders)
    if tag and len(roots) > 1:
        roots = [(root, column) for root, column in roots if (root / tag).is_dir()] or roots[:1]
    for root, column in roots:
        if tag:
            _check_tag(root, tag)
        tags = [tag] if tag else [str(item.tag) for item in list_checkpoints(root)]
        _check_any(root, tags)
        for name in tags:
            found = [str(problem) for problem in check(root, name)]
            problems = "; ".join(found or stored_problems(root / name))
            rows.append({**column, "tag": name, "state": f"damaged: {problems}" if problems else "whole"})
    _print_rows(rows, as_json)
    if any(row["state"] != "whole" for row in rows):
        sys.exit(2)


@checkpoint.command(epilog="Example: tune checkpoint prune checkpoints/ --keep 3")
@FOLDERS
@click.option("--keep", required=True, type=click.IntRange(min=1), help="Number of newest checkpoints to keep.")
@JSON
@guarded
def prune(folders: tuple[str, ...], keep: int, as_json: bool) -> None:
    """Delete old checkpoints: keep only the newest complete ones in each given folder."""
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints
    from ebbtide.runtime.checkpoint.protocol.inspect import prune as delete

    roots = _columns(folders)
    for root, _ in roots:
        _check_any(root, list_checkpoints(root))
    rows = [{**column, "removed": str(item)} for root, column in roots for item in delete(root, keep)]
    _print_rows(rows, as_json)
    if not rows and not as_json:
        click.echo(f"nothing to delete: {', '.join(folders)} has no more than {keep} complete checkpoints", err=True)


@checkpoint.command(epilog="Example: tune checkpoint export checkpoints/ --to exported/")
@click.argument("folder", metavar="FOLDER")
@click.option("--tag", help="Tag of the checkpoint to export (default: the one that the file `latest` names).")
@click.option(
    "--to",
    required=True,
    metavar="DIR",
    help="Folder for exported checkpoints. The exported checkpoint gets a subfolder that is named after its tag.",
)
@guarded
def export(folder: str, tag: str | None, to: str) -> None:
    """Convert a committed checkpoint into DeepSpeed's own format, which DeepSpeed loads without ebbtide.

    This is needed for checkpoints with optimizer state on a drive. Training may go on during the export.
    """
    from ebbtide.runtime.checkpoint.errors import CheckpointError
    from ebbtide.runtime.checkpoint.protocol.folders import named_latest
    from ebbtide.runtime.storage.errors import StorageError
    from ebbtide.runtime.storage.reader import export as write

    root = _folder(folder)
    name = tag or named_latest(root)
    if not name:
        raise BadInputError(f"--tag must name a checkpoint if there is no file {root}/latest")
    _check_tag(root, name)
    try:
        click.echo(str(write(root, name, Path(to))))
    except (CheckpointError, StorageError) as error:
        raise BadInputError(str(error)) from None


def _columns(folders: tuple[str, ...]) -> list[tuple[Path, dict[str, str]]]:
    roots = [_folder(path) for path in folders]
    return [(root, {"folder": str(root)} if len(roots) > 1 else {}) for root in roots]


def _check_any(root: Path, found: Sequence[Any]) -> None:
    if not found:
        raise BadInputError(f"there is no checkpoint in {root}. {_where_some_are(root)}")


def _where_some_are(root: Path) -> str:
    from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints

    if (root / GLOBAL_NAME).is_file():
        return f"Give {root.absolute().parent}, the folder that holds this checkpoint's folder."
    inside = [str(path) for path in sorted(root.iterdir()) if path.is_dir() and list_checkpoints(path)]
    if inside:
        return f"Give the folders in it that hold checkpoints: {' '.join(inside)}"
    return "Give the folder that holds the checkpoints' folders."


def _check_tag(root: Path, tag: str) -> None:
    from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints

    tags = ", ".join(item.tag for item in list_checkpoints(root))
    if tags and not (root / tag).is_dir():
        raise BadInputError(f"there is no checkpoint {tag} in {root}. Give --tag the name of one (there are: {tags})")


def _folder(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise BadInputError(f"FOLDER must be a folder of checkpoints, but got {path}")
    return folder


def _row(item: Any) -> dict[str, Any]:
    row = asdict(item).items()
    return {name: value if isinstance(value, (int, float)) or value is None else str(value) for name, value in row}


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**29 else f"{size_bytes / 2**20:.1f} MiB"


def _local_time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s).astimezone():%Y-%m-%d %H:%M:%S}"


# Columns of `tune checkpoint list`: key of a row -> the column's title, and the text of a value.
_LISTED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "folder": ("folder", str),
    "tag": ("tag", str),
    "step": ("step", str),
    "size_bytes": ("size", _size),
    "world_size": ("ranks", str),
    "committed_unix_s": ("committed", _local_time),
    "latest": ("latest", lambda latest: "latest" if latest else ""),
    "status": ("status", str),
}


def _print_rows(
    rows: list[dict[str, Any]], as_json: bool, columns: Mapping[str, tuple[str, Callable[[Any], str]]] | None = None
) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        return
    shown = columns or {name: (name, str) for name in rows[0]}
    shown = {name: column for name, column in shown.items() if name in rows[0]}
    table = [[title for title, _ in shown.values()]]
    table += [["" if row[name] is None else text(row[name]) for name, (_, text) in shown.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
