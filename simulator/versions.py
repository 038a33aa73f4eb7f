"""Versions of installed packages, to be stored with measurements and plans."""

from functools import cache
from importlib import metadata


@cache
def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of the given packages. Packages that are not installed are left out."""
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result
