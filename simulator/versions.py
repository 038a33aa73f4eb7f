"""Installed versions, for records."""

from functools import cache
from importlib import metadata


@cache
def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed packages among these."""
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result
