"""The hyperparameters of one Adam step, computed exactly as DeepSpeedCPUAdam computes them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Hyperparameters of one Adam step for one parameter group. Every value is an fp32 number.

    Attributes:
        bias1: 1 - beta1^t, or 1 without bias correction.
        bias2: 1 / sqrt(1 - beta2^t), or 1 without bias correction.
        adamw: True for decoupled weight decay (AdamW), False for L2 (Adam).
    """

    kernel: ClassVar[str] = "adam"
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias1: float
    bias2: float
    adamw: bool = True

    @property
    def variant(self) -> int:
        """Return the form of weight decay in an Adam step, as a number: 0 for none, 1 for L2, 2 for decoupled."""
        if np.float32(self.weight_decay) <= 0:
            return 0
        return 2 if self.adamw else 1

    def scalars(self, scale: float) -> np.ndarray:
        """Return the nine fp32 scalars of an Adam step in the order that the update kernels expect.

        Args:
            scale: Factor that unscales and clips the gradient. It is rounded to fp32 as ``tensor.mul_(scale)`` does.
        """
        one = np.float32(1)
        lr, beta1, beta2 = np.float32(self.lr), np.float32(self.beta1), np.float32(self.beta2)
        weight_decay = np.float32(self.weight_decay)
        return np.array(
            [
                np.float32(scale),
                beta1,
                one - beta1,
                beta2,
                one - beta2,
                np.float32(self.bias2),
                np.float32(self.eps),
                -lr * weight_decay if self.adamw else weight_decay,
                -lr / np.float32(self.bias1),
            ],
            dtype=np.float32,
        )


class BiasCorrection:
    """Powers of Adam's betas for bias correction, computed with the same rounding as in DeepSpeedCPUAdam.

    At each new step, DeepSpeedCPUAdam multiplies the fp32 powers of the preceding step by the betas. It calls ``pow``
    instead if a subgroup's betas differ from those of the subgroup updated before it. Older builds (0.18.6) also call
    ``pow`` for all subgroups of a step except the first. The rounding thus depends on the order of calls, which must be
    the order of the subgroups' updates.

    On resume, stock DeepSpeed calls ``pow``, so that its resumed run is not bit-identical to an uninterrupted one.
    `resume` here repeats the computation of all earlier steps, so that a resumed run is bit-identical.

    Args:
        recounts: If True, compute as the older builds do.

    Source: deepspeed/ops/csrc/includes/cpu_adam.h, ``IncrementStep`` and ``update_state``.
    """

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, *, recounts: bool = False) -> None:
        self.recounts = recounts
        self._begin(beta1, beta2)

    def _begin(self, beta1: float, beta2: float) -> None:
        self._betas = (np.float32(beta1), np.float32(beta2))
        self._powers = (np.float32(1), np.float32(1))
        self._step = 0

    def advance(self, step: int, beta1: float, beta2: float) -> tuple[float, float]:
        """Return Adam's two bias corrections for the update of one subgroup, in fp32.

        They are 1 - beta1^step and 1 / sqrt(1 - beta2^step). Call this method once for each subgroup of a step, in the
        order of subgroups: as in DeepSpeed, the rounding of the powers depends on the earlier calls.
        """
        betas = (np.float32(beta1), np.float32(beta2))
        if betas != self._betas:
            self._betas = betas
            self._powers = self._pow(step)
        elif step == self._step + 1:
            self._multiply()
        elif step != self._step or self.recounts:
            self._powers = self._pow(step)
        self._step = step
        one = np.float32(1)
        p1, p2 = self._powers
        return float(one - p1), float(one / np.sqrt(one - p2))

    def _multiply(self) -> None:
        b1, b2 = self._betas
        p1, p2 = self._powers
        self._powers = (p1 * b1, p2 * b2)

    def _pow(self, step: int) -> tuple[np.float32, np.float32]:
        b1, b2 = self._betas
        return np.float32(math.pow(float(b1), step)), np.float32(math.pow(float(b2), step))

    def resume(self, step: int, betas_in_order: list[tuple[float, float]]) -> None:
        """Set the powers of Adam's betas, after a restart, to the values that they would have after ``step`` steps
        without a restart.

        These values differ from ``beta ** step`` by rounding: DeepSpeedCPUAdam usually multiplies the powers of the
        preceding step by the betas.

        Args:
            betas_in_order: Each subgroup's betas, in the order of updates. All subgroups share one pair of powers. If
                their betas differ, the rounding depends on the order.
        """
        first = betas_in_order[0]
        self._begin(*first)
        if any(betas != first for betas in betas_in_order):
            # Where betas change the powers are new: of what was before, nothing is left.
            for number in range(max(1, step - 1), step + 1):
                for betas in betas_in_order:
                    self.advance(number, *betas)
            return
        if self.recounts and len(betas_in_order) > 1:
            self._powers = self._pow(step)
        else:
            for _ in range(step):
                self._multiply()
        self._step = step
