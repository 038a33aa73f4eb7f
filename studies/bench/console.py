"""What studies say and ask on a terminal: their flags and their tables."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from rich.table import Table


def study_parser(
    study: str, doc: str | None, *, required: bool = True, drawn: bool = False
) -> argparse.ArgumentParser:
    """With ``--json PATH``; ``doc`` is the study's module docstring; ``drawn``: a picture is made
    too.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{study}",
        description=doc,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    where = "the record; a .png goes beside" if drawn else "where the figures go"
    parser.add_argument("--json", type=Path, required=required, help=where)
    return parser


def kill_parser(study: str, doc: str | None, kills: int) -> argparse.ArgumentParser:
    """Of a study that kills training; ``kills``: where nobody says how many."""
    parser = study_parser(study, doc, required=False)
    parser.add_argument("--kills", type=whole_number, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def whole_number(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, but got {count}")
    return count


def table_of(title: str, *columns: str, words: Collection[str] = ()) -> Table:
    """Columns of figures, to the right; the first one and ``words`` are text."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        text = number == 0 or column in words
        table.add_column(column, justify="left" if text else "right")
    return table
