"""A process that saves checkpoints and does nothing else, to be killed in the test of the demo's crash."""

import time
from pathlib import Path


def save(folder, commits, stop=False):
    """Write ``commits`` checkpoints of 8 MiB, each committed by the file ``latest``, then write another one
    without committing it.

    Writing is slow, so that an observer sees a partial checkpoint.

    Args:
        stop: True to end after the first committed checkpoint instead.
    """
    folder = Path(folder)
    for number in range(1, commits + 2):
        (folder / f"step{number}").mkdir()
        with (folder / f"step{number}" / "state").open("wb") as out:
            for piece in range(16):
                if number > commits and piece == 8:
                    time.sleep(600)  # so that this checkpoint stays incomplete, however late the observer is
                out.write(bytes(range(1, 129)) * 4096)
                out.flush()
                time.sleep(0.02)
        (folder / "latest").write_text(f"step{number}")
        if stop:
            break
