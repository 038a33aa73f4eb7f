"""Rounds (groups) of defects for the test of `tune verify`.

The first round was written together with the code that judges runs. Each later round was written
before it was tried, and the code was improved afterwards if a defect was not found.
"""

from studies.verify.defects import DEFECTS, Defect
from studies.verify.held_out import HELD_OUT
from studies.verify.updates import UPDATES

ROUNDS: dict[str, tuple[Defect, ...]] = {"first": DEFECTS, "held out": HELD_OUT, "updates": UPDATES}


def defects_of(rounds: tuple[str, ...], ranks: int) -> list[Defect]:
    """Return the artificial defects of the given rounds (groups) that can occur with this number of
    ranks.
    """
    found = [defect for name in rounds for defect in ROUNDS[name]]
    return [defect for defect in found if ranks >= defect.least_ranks]
