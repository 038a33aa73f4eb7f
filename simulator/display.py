"""The display of plans, machines, workloads and timelines for people: as a line of text, a table or a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_ROWS = 12  # most rows of a table in a notebook
Records = Sequence[Mapping[str, Any]]


class Shown:
    """A base class of plans, machines and other objects, for their display: a short ``repr``, a table and a chart."""

    def in_short(self) -> str:
        """Return one line of text about an object, such as a plan or a machine, for the object's ``repr``."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of the object's table in notebooks. The first column contains the rows' names."""
        raise NotImplementedError

    def drawn(self) -> tuple[str, ...]:
        """Return the table columns that `plot` stacks, one bar for each row. All have the same unit."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_short()}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return f"<p><b>{type(self).__name__}</b>: {escape(self.in_short())}</p>{table(self.records())}"

    def to_frame(self) -> pd.DataFrame:
        """Return the object's table. pandas is installed by ``pip install './ebbtide[tune]'``."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw a bar chart of a plan, machine or similar object, and return the matplotlib axes.

        There is one bar for each row of the table that notebooks show for the object (`records`). The values of the
        columns that `drawn` names are stacked in the bar.
        """
        import matplotlib.pyplot as plt

        records = self.records()
        if ax is None:
            _, ax = plt.subplots(figsize=(8, 1 + 0.3 * len(records)), layout="constrained")
        names = [str(next(iter(row.values()))) for row in records]
        left = [0.0] * len(records)
        for column in self.drawn():
            lengths = [float(row[column] or 0.0) for row in records]
            ax.barh(range(len(records)), lengths, left=left, label=column)
            left = [start + length for start, length in zip(left, lengths, strict=True)]
        ax.set_yticks(range(len(records)), names)
        ax.invert_yaxis()
        ax.set_title(self.in_short(), fontsize=10)
        ax.legend()
        return ax


def table(records: Records) -> str:
    """Return table rows as HTML for a notebook: at most `MOST_ROWS` rows, and a note on how many are left out."""
    if not records:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in records[0])
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row.values()) + "</tr>"
        for row in records[:MOST_ROWS]
    )
    more = len(records) - MOST_ROWS
    rest = f"<p>{more} more rows: to_frame()</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{rest}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
