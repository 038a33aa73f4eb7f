"""The ways of updating a subgroup."""

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
    """A way to update a subgroup. The attributes are those of a row of a plan file (`WayRun`)."""

    placement: Placement
    parameters: ParameterLocation = "device"
    early: bool = False
    sum_on_device: bool = False

    @staticmethod
    def each(placements: Iterable[Placement], parameters: ParameterLocation = "device") -> tuple[Way, ...]:
        """Return the plain ways of some placements."""
        return tuple(Way(placement, parameters) for placement in placements)

    @property
    def code(self) -> int:
        """Return the way as a number below 128."""
        code = PLACEMENT_CODES[self.placement] + LOCATION_CODES[self.parameters]
        return code + self.early * EARLY + self.sum_on_device * SUMMED

    @property
    def recipe(self) -> Recipe:
        """Return the ops of an update in this way."""
        return recipe_of(self.placement, self.parameters, updated_early=self.early, summed=self.sum_on_device)

    @property
    def unfused(self) -> Recipe:
        """Return the ops of an update in this way with stock's separate passes on the host."""
        return recipe_of(
            self.placement, self.parameters, fused=False, updated_early=self.early, summed=self.sum_on_device
        )

    @property
    def redo(self) -> Recipe:
        """Return the ops of an update in this way that no early update precedes, or a wrong one.

        On the host, early or not, new parameters wait in a buffer of their own.
        """
        plain = self._replace(early=False).recipe
        update = plain.steps[0]
        if not self.early or update.takes != Slot.PARAMETER:
            return plain
        return replace(plain, steps=(replace(update, takes=None), *self.recipe.steps[1:]))

    @property
    def plain(self) -> Way:
        """Return the way without early update and without a sum on the device."""
        return Way(self.placement, self.parameters)

    @property
    def can_be_early(self) -> bool:
        """True if the placement allows an update before the norm."""
        return recipe_of(self.placement, self.parameters).updated_early is not None

    @property
    def can_sum_on_device(self) -> bool:
        """True if gradients go to host memory, so that a sum can stay on the device instead."""
        return recipe_of(self.placement, self.parameters).summed_on_device is not None

    def fitted(self) -> Way:
        """Return the way without the bits that its placement does not allow."""
        return self._replace(
            early=self.early and self.can_be_early, sum_on_device=self.sum_on_device and self.can_sum_on_device
        )


def plain_ways() -> list[Way]:
    """Return the ways without early update and without a sum on the device."""
    return [Way(placement, parameters) for parameters, placement in product(LOCATION_CODES, RECIPES)]


def ways() -> list[Way]:
    """Return all ways that there are, the plain ones first."""
    every = (
        plain._replace(early=early, sum_on_device=summed)
        for early, summed, plain in product((False, True), (False, True), plain_ways())
    )
    return [way for way in every if way.fitted() == way]


EARLY_PLACEMENTS: tuple[Placement, ...] = tuple(p for p in RECIPES if Way(p).can_be_early)
_BY_CODE = {way.code: way for way in ways()}


def of_codes(codes: Iterable[int]) -> tuple[Way, ...]:
    """Return the ways of some codes."""
    return tuple(_BY_CODE[int(code)] for code in codes)
