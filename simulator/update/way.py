"""The ways of updating a subgroup: placement, parameter location, early update and gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from ebbtide.simulator.update.recipes import RECIPES, Placement, Recipe, Slot, recipe_of

# A way's code is the sum of these.
PLACEMENT_CODES: dict[Placement, int] = {placement: i for i, placement in enumerate(RECIPES)}
SUMMED, EARLY, PARAMETERS_ON_HOST = 16, 32, 64  # there are fewer placements
ParameterLocation = Literal["host", "device"]
LOCATION_CODES: dict[ParameterLocation, int] = {"device": 0, "host": PARAMETERS_ON_HOST}


class Way(NamedTuple):
    """A way of updating a subgroup: placement, parameter location and two flags.

    The attributes are those of a row of a plan file (`WayRun`).
    """

    placement: Placement
    parameters: ParameterLocation = "device"
    early: bool = False
    sum_on_device: bool = False

    @staticmethod
    def each(placements: Iterable[Placement], parameters: ParameterLocation = "device") -> tuple[Way, ...]:
        """Return the ways of updating subgroups with the given placements, with all flags off."""
        return tuple(Way(placement, parameters) for placement in placements)

    @property
    def code(self) -> int:
        """Return a number below 128 that encodes a subgroup's placement, parameter location and flags."""
        code = PLACEMENT_CODES[self.placement] + LOCATION_CODES[self.parameters]
        return code + self.early * EARLY + self.sum_on_device * SUMMED

    @property
    def recipe(self) -> Recipe:
        """Return the recipe (sequence of ops) that updates a subgroup in this way."""
        return recipe_of(self.placement, self.parameters, updated_early=self.early, summed=self.sum_on_device)

    @property
    def unfused(self) -> Recipe:
        """Return the recipe (sequence of ops) of an update with DeepSpeed's host passes, not the fused kernel."""
        return recipe_of(
            self.placement, self.parameters, fused=False, updated_early=self.early, summed=self.sum_on_device
        )

    @property
    def redo(self) -> Recipe:
        """Return the recipe (sequence of ops) of a subgroup's update in a step without a right early update.

        The update waits for the gradient norm. On the host the new parameters then always have their own buffer.
        """
        plain = self._replace(early=False).recipe
        update = plain.steps[0]
        if not self.early or update.takes != Slot.PARAMETER:
            return plain
        return replace(plain, steps=(replace(update, takes=None), *self.recipe.steps[1:]))

    @property
    def plain(self) -> Way:
        """Return the way of updating a subgroup with early update and on-device gradient accumulation turned off."""
        return Way(self.placement, self.parameters)

    @property
    def can_be_early(self) -> bool:
        """Return whether a subgroup's placement allows an update before the gradient norm is known."""
        return recipe_of(self.placement, self.parameters).updated_early is not None

    @property
    def can_sum_on_device(self) -> bool:
        """Return whether a subgroup's gradients go to host memory, so that their sum can stay on the GPU instead."""
        return recipe_of(self.placement, self.parameters).summed_on_device is not None

    def fitted(self) -> Way:
        """Return the way of updating a subgroup without the flags that the subgroup's placement does not allow."""
        return self._replace(
            early=self.early and self.can_be_early, sum_on_device=self.sum_on_device and self.can_sum_on_device
        )


def plain_ways() -> list[Way]:
    """Return all ways of updating a subgroup without early update and on-device gradient accumulation."""
    return [Way(placement, parameters) for parameters, placement in product(LOCATION_CODES, RECIPES)]


def ways() -> list[Way]:
    """Return all valid ways of updating a subgroup, those without any flag first."""
    every = (
        plain._replace(early=early, sum_on_device=summed)
        for early, summed, plain in product((False, True), (False, True), plain_ways())
    )
    return [way for way in every if way.fitted() == way]


EARLY_PLACEMENTS: tuple[Placement, ...] = tuple(p for p in RECIPES if Way(p).can_be_early)
_BY_CODE = {way.code: way for way in ways()}


def of_codes(codes: Iterable[int]) -> tuple[Way, ...]:
    """Return the ways of updating subgroups that are encoded by the given numbers (`Way.code`)."""
    return tuple(_BY_CODE[int(code)] for code in codes)
