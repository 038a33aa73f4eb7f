"""The arguments of an optimizer kernel for one step."""

from typing import ClassVar, Protocol

import numpy as np


class UpdateStep(Protocol):
    """One step of one parameter group, ready for the kernels.

    Attributes:
        kernel: the rule's name.
        variant: the form of weight decay (none, L2 or decoupled).
    """

    kernel: ClassVar[str]

    @property
    def variant(self) -> int: ...

    def scalars(self, scale: float) -> np.ndarray:
        """Return the kernels' fp32 scalars in their order; the first is ``scale``."""
        ...
