"""The first sentences of every answer: the model, its parameters and the machine, and the advice for or against
offloading optimizer state. Plan files, the planning service and searches apply the same rule.

This module imports no simulation, so that commands which only print results start without numba.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ebbtide.simulator.limits import lacks
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, Prediction
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.quantities import seconds_text


def about(workload: Workload, machine: Machine) -> str:
    """Return a line like 'Llama 3 8B, 8.03 B parameters, on 1 x NVIDIA GeForce RTX 4090 (preset rtx4090, ...)'."""
    job, ranks = workload.job, workload.ranks_per_node * workload.nodes
    params = sum(block.elements for block in job.architecture.blocks()) if job else workload.params * ranks
    return about_model(workload.name, params, machine, ranks)


def about_model(name: str, params: int, machine: Machine, gpus: int = 0) -> str:
    """Return the same as `about`, from the model's name and its number of parameters.

    Args:
        gpus: Number of GPUs of the job. 0: it is what the answer is about.
    """
    size = f"{params / 1e9:.3g} B" if params >= 1e8 else f"{params / 1e6:.3g} M"
    fitted = any(getattr(value, "source", "") == "fitted" for _, value in machine)
    rates = "rates fitted to runs" if fitted else "rates from data sheets" if machine.is_preset else "rates measured"
    known = f"preset {machine.name}" if machine.is_preset else machine.name
    return f"{name}, {size} parameters, on {_cards(machine, gpus)} ({known}, {rates})"


def _cards(machine: Machine, gpus: int) -> str:
    card, there = machine.device_name or machine.name, machine.gpus_per_node
    if machine.unified_memory or machine.device_kind == "emulated":
        return f"{gpus} x {card}" if gpus > 1 else card
    if not gpus:
        return f"{there} x {card}"
    if gpus > there:
        return f"{gpus} x {card} in {-(-gpus // there)} machines"
    return f"{gpus} of {there} x {card}" if gpus < there else f"{gpus} x {card}"


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


LITTLE = 5e-3  # relative distance from the lower bound that is smaller than any measurement error
ROUNDED = 1e-6  # in percent
TOLD = 2.0  # a gain with an interval whose ends are further apart than this factor is told without a figure
WORTH = 1e-3  # relative difference below which two iterations count as equally long


@dataclass(frozen=True)
class Verdict:
    """The advice on whether to offload optimizer state.

    Attributes:
        choice: ``offload``, ``no offload``, or ``impossible`` if no plan and no training without offload fits.
    """

    choice: Literal["offload", "no offload", "impossible"]
    sentence: str


def verdict(predicted: Iterable[tuple[Role, Prediction]], problem: str = "") -> Verdict:
    """Return the advice on offloading, given predictions for a plan, stock DeepSpeed and no offload.

    The plan counts as faster or slower than no offload only if the time without offload is outside the interval of
    the plan's prediction. The gain over stock DeepSpeed is named only if stock DeepSpeed fits into memory.

    Args:
        predicted: Pairs of kind and prediction. The plan's prediction has an interval and a lower bound.
        problem: Reason that no plan fits into memory, or that none can be made, if so.
    """
    rows = list(predicted)
    by_role = dict(reversed(rows))  # of several rows with the same role, the first one is taken
    plan, stock, plain = (by_role.get(role) for role in ("plan", "stock", "no offload"))
    runs = stock if stock is not None and stock.fits else None
    settings = [other for _, other in rows if other.strategy.startswith((BEST, SETTING)) and other.fits]
    if plan is None or not plan.fits:
        if plain is None or not plain.fits:
            short = f"Nothing fits: {problem}"
            if runs:
                short = f"DeepSpeed alone fits ({seconds_text(runs.iteration_s)} per step), without a plan: {problem}"
            if plan is not None:
                short = f"This plan does not fit: it {plan.note or lacks(plan.missing)}"
            return Verdict("impossible", f"{short}.")
        gain = f", and is {_over(runs, settings, plain)}" if runs else ""
        return Verdict("no offload", f"Do not offload: it fits{gain}.")
    gains = ", ".join(filter(None, [_over(runs, settings, plan) if runs else "", distance(plan)]))
    gains = gains or f"{seconds_text(plan.iteration_s)} per iteration"
    if plain is not None and plain.fits and _no_slower(plain, plan):
        gain = _gain(plain, plan)
        return Verdict(
            "no offload", f"Do not offload: it fits ({seconds_text(plain.iteration_s)} per step), and {gain}."
        )
    beside = _plain_beside(plain, plan)
    if stock is None or runs:
        return Verdict("offload", f"Offload with this plan: {gains}{beside}.")
    near = f", {distance(plan)}" if distance(plan) else ""
    fits = f"Fits with ebbtide ({seconds_text(plan.iteration_s)} per step{near})"
    lacking = f"Stock DeepSpeed does not fit: it {stock.note}"
    if settings:
        fastest = min(settings, key=lambda p: p.iteration_s)
        lacking += f". {_named(fastest)} fits, and this plan is {_times(fastest, plan)} as fast"
    return Verdict("offload", f"{fits}. {lacking}{beside}.")


def _over(stock: Prediction, settings: Sequence[Prediction], one: Prediction) -> str:
    # If other settings of DeepSpeed are faster, the text also has the speedup over the fastest of them.
    fastest = min([stock, *settings], key=lambda p: p.iteration_s)
    beside = fastest.iteration_s < stock.iteration_s and not _same_way(fastest, one)
    gains = f", {_gains(fastest, one)} {_named(fastest)}" if beside else ""
    return f"{_gains(stock, one)} stock DeepSpeed{gains}"


def _named(setting: Prediction) -> str:
    seconds = seconds_text(setting.iteration_s)
    if not setting.strategy.startswith(BEST):
        return f"DeepSpeed alone with {setting.strategy.removeprefix(SETTING)} ({seconds})"
    return f"{setting.strategy.removesuffix(')')}: {seconds})"


def _same_way(best: Prediction, one: Prediction) -> bool:
    return "no offload" in best.strategy and math.isclose(best.iteration_s, one.iteration_s, rel_tol=WORTH)


def _plain_beside(plain: Prediction | None, plan: Prediction) -> str:
    if plain is None or plain.fits or not _no_slower(plain, plan) or not differs(plan, plain.iteration_s):
        return ""
    if any(lacking > plain.limits.get("device", lacking) for lacking in plain.missing.values()):
        return ""  # more than twice the memory of the GPU is needed
    return f". Not offloading would be {_times(plan, plain)} faster than this plan, but {plain.note}"


def differs(plan: Prediction, other_s: float) -> bool:
    """Return True if another way to train is clearly faster or slower than a plan."""
    low_s = min(plan.iteration_low_s, plan.iteration_s * (1 - WORTH))
    high_s = max(plan.iteration_high_s, plan.iteration_s * (1 + WORTH))
    return not low_s <= other_s <= high_s


def _no_slower(plain: Prediction, plan: Prediction) -> bool:
    return plain.iteration_s < plan.iteration_s or not differs(plan, plain.iteration_s)


def _gain(plain: Prediction, plan: Prediction) -> str:
    if differs(plan, plain.iteration_s):
        return f"is {_times(plan, plain)} faster than this plan"
    spread = plan.iteration_high_s / plan.iteration_s - 1
    if spread <= WORTH:
        return "is as fast as this plan"
    return f"makes no difference within the prediction's interval ({spread:.0%} either way)"


def _times(longer: Prediction, shorter: Prediction) -> str:
    ratio = longer.iteration_s / shorter.iteration_s
    factor = f"{ratio:.1f}x" if not 0.95 < ratio < 1.1 else f"{ratio:.2f}x"
    low, high = longer.over_plan_low, longer.over_plan_high
    return f"{factor} ({low:.2g}x to {high:.2g}x)" if low and shorter.lower_bound_s else factor


def _gains(longer: Prediction, shorter: Prediction) -> str:
    low, high = longer.over_plan_low, longer.over_plan_high
    if low and shorter.lower_bound_s and high > TOLD * low:
        return (
            f"faster ({low:.2g}x to {high:.2g}x as fast, in nine runs of ten) than"
            if low > 1
            else (f"between {low:.2g}x and {high:.2g}x as fast as")
        )
    return f"{_times(longer, shorter)} as fast as"


def distance(plan: Prediction) -> str:
    """Return text such as "within 3% of a lower bound", rounded up so that it is true. Empty: it is unknown."""
    if not plan.lower_bound_s or math.isnan(plan.lower_bound_s):
        return ""
    return f"within {max(1, math.ceil(100 * above_bound(plan) - ROUNDED))}% of a lower bound"


def above_bound(plan: Prediction) -> float:
    """Return how far a plan's predicted iteration time is above the lower bound, as a fraction of the bound."""
    return plan.iteration_s / plan.lower_bound_s - 1 if plan.lower_bound_s else math.inf


def headline(plan: Plan) -> str:
    """Return the advice for or against offloading, in one sentence, that follows from the predictions in a plan."""
    if plan.prediction is None:
        return "A plan without a prediction: plan again with `tune plan` to know what it brings."
    others = [(role_of(p.strategy), p) for p in plan.alternatives]
    return verdict([("plan", plan.prediction), *others]).sentence
