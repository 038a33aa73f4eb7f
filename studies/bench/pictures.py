"""Pictures of studies: drawn without a display, written, closed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, *grid: int, dpi: int = 130, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Return the figure and the axes of matplotlib's ``subplots``; written when the block has ended."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)
