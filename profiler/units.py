"""The division of a model into the parts that become layers of a workload: its blocks, and the other modules."""

from collections.abc import Sequence

import torch


def units(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the submodules of a model that are timed one by one in forward, as a list of pairs (name, submodule).

    They are the members of module lists (such as transformer layers), and the submodules outside such lists. A name is
    the submodule's path in the model, such as ``model.layers.0``.
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
    """Return the name of the submodule that contains a parameter, or "model" if none of the given ones does."""
    return next((unit for unit in unit_names if parameter.startswith(unit + ".")), "model")
