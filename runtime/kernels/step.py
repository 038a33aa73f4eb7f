"""The interface through which the update kernels get the hyperparameters of one optimizer step."""

from typing import ClassVar, Protocol

import numpy as np


class UpdateStep(Protocol):
    """The hyperparameters of one optimizer step for one parameter group, ready for the update kernels.

    Attributes:
        variant: Form of weight decay: none, L2 or decoupled.
    """

    kernel: ClassVar[str]

    @property
    def variant(self) -> int: ...

    def scalars(self, scale: float) -> np.ndarray:
        """Return the fp32 scalars of an optimizer step in the order that the update kernels expect."""
        ...
