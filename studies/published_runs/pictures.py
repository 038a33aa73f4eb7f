"""Scatter plots of predicted against measured values of published runs, with a panel for each quantity."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.bench.offload_runs import testbeds
from studies.bench.pictures import picture
from studies.published_runs.judging import QUANTITIES, Pair, measured_and_predicted

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw(pairs: Sequence[Pair], path: Path) -> None:
    """Draw scatter plots of predicted against measured values of published runs, and save the picture to ``path``.

    The picture has a panel for each quantity, such as the time of an iteration.
    """
    with picture(path, 1, len(QUANTITIES), figsize=(17, 3.9)) as (figure, axes):
        for ax, quantity in zip(axes, QUANTITIES, strict=True):
            scale, unit = (1.0, "GiB") if quantity == "memory" else (1e-3, "s")
            for name, colour in zip(testbeds([run for run, _ in pairs]), COLOURS, strict=False):
                both = [measured_and_predicted(p, quantity) for p in pairs if p[0].testbed == name]
                points = np.array([b for b in both if b is not None]).reshape(-1, 2) * scale
                ax.scatter(*points.T, s=20, alpha=0.75, color=colour, label=name, linewidths=0)
            _diagonal(ax)
            ax.set_title(f"{quantity} ({unit})" if quantity != "memory" else "peak device memory (GiB)")
            ax.set_xlabel("measured")
        axes[0].set_ylabel("predicted")
        axes[0].legend(frameon=False)
        figure.suptitle("Published runs: predicted over measured, grey band ±10%")


def _diagonal(ax: Any) -> None:
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    line = np.array([max(low, 0), high])
    ax.fill_between(line, 0.9 * line, 1.1 * line, color="#dddddd", zorder=0, linewidth=0)
    ax.plot(line, line, color="#777777", linewidth=0.8, zorder=1)
    ax.set_xlim(*line)
    ax.set_ylim(*line)
    ax.set_aspect("equal")
