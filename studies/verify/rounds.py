"""All defects, by the round in which the judge of `tune verify` was tried on them.

The judge was written together with the first. The others were written down before they were tried, and
the mends that they required came after.
"""

from studies.verify.defects import DEFECTS, Defect
from studies.verify.held_out import HELD_OUT
from studies.verify.updates import UPDATES

ROUNDS: dict[str, tuple[Defect, ...]] = {"first": DEFECTS, "held out": HELD_OUT, "updates": UPDATES}


def defects_of(rounds: tuple[str, ...], ranks: int) -> list[Defect]:
    """Return the defects that so many ranks can have."""
    found = [defect for name in rounds for defect in ROUNDS[name]]
    return [defect for defect in found if ranks >= defect.least_ranks]
