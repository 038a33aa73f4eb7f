"""A run that does nothing but save: what the demo's kill must hit in the middle."""

import time
from pathlib import Path


def save(folder, commits, stop=False):
    """Commits checkpoints of 8 MiB, then writes one more and never commits it, or stops after one.

    Written slowly, so that who looks in between sees a half of one.
    """
    folder = Path(folder)
    for number in range(1, commits + 2):
        (folder / f"step{number}").mkdir()
        with (folder / f"step{number}" / "state").open("wb") as out:
            for _ in range(16):
                out.write(bytes(range(1, 129)) * 4096)
                out.flush()
                time.sleep(0.02)
        if number > commits:
            time.sleep(600)
        (folder / "latest").write_text(f"step{number}")
        if stop:
            break
