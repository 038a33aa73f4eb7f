"""The flags that the studies which kill training have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def kill_parser(study: str, about: str | None, kills: int) -> argparse.ArgumentParser:
    """With ``--kills``, ``--seed`` and ``--json``.

    Args:
        about: the study's docstring, whose first line is shown.
        kills: where nobody says how many.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{study}", description=(about or "").partition("\n")[0]
    )
    parser.add_argument("--kills", type=whole_number, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


def whole_number(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, but got {count}")
    return count
