"""Rounds of defects for the study of `tune verify`.

The code that judges runs was written together with the first round. Later rounds were written
down before they were tried, and the repairs that they required came after.
"""

from studies.verify.defects import DEFECTS, Defect
from studies.verify.held_out import HELD_OUT
from studies.verify.updates import UPDATES

ROUNDS: dict[str, tuple[Defect, ...]] = {"first": DEFECTS, "held out": HELD_OUT, "updates": UPDATES}


def defects_of(rounds: tuple[str, ...], ranks: int) -> list[Defect]:
    """Return the defects of the given rounds that can occur with this number of ranks."""
    found = [defect for name in rounds for defect in ROUNDS[name]]
    return [defect for defect in found if ranks >= defect.least_ranks]
