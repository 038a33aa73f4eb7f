"""Plans and runs DeepSpeed training with offloaded optimizer state: same bits, less time.

Names are resolved on first use, so that ``import ebbtide`` itself loads nothing heavy.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.runtime import attach, disable, enable, initialize
    from ebbtide.simulator import Machine, Plan, Timeline, Workload, preset, simulate, what_if, workload_from_model
    from ebbtide.tuner import ImpossibleError, plan

_here = Path(__file__).resolve().parent
if not (_here / "simulator").is_dir():
    # A checkout keeps the packages beside this folder. A wheel has them inside.
    __path__.append(str(_here.parent))

_HOMES = {
    "runtime": ("attach", "disable", "enable", "initialize"),
    "simulator": ("Machine", "Plan", "Timeline", "Workload", "preset", "simulate", "what_if", "workload_from_model"),
    "tuner": ("ImpossibleError", "plan"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ImpossibleError",
    "Machine",
    "Plan",
    "Timeline",
    "Workload",
    "attach",
    "disable",
    "enable",
    "initialize",
    "plan",
    "preset",
    "simulate",
    "what_if",
    "workload_from_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ebbtide")
    if name in ("profiler", "runtime", "simulator", "tuner"):
        return importlib.import_module(f"ebbtide.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ebbtide.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
