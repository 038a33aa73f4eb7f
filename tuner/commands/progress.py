"""How far a command is, where it takes longer than one waits without asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def told_after(quiet_s: float) -> Iterator[Callable[[float, str], None]]:
    """Gives what is to be called with the share that is done, and with what is: a bar on stderr
    that appears after so many seconds, if somebody looks.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begun_s = bar.add_task("", total=1.0), time.monotonic()

    def tell(share: float, what: str) -> None:
        if bar.console.is_terminal and time.monotonic() - begun_s >= quiet_s:
            bar.start()
        bar.update(task, completed=share, description=what)

    try:
        yield tell
    finally:
        if bar.live.is_started:  # else it would leave an empty line
            bar.stop()
