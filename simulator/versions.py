"""The installed versions of packages, which are stored with measurements and plans."""

from functools import cache
from importlib import metadata


@cache
def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of the given packages, without those that are not installed."""
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result
