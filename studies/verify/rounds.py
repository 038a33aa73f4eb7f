"""Groups of artificial defects, called rounds, for the test of `tune verify`.

The first round was written together with the code that judges runs. The defects of each later round were written before
`tune verify` was tried on any of them. If `tune verify` did not find a defect, the code was improved afterwards.
"""

from studies.verify.defects import DEFECTS, Defect
from studies.verify.held_out import HELD_OUT
from studies.verify.updates import UPDATES

ROUNDS: dict[str, tuple[Defect, ...]] = {"first": DEFECTS, "held out": HELD_OUT, "updates": UPDATES}


def defects_of(rounds: tuple[str, ...], ranks: int) -> list[Defect]:
    """Return those artificial defects in the given rounds that can occur with this number of ranks.

    A round is a group of defects that were written at the same time. Its name is a key of `ROUNDS`.
    """
    found = [defect for name in rounds for defect in ROUNDS[name]]
    return [defect for defect in found if ranks >= defect.least_ranks]
