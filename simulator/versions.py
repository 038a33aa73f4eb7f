"""What is installed, for records."""

from functools import cache
from importlib import metadata


@cache
def versions(*packages: str) -> dict[str, str]:
    """Of those that are here; of the others nothing."""
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result
