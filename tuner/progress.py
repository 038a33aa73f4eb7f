"""Reports of progress, and a progress bar for ``tune`` commands that take more than a moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

ShowProgress = Callable[[float, str], object]


def silently(_share: float, _what: str) -> None:
    """Ignore a report of progress. This is the default callback of `decide`."""


@contextmanager
def progress_after(quiet_s: float) -> Iterator[ShowProgress]:
    """Return a context manager that yields a function to show progress, called with the finished fraction
    and the name of the current phase.

    If stderr is a terminal, a progress bar appears on stderr after ``quiet_s`` seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=1.0)

    def tell(share: float, what: str) -> None:
        bar.update(task, completed=share, description=what)

    later = Timer(quiet_s, bar.start)
    later.daemon = True
    if bar.console.is_terminal and quiet_s > 0:
        later.start()
    elif bar.console.is_terminal:
        bar.start()
    try:
        yield tell
    finally:
        later.cancel()
        if later.ident is not None:  # the timer may be about to start the bar
            later.join()
        if bar.live.is_started:  # stopping a bar that never started would print an empty line
            bar.stop()
