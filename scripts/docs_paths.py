"""A hook of mkdocs, so that mkdocstrings finds the project's folders as one package ``ebbtide``."""

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("profiler", "runtime", "simulator", "tuner")


@event_priority(100)  # before mkdocstrings looks for packages
def on_config(config: Any) -> Any:
    """Link the project's source folders below ``build/docs/ebbtide``, so that mkdocstrings finds them as one package
    ``ebbtide`` without an installation.

    Return mkdocs' ``config`` unchanged.
    """
    package = ROOT / "build" / "docs" / "ebbtide"
    package.mkdir(parents=True, exist_ok=True)
    for path in [*(ROOT / "ebbtide").iterdir(), *(ROOT / name for name in FOLDERS)]:
        link = package / path.name
        if path.name != "__pycache__" and not link.exists():
            link.symlink_to(path)
    return config
