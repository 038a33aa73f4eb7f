"""The base class of plans, profiles and other pydantic models that are stored as one JSON file, and functions for what
such files record: hashes, and versions of installed packages.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Page(BaseModel):
    """A frozen pydantic model that is stored as one JSON file. It refuses unknown fields and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a plan, profile or other pydantic model to its JSON file, such that no reader ever sees the file
        half-written.
        """
        write_whole(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan, profile or other pydantic model from its JSON file.

        Raises:
            pydantic.ValidationError: A field is missing, unknown or out of its range.
        """
        return cls.model_validate_json(Path(path).read_text(encoding="utf-8-sig"))


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file such that no reader ever sees it half-written: a new file is written, then renamed.

    If the path is a symbolic link, the link stays, and its target is replaced. A target that is not a regular
    file, such as a pipe or a terminal (``/dev/stdout``), is written to directly.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        _write(path, content)
        return
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        _write(temporary, content)
        temporary.replace(path)
    except OSError:  # a full disk would stay the fuller for it
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: str | bytes) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return a hash of a dict of JSON values as 16 characters. The order of the keys has no influence."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


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
