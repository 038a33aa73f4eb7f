"""The kinds of rows in a comparison of ways to train: the plan, DeepSpeed without a plan, no offload, and others.

This module imports no simulation, so that commands which only print results start without numba.
"""

from typing import Literal

Role = Literal["plan", "stock", "best stock", "no offload", "variant", "peer"]
# Strategies of the simulator that are DeepSpeed's own offload.
_STOCK = ("stock", "zero3_offload", "zero3_offload_unpinned", "zero3_offload_async", "zero_offload", "zero_infinity")
# Beginning of the label of a row for DeepSpeed with other settings. Such rows count as other systems.
SETTING = "stock, "
# Beginning of the label of the row for DeepSpeed's fastest settings at any ZeRO stage.
BEST = "DeepSpeed alone at its best"
BY_KIND: tuple[Role, ...] = ("plan", "stock", "no offload")


def role_of(label: str) -> Role:
    """Return the kind of training that a label stands for, such as training without offload.

    The label is that of a row in a plan's ``alternatives``, or the name of a simulated strategy, such as
    ``zero_infinity``, with which traces and older plans name their timelines.

    Returns:
        ``plan``, ``stock`` (DeepSpeed without a plan), ``best stock`` (its fastest settings at any ZeRO stage), ``no
        offload``, ``variant`` (a variant of the plan), or ``peer`` (another system, or DeepSpeed with other settings).
    """
    if label == "ebbtide":
        return "plan"
    if label.startswith(BEST):
        return "best stock"
    if label.startswith("stock ZeRO-") or label in _STOCK:
        return "stock"
    if label in ("no offload", "no_offload", "not offloading"):
        return "no offload"
    return "variant" if label.startswith("ebbtide, ") else "peer"
