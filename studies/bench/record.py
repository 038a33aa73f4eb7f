"""How every study writes its figures: with machine, versions and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("ebbtide", "torch", "deepspeed", "triton", "numpy", "scipy", "optuna")


def write_record(path: str | Path, study: str, figures: dict[str, Any]) -> Path:
    """Writes ``figures`` as JSON, whole or not at all, and returns the path.

    ``device_kind`` is ``cuda`` or ``cpu``; a study on the emulated device overrides it in its
    figures with ``emulated``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"study": study, **provenance(), **figures}
    temporary = path.with_name(path.name + f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=2, default=str) + "\n")
    temporary.replace(path)
    return path


def provenance() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpu": torch.cuda.get_device_name() if cuda else None,
        },
        "device_kind": "cuda" if cuda else "cpu",
        "versions": {"python": platform.python_version(), **_versions()},
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _module() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
