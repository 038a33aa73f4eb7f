"""The installed versions of Python packages, which ebbtide stores with measurements and plans."""

from functools import cache
from importlib import metadata


@cache
def versions(*packages: str) -> dict[str, str]:
    """Return a dict from each of the given packages to its installed version. Packages that are not installed are
    left out.
    """
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result
