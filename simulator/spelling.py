"""Lookup of names of models and machines, whatever their spelling."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from ebbtide.simulator.rules import RuleError


def spelled(given: str, known: Iterable[str], what: str, key: str = "") -> str:
    """Return the known name that a user means: "RTX 4090", "4090" and "rtx-4090" all mean "rtx4090".

    Args:
        what: Kind of the name, such as "machine preset", for the error message.
        key: Name of the field that the error reports.

    Raises:
        RuleError: The given name matches no known name, or several. The error suggests the nearest ones.
    """
    names = {_plain(name): name for name in known}
    wanted = _plain(given)
    if wanted in names:
        return names[wanted]
    holding = [name for plain, name in names.items() if len(wanted) > 2 and wanted in plain]
    shortest = min(holding, key=len, default="")
    if holding and all(_plain(name).startswith(_plain(shortest)) for name in holding):
        return shortest
    # A name that holds a known one is another thing: "h2000", "RTX 4090 Laptop".
    near = holding or [names[plain] for plain in get_close_matches(wanted, names, 3)]
    near = near or [name for plain, name in names.items() if plain in wanted]
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise RuleError(f"There is no {what} {given!r}.{meant} Known: {', '.join(names.values())}.", key=key)


def _plain(name: str) -> str:
    """Return a name in lower case letters and digits, without an organization or a maker ("nvidia", "geforce")."""
    last = name.rsplit("/", 1)[-1]
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", last.lower())
