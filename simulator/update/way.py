"""The ways of updating a subgroup. A way is a placement, a parameter location and two flags.

The flags are an early update (before the gradient norm is known) and gradient accumulation on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from ebbtide.simulator.update.recipes import RECIPES, Recipe, recipe_of
from ebbtide.simulator.update.steps import Placement, Slot

# The code of a way of updating is the sum of these numbers.
PLACEMENT_CODES: dict[Placement, int] = {placement: i for i, placement in enumerate(RECIPES)}
SUMMED, EARLY, PARAMETERS_ON_HOST = 16, 32, 64  # larger than any code of a placement
ParameterLocation = Literal["host", "device"]
LOCATION_CODES: dict[ParameterLocation, int] = {"device": 0, "host": PARAMETERS_ON_HOST}


class Way(NamedTuple):
    """A way of updating a subgroup of the optimizer state: its placement, its parameter location and two flags.

    Attributes:
        placement: Memory that holds the subgroup's state, and processor that updates it.
        parameters: Memory that holds the subgroup's 16-bit parameters while they are not used.
        early: True if the update starts before the gradient norm is known.
        sum_on_device: True if gradients of micro-batches are summed on the GPU.
    """

    placement: Placement
    parameters: ParameterLocation = "device"
    early: bool = False
    sum_on_device: bool = False

    @staticmethod
    def each(placements: Iterable[Placement], parameters: ParameterLocation = "device") -> tuple[Way, ...]:
        """Return a `Way` for each placement, with no flag set."""
        return tuple(Way(placement, parameters) for placement in placements)

    @property
    def code(self) -> int:
        """Return the number that encodes this way of updating: its placement, parameter location and flags."""
        # The number is below 128, so that it fits into a signed byte.
        code = PLACEMENT_CODES[self.placement] + LOCATION_CODES[self.parameters]
        return code + self.early * EARLY + self.sum_on_device * SUMMED

    @property
    def recipe(self) -> Recipe:
        """Return the recipe for updating a subgroup with this placement, parameter location and flags."""
        return recipe_of(self.placement, self.parameters, updated_early=self.early, summed=self.sum_on_device)

    @property
    def redo(self) -> Recipe:
        """Return the recipe (sequence of ops) of an update after the gradient norm, for a subgroup with early updates.

        This recipe is needed in two cases: in steps without early updates, and if a step clips or overflows, so that
        the early update is discarded and redone. If the CPU does the update, it writes new parameters to a buffer that
        belongs to this subgroup alone. So the update need not wait for one of the buffers that subgroups share
        (`Slot.PARAMETER`).
        """
        plain = self._replace(early=False).recipe
        update = plain.steps[0]
        if not self.early or update.takes != Slot.PARAMETER:
            return plain
        return replace(plain, steps=(replace(update, takes=None), *self.recipe.steps[1:]))

    @property
    def plain(self) -> Way:
        """Return a copy of this `Way` with both flags off."""
        return Way(self.placement, self.parameters)

    @property
    def can_be_early(self) -> bool:
        """Return True if a subgroup's placement allows updating it before the gradient norm is known."""
        return recipe_of(self.placement, self.parameters).updated_early is not None

    @property
    def can_sum_on_device(self) -> bool:
        """Return True if a plan can choose that the GPU accumulates a subgroup's gradients over several micro-
        batches.
        """
        return recipe_of(self.placement, self.parameters).summed_on_device is not None

    def fitted(self) -> Way:
        """Return a copy of this `Way` without the flags that its placement forbids."""
        return self._replace(
            early=self.early and self.can_be_early, sum_on_device=self.sum_on_device and self.can_sum_on_device
        )


def plain_ways() -> list[Way]:
    """Return all combinations of a placement and a parameter location, as `Way` objects with both flags off."""
    return [Way(placement, parameters) for parameters, placement in product(LOCATION_CODES, RECIPES)]


def ways() -> list[Way]:
    """Return all valid ways of updating a subgroup: combinations of placement, parameter location and two flags.

    The combinations with both flags off come first.
    """
    every = (
        plain._replace(early=early, sum_on_device=summed)
        for early, summed, plain in product((False, True), (False, True), plain_ways())
    )
    return [way for way in every if way.fitted() == way]


EARLY_PLACEMENTS: tuple[Placement, ...] = tuple(p for p in RECIPES if Way(p).can_be_early)
_BY_CODE = {way.code: way for way in ways()}


def of_codes(codes: Iterable[int]) -> tuple[Way, ...]:
    """Decode numbers from `Way.code` into ways of updating."""
    return tuple(_BY_CODE[int(code)] for code in codes)
