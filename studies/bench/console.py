"""Command-line parsers and terminal tables that the studies share."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from studies.bench.record import write_record

# Last word of a figure's name -> factor for showing the figure, and its unit.
UNITS = {
    "_bytes_per_s": (1e-9, "GB/s"),
    "_per_s": (1.0, "per s"),
    "_bytes": (1e-9, "GB"),
    "_pct": (1.0, "%"),
    "_ms": (1.0, "ms"),
    "_s": (1.0, "s"),
}
MOST_ROWS = 40  # most rows of a table. The record has all rows


def study_parser(study: str, doc: str | None, *, required: bool = True) -> argparse.ArgumentParser:
    """Return the command-line parser of a study, with the option ``--json PATH`` for its result file.

    ``--help`` shows ``doc``, which is the docstring of the study's module.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{study}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=required, help="path of the result file")
    return parser


def kill_parser(study: str, doc: str | None, kills: int) -> argparse.ArgumentParser:
    """Return the command-line parser of a study that kills training processes.

    ``kills`` is the default of the option ``--kills``, the number of kills.
    """
    parser = study_parser(study, doc, required=False)
    parser.add_argument(
        "--kills", type=whole_number, default=kills, help=f"number of training processes to kill (default: {kills})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: 0)")
    return parser


def whole_number(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"the number of kills must be >= 1, but got {count}")
    return count


def table_of(title: str, *columns: str) -> Table:
    """Return an empty terminal table with the given columns, the first left-aligned, the others right-aligned."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def publish(study: str, path: Path | None, figures: dict[str, Any]) -> None:
    """Write the results of a study to a JSON file, if ``path`` is given, and print them as terminal tables."""
    if path is not None:
        write_record(path, study, figures)
    Console().print(*tables(study, figures))


def tables(title: str, figures: Mapping[str, Any]) -> Iterator[Table]:
    """Yield tables that show a study's results on the terminal."""
    # Each result that is a list of rows gets a further table. Plans, and lists of more than `MOST_ROWS` rows, are left
    # out.
    yield from _table(title, [_flat(figures)])
    yield from _tables_in(title, figures)


def _tables_in(title: str, value: Any) -> Iterator[Table]:
    if isinstance(value, list) and 0 < len(value) <= MOST_ROWS and isinstance(value[0], Mapping):
        yield from _table(title, [_flat(row) for row in value])
    if not isinstance(value, Mapping) or _is_plan(value):
        return
    if _is_named(value) and not all(_is_named(row) for row in value.values()):
        yield from _table(title, [{"": key, **_flat(row)} for key, row in value.items()])
    for key, inner in value.items():
        yield from _tables_in(f"{title}, {key.replace('_', ' ')}", inner)


def _is_plan(value: Mapping[str, Any]) -> bool:
    return "schema_version" in value


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    # Lists, tables and plans are left out.
    made: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            made |= {} if _is_plan(value) or _is_named(value) else _flat(value, f"{before}{key}.")
        elif not isinstance(value, list | tuple):
            made[before + key] = value
    return made


def _table(title: str, rows: list[dict[str, Any]]) -> Iterator[Table]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return
    columns = [[*_shown(name, [row.get(name) for row in rows])] for name in names]
    lines = columns if len(names) > len(rows) else list(zip(*columns, strict=True))
    table = table_of(title, *lines[0])
    for line in lines[1:]:
        table.add_row(*line)
    yield table


def _shown(name: str, values: list[Any]) -> Iterator[str]:
    end = next((end for end in UNITS if name.endswith(end)), "")
    factor, unit = UNITS.get(end, (1.0, ""))
    yield " ".join([name.removesuffix(end).replace("_", " "), unit]).strip()
    for value in values:
        if isinstance(value, bool):
            yield "yes" if value else "no"
        elif isinstance(value, float) or (unit and isinstance(value, int)):
            yield f"{value * factor:,.4g}"
        else:
            yield "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
