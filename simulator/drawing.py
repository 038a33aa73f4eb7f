"""Drawing of simulated or measured timelines with matplotlib: a row for each lane (such as a copy direction),
with a bar for each op.

matplotlib is imported inside the functions, because the simulator itself does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.schedule import Lane, OpKind, Span, makespan_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Ops of a similar kind share a hue (colors of Okabe & Ito, which are safe for color-blind readers): compute blue,
# gradients orange and yellow, GPU updates green, CPU updates vermilion (early ones salmon), copies of state purple and
# pink, storage black and grey.
COLOURS: dict[OpKind, str] = {
    OpKind.FORWARD: "#8fc7ea",
    OpKind.BACKWARD: "#0072b2",
    OpKind.PARAMETER_GATHER: "#b8d8d0",
    OpKind.GRADIENT_REDUCE: "#c9a227",
    OpKind.GRADIENT_D2H: "#e69f00",
    OpKind.GRADIENT_H2D: "#f3c766",
    OpKind.GRADIENT_PASS: "#b5651d",
    OpKind.NORM: "#222222",
    OpKind.STATE_H2D: "#cc79a7",
    OpKind.UPDATE_DEVICE: "#009e73",
    OpKind.STATE_D2H: "#8e5ea2",
    OpKind.UPDATE_HOST: "#d55e00",
    OpKind.UPDATE_HOST_EARLY: "#ff9da7",
    OpKind.UPDATE_DEVICE_EARLY: "#ff9da7",
    OpKind.PARAMETER_CAST: "#f0a37c",
    OpKind.PARAMETER_H2D: "#f0e442",
    OpKind.PARAMETER_D2H: "#f0e442",
    OpKind.SNAPSHOT: "#999999",
    OpKind.PERSIST: "#4d4d4d",
    OpKind.IDLE: "#eeeeee",
    OpKind.STEP_END: "#222222",
    OpKind.PARAMETER_FETCH: "#c8bf2a",
    OpKind.ACTIVATION_D2H: "#7fb069",
    OpKind.ACTIVATION_H2D: "#a9cf96",
    OpKind.STATE_READ: "#a05195",
    OpKind.STATE_WRITE: "#665191",
    OpKind.ISSUE: "#bbbbbb",
}
_DARK = {"#0072b2", "#009e73", "#8e5ea2", "#d55e00", "#4d4d4d", "#222222", "#b5651d"}
_MOMENTS = {OpKind.NORM: (0, (2, 2)), OpKind.STEP_END: (0, (6, 3))}
_BAR_HEIGHT = 0.72
_CHARACTER_IN = 0.075  # width of one character of a bar's label, in inches of the figure
_PADDING_IN = 0.05


def draw_spans(spans: Sequence[Span], title: str, ax: Axes | None = None) -> Axes:
    """Draw the ops of a timeline as bars, and return the matplotlib axes.

    Each lane (a queue of ops, such as a copy direction) is a row. Bars are labelled with their subgroup or layer
    if the label fits. The time axis is in milliseconds below two seconds, otherwise in seconds.
    """
    if ax is None:
        ax = _new_axes(spans)
    lanes = _lanes_in_use(spans)
    origin = min((s.start_s for s in spans), default=0.0)
    length_s = makespan_s(spans)
    scale, unit = (1e3, "ms") if length_s < 2 else (1.0, "s")
    ax.set_xlim(0, max(length_s, 1e-9) * scale)
    for row, lane in enumerate(lanes):
        bars = [s for s in spans if s.lane == lane and s.end_s > s.start_s]
        _draw_lane(ax, row, bars, origin, scale)
    _draw_moments(ax, spans, origin, scale)
    ax.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.set_xlabel(f"time ({unit})")
    ax.set_title(title, loc="left", fontsize=11)
    _decorate(ax)
    _legend(ax, spans)
    return ax


def _new_axes(spans: Sequence[Span]) -> Axes:
    import matplotlib.pyplot as plt

    rows = max(1, len(_lanes_in_use(spans)))
    _, ax = plt.subplots(figsize=(12, 1.6 + 0.45 * rows), layout="constrained")
    return ax


def _lanes_in_use(spans: Sequence[Span]) -> list[Lane]:
    used = {s.lane for s in spans if s.end_s > s.start_s}
    return [lane for lane in Lane if lane in used]


def _draw_lane(ax: Axes, row: int, spans: Sequence[Span], origin_s: float, scale: float) -> None:
    for kind in OpKind:
        bars = [s for s in spans if s.kind == kind]
        if not bars:
            continue
        ax.broken_barh(
            [((s.start_s - origin_s) * scale, (s.end_s - s.start_s) * scale) for s in bars],
            (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=COLOURS[kind],
            **_edges(ax, bars, scale),
        )
        for span in bars:
            _label(ax, row, span, origin_s, scale)


def _inches(ax: Axes, span: Span, scale: float) -> float:
    figure = ax.get_figure(root=True)
    figure_width = float(figure.get_size_inches()[0]) if figure is not None else 1.0
    left, right = ax.get_xlim()
    axes_width = ax.get_position().width * figure_width
    return float((span.end_s - span.start_s) * scale / (right - left) * axes_width)


def _edges(ax: Axes, bars: Sequence[Span], scale: float) -> dict[str, Any]:
    widths = sorted(_inches(ax, s, scale) for s in bars)
    if widths[len(widths) // 2] > 0.06:
        return {"edgecolor": "white", "linewidth": 0.6}
    return {"edgecolor": COLOURS[bars[0].kind], "linewidth": 0.5}


def _label(ax: Axes, row: int, span: Span, origin_s: float, scale: float) -> None:
    number, prefix = (span.subgroup, "s") if span.subgroup >= 0 else (span.layer, "l")
    if number < 0:
        return
    text = f"{prefix}{number}"
    if _inches(ax, span, scale) < len(text) * _CHARACTER_IN + _PADDING_IN:
        return
    middle = (0.5 * (span.start_s + span.end_s) - origin_s) * scale
    colour = "white" if COLOURS[span.kind] in _DARK else "black"
    ax.text(middle, row, text, ha="center", va="center", fontsize=7, color=colour, clip_on=True)


def _draw_moments(ax: Axes, spans: Iterable[Span], origin_s: float, scale: float) -> None:
    for span in spans:
        if span.kind in _MOMENTS:
            ax.axvline(
                (span.end_s - origin_s) * scale,
                color=COLOURS[span.kind],
                linewidth=0.9,
                linestyle=_MOMENTS[span.kind],
                alpha=0.75,
                zorder=0.5,
            )


def _decorate(ax: Axes) -> None:
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _legend(ax: Axes, spans: Iterable[Span]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans = list(spans)
    bars = {s.kind for s in spans if s.end_s > s.start_s}
    seen = bars | {s.kind for s in spans if s.kind in _MOMENTS}
    handles: list[Patch | Line2D] = []
    for kind in OpKind:
        if kind not in seen:
            continue
        if kind in _MOMENTS:
            handles.append(
                Line2D([], [], color=COLOURS[kind], linestyle=_MOMENTS[kind], linewidth=0.9, label=kind.value)
            )
        if kind in bars:
            what = f"until {kind.value}" if kind in _MOMENTS else kind.value
            handles.append(Patch(facecolor=COLOURS[kind], label=what))
    if handles:
        ax.legend(
            handles=handles, loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=8, handlelength=1.4
        )
