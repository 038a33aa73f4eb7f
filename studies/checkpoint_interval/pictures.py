"""The picture of the study of checkpoint intervals."""

from pathlib import Path
from typing import Any

import numpy as np

from studies.bench.pictures import picture


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the goodput (useful training per time) over the checkpoint interval, predicted and measured.

    The intervals by Young, Daly, CheckFreq and ebbtide's tuner are marked.
    """
    with picture(path, 1, 2, figsize=(11, 4.2), sharex=True, sharey=True) as (_, (left, right)):
        predicted = figures["predicted"]
        for ax in (left, right):
            ax.plot(*np.array(predicted["curve"]).T, color="#999999", label="predicted, long run")
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_xlabel("steps between checkpoints")
            ax.spines[["top", "right"]].set_visible(False)
        styles = (("o", 13, "none"), ("s", 9, "none"), ("D", 5, "none"), ("^", 8, "none"))
        colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
        marks = zip(predicted["rules"].items(), styles, colours, strict=True)
        for (name, rule), (marker, size, face), colour in marks:
            left.plot(
                rule["interval_steps"],
                rule["goodput"],
                marker,
                ms=size,
                mfc=face,
                mec=colour,
                mew=1.8,
                label=f"{name}: {rule['interval_steps']}",
                ls="none",
            )
        rows = figures["measured"]
        x = [row["interval_steps"] for row in rows]
        right.plot(
            x,
            [row["predicted_goodput_same_failures"] for row in rows],
            "o",
            mfc="none",
            mec="#0072b2",
            ms=9,
            label="predicted for these very kills",
        )
        right.plot(x, [row["goodput"] for row in rows], "o-", color="#d55e00", ms=5, label="measured")
        left.set(ylabel="goodput", ylim=(0, 1))
        left.set_title(f"Predicted: MTBF {figures['mtbf_s']:g} s, restart {figures['restart_s']:.1f} s", fontsize=10)
        right.set_title(f"Measured: {figures['kills']} real kills ({figures['model']} on CPU cores)", fontsize=10)
        for ax in (left, right):
            ax.legend(frameon=False, fontsize=9, loc="lower left")
