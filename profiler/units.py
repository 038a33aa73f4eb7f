"""The division of a model into the parts that become layers of a workload: its blocks, and the other modules."""

from collections.abc import Sequence

import torch


def units(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the parts of a model with separately timed forward, as a list of pairs of path and module.

    The parts are the members of lists of blocks (such as transformer layers), and the modules outside such
    lists.
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
    """Return the path of the part of a model to which a parameter belongs, or "model" if it belongs to none.

    Args:
        parameter: Name of the parameter, which begins with the part's path.
        unit_names: Paths of all parts, as from `units`.
    """
    return next((unit for unit in unit_names if parameter.startswith(unit + ".")), "model")
