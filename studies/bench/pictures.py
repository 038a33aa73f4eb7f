"""Pictures of the studies, drawn without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, *grid: int, dpi: int = 130, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the figure and axes of matplotlib's ``subplots``, and save the picture after the block."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)
