"""The update rules of the optimizers that a plan can run, bit-identical to DeepSpeed's CPU optimizers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from ebbtide.runtime.kernels.adam import AdamStep, BiasCorrection
from ebbtide.runtime.kernels.host import host_update
from ebbtide.runtime.kernels.rule import Group, UnknownRoundingError, UpdateRule, same_bits, vector_width
from ebbtide.runtime.kernels.step import UpdateStep

_BETAS = {"lr": 1e-3, "betas": (0.9, 0.99)}
_STEPS = 12  # after this many steps, the power of these betas and the running product differ


class AdamRule(UpdateRule):
    """The update rule of Adam and AdamW. ``adamw`` selects AdamW."""

    name = "adam"
    moments = ("exp_avg", "exp_avg_sq")
    stock = "DeepSpeedCPUAdam"
    types = ("adam", "adamw")
    trials = (
        ({"adamw": True}, {**_BETAS, "eps": 1e-8, "weight_decay": 0.0}),
        ({"adamw": True}, {**_BETAS, "eps": 1e-8, "weight_decay": 0.1}),
        ({"adamw": False}, {**_BETAS, "eps": 1e-8, "weight_decay": 0.1}),
    )

    def __init__(self, adamw: bool = True, recounts: bool = False) -> None:
        self.adamw = adamw
        self._bias = BiasCorrection(recounts=recounts)

    def ask(self, op: Any) -> None:
        self._bias = BiasCorrection(recounts=recounts(op))

    @classmethod
    def settings(cls, optimizer: Any) -> dict[str, Any]:
        return {"adamw": bool(optimizer.adam_w_mode)}

    def step(self, group: Group, number: int) -> AdamStep:
        bias1, bias2 = self._bias.advance(number, *group["betas"])
        if not group.get("bias_correction", True):
            bias1 = bias2 = 1.0
        beta1, beta2 = group["betas"]
        return AdamStep(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], bias1, bias2, self.adamw)

    def stock_arguments(self, group: Group) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        return (*values, self.adamw), (*values, True)

    def resume(self, number: int, groups: Sequence[Group]) -> None:
        self._bias.resume(number, [tuple(group["betas"]) for group in groups])


@functools.cache
def recounts(op: Any) -> bool:
    """Return True if DeepSpeed's loaded Adam op computes the powers of beta with ``pow`` for every subgroup of a step
    except the first.

    For the first subgroup, every build of the op multiplies the previous step's powers by beta. Newer builds use these
    products for the other subgroups too. Products and ``pow`` round differently (see `BiasCorrection`), so the builds'
    results differ. The test takes milliseconds, once per op.

    Raises:
        UnknownRoundingError: The op's results differ from both ways of computing the powers, or fit both.
    """
    width, (settings, group) = vector_width(AdamRule, op), AdamRule.trials[0]
    # A large learning rate, so that the last bit of a bias correction shows in the parameter.
    group = {**group, "lr": 1e4}
    equal = [
        way for way in (False, True) if same_bits(AdamRule(**settings, recounts=way), group, op, width, [9, 9], _STEPS)
    ]
    if len(equal) != 1:
        raise UnknownRoundingError(
            "ebbtide cannot tell whether DeepSpeed's cpu_adam op computes Adam's bias correction as DeepSpeed 0.18.6 "
            f"does or as later releases do: the results of {getattr(op, '__file__', op)} match "
            f"{'both' if equal else 'neither'}. Delete this file so that DeepSpeed builds the op again, or train "
            "without a plan"
        )
    return equal[0]


@dataclass(frozen=True, slots=True)
class LionStep:
    """The hyperparameters of one step of the optimizer Lion."""

    kernel: ClassVar[str] = "lion"
    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def variant(self) -> int:
        return int(np.float32(self.weight_decay) > 0)

    def scalars(self, scale: float) -> np.ndarray:
        one = np.float32(1)
        lr, beta1, beta2 = (np.float32(x) for x in (self.lr, self.beta1, self.beta2))
        # All builds of DeepSpeed that this rule supports compute `1 - alpha * weight_decay` as one fused operation.
        after_decay = fused(-lr, np.float32(self.weight_decay), one)
        values = [scale, beta1, one - beta1, beta2, one - beta2, after_decay, lr]
        return np.array(values, dtype=np.float32)


class LionRule(UpdateRule):
    """The update rule of Lion, which moves a parameter by the sign of a moving average of gradients.

    It has one moment and no bias correction.
    """

    name = "lion"
    moments = ("exp_avg",)
    unused = ("exp_avg_sq",)
    stock = "DeepSpeedCPULion"
    types = ("lion",)
    trials = (({}, {**_BETAS, "weight_decay": 0.0}), ({}, {**_BETAS, "weight_decay": 0.3}))

    def step(self, group: Group, number: int) -> LionStep:
        del number
        beta1, beta2 = group["betas"]
        return LionStep(float(group["lr"]), beta1, beta2, group["weight_decay"])

    def stock_arguments(self, group: Group) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = (group["lr"], *group["betas"], group["weight_decay"])
        return values, values


@dataclass(frozen=True, slots=True)
class AdagradStep:
    """The hyperparameters of one step of Adagrad with L2 weight decay."""

    kernel: ClassVar[str] = "adagrad"
    lr: float
    eps: float
    weight_decay: float

    @property
    def variant(self) -> int:
        return int(np.float32(self.weight_decay) > 0)

    def scalars(self, scale: float) -> np.ndarray:
        return np.array([scale, self.eps, self.weight_decay, -self.lr], dtype=np.float32)


class AdagradRule(UpdateRule):
    """The update rule of Adagrad. Its moment is the sum of all squared gradients, without bias correction."""

    name = "adagrad"
    moments = ("exp_avg_sq",)
    stock = "DeepSpeedCPUAdagrad"
    types = ("adagrad",)
    spends = True
    trials = (
        ({}, {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.0}),
        ({}, {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1}),
    )

    def step(self, group: Group, number: int) -> AdagradStep:
        del number
        return AdagradStep(float(group["lr"]), group["eps"], group["weight_decay"])

    def spent(self, state: Sequence[torch.Tensor], gradient: torch.Tensor, step: UpdateStep) -> torch.Tensor:
        """Return the values with which DeepSpeed's Adagrad overwrites the gradient in its scalar loop.

        They are -lr * g / (sqrt(sum) + eps), where g is the gradient with weight decay.
        """
        assert isinstance(step, AdagradStep)
        master, total = (tensor.clone() for tensor in state)
        decayed, unread = torch.zeros_like(master), torch.zeros_like(master)
        # With these factors, Adam's first moment is the gradient plus weight decay, computed as one fused operation.
        decays = AdamStep(0.0, 0.0, 0.0, 1.0, step.weight_decay, 1.0, 1.0, adamw=False)
        host_update([master, decayed, unread], gradient, None, decays, tail=len(gradient))
        term = torch.full_like(master, -0.0)  # adding to -0.0 keeps the sign of a zero
        undecayed = replace(step, weight_decay=0.0)
        host_update([term, total], decayed, None, undecayed, tail=len(gradient))
        return term

    def stock_arguments(self, group: Group) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = (group["lr"], group["eps"], group["weight_decay"])
        return values, values


RULES: tuple[type[UpdateRule], ...] = (AdamRule, LionRule, AdagradRule)


def rule_class(optimizer: Any) -> type[UpdateRule] | None:
    """Return the class of the update rule that reproduces a DeepSpeed optimizer, or None if there is none."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    return next((rule for rule in RULES if rule.stock in names), None)


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Return a * b + c rounded once to fp32, as a fused multiply-add does."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))  # rounded twice: the correct result or a neighbor of it
    infinity = np.float32(np.inf)
    around = (np.nextafter(near, -infinity), near, np.nextafter(near, infinity))

    def distance(x: np.float32) -> tuple[Fraction, int]:
        # Of two equally near values, take the even one.
        return abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1

    return min(around, key=distance)
