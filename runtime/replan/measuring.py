"""A measurement, for ``plan="auto"``, of how fast the machine copies, computes and updates. Made once per node."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ebbtide.runtime.replan.ranks import FirstRankError, by_the_first
from ebbtide.simulator.machine import Machine

logger = logging.getLogger("ebbtide")

DRIVE_BYTES, DRIVE_S = 2**28, 2.0  # limits for measuring a folder with stored state


def measured_machine(drives: Sequence[str] = ()) -> Machine:
    """Measure how fast this machine copies, computes and updates, or read this from the profiler's cache.

    The first rank of each node does this. The other ranks wait, because concurrent measurements would disturb each
    other. This is a collective call.

    Args:
        drives: Folders for optimizer state. Their drives are measured in every call and never read from the cache. All
            ranks must give the same number of folders.

    Raises:
        RuntimeError: One rank could not measure. Raised on every rank.
        OSError: A folder cannot be written to.
    """
    try:
        return by_the_first(lambda: _with_drives(drives), of_each_host=True)
    except FirstRankError as error:
        raise RuntimeError(
            f"an automatic plan measures the machine before training, but the measurement failed ({error}). Fix the "
            'cause, or give a plan file instead of "automatic"'
        ) from None


def _say(done: int, total: int, stage: str) -> None:
    if done == 0:
        logger.info("measuring this machine's rates, which takes half a minute. They are kept for the next start")
    elif done < total:
        logger.info("measuring this machine's rates: %s (%d of %d)", stage, done + 1, total)


def _with_drives(drives: Sequence[str]) -> Machine:
    from ebbtide.profiler import measure_machine
    from ebbtide.profiler.rates.storage import measure_drive

    machine = measure_machine(progress=_say)
    found = {name: measure_drive(Path(name), DRIVE_BYTES, DRIVE_S) for name in drives}
    return machine.model_copy(update={"drives": {**machine.drives, **found}})
