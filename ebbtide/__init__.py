"""Plan, predict and run DeepSpeed training with offloaded optimizer state: faster, with identical results.

| name | use |
|---|---|
| `estimate` | estimate memory and time of training a model on a GPU, and find settings that fit |
| `plan` | search the best plan for a workload on a machine |
| `what_if` | simulate other bandwidths, memories and strategies |
| `simulate` | predict the timeline of a schedule |
| `Machine.load`, `Machine.preset` | a measured machine, or a machine from data sheets |
| `workload_from_model` | a workload from a model's config or module |
| `load_plan`, `initialize`, `attach` | train under a plan, in Python |
| `enable`, `disable` | the key ``"ebbtide"`` in DeepSpeed's JSON, for an unchanged script |

Names are resolved on first use, so that ``import ebbtide`` itself loads nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.estimates import Estimate, estimate
    from ebbtide.planning import load_plan, plan, what_if
    from ebbtide.runtime import attach, disable, enable, initialize
    from ebbtide.simulator import (
        Machine,
        Plan,
        PlanError,
        Timeline,
        Workload,
        build_schedule,
        preset,
        preset_names,
        simulate,
        workload_from_model,
    )
    from ebbtide.tuner import ImpossibleError

# The module that defines each public name. Names of `__all__` that are missing here are those of `ebbtide.simulator`.
_MODULE_OF = {
    "Estimate": "estimates",
    "ImpossibleError": "tuner",
    "attach": "runtime",
    "disable": "runtime",
    "enable": "runtime",
    "estimate": "estimates",
    "initialize": "runtime",
    "load_plan": "planning",
    "plan": "planning",
    "what_if": "planning",
}

__all__ = [
    "Estimate",
    "ImpossibleError",
    "Machine",
    "Plan",
    "PlanError",
    "Timeline",
    "Workload",
    "attach",
    "build_schedule",
    "disable",
    "enable",
    "estimate",
    "initialize",
    "load_plan",
    "plan",
    "preset",
    "preset_names",
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
    if name not in __all__:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ebbtide.{_MODULE_OF.get(name, 'simulator')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "profiler", "runtime", "simulator", "tuner"]
