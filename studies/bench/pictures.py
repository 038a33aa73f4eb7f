"""Pictures of the studies' results, drawn by matplotlib without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, *grid: int, dpi: int = 130, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a matplotlib figure and its axes for drawing, and save the picture to ``path`` afterwards.

    ``grid`` and ``options`` are passed to matplotlib's ``subplots``.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)
