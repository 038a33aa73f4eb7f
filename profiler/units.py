"""The parts of a model that are the layers of a workload: its blocks, and the other modules."""

from collections.abc import Sequence

import torch


def units(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the parts of a model with separately timed forward, as path and module.

    The parts are the members of lists of blocks, and the other modules. A parameter belongs to the part with a
    path that begins the parameter's name.
    """
    result: list[tuple[str, torch.nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child):
            result += [(f"{name}.{n}", block) for n, block in child.named_children()]
        elif any(isinstance(m, torch.nn.ModuleList) for m in child.modules()):
            result += [(f"{name}.{n}", unit) for n, unit in units(child)]
        else:
            result.append((name, child))
    return result


def unit_of(parameter: str, unit_names: Sequence[str]) -> str:
    """Return the path of the part that a parameter belongs to, given the parameter's name. "model" if to none."""
    return next((unit for unit in unit_names if parameter.startswith(unit + ".")), "model")
