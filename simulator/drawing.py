"""Drawing of simulated or measured timelines with matplotlib: a row for each lane (such as a copy direction),
with a bar for each op. The colors are those of the web page, the reports and the pictures of the studies too.

matplotlib is imported inside the functions, because the simulator itself does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.schedule import Lane, OpKind, Span, makespan_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS: Mapping[OpKind, str] = MappingProxyType(
    {
        OpKind.FORWARD: "forward",
        OpKind.BACKWARD: "backward",
        OpKind.GRADIENT_D2H: "gradients",
        OpKind.GRADIENT_H2D: "gradients",
        OpKind.GRADIENT_PASS: "gradients",
        OpKind.NORM: "norm",
        OpKind.STATE_H2D: "state",
        OpKind.STATE_D2H: "state",
        OpKind.STATE_READ: "state",
        OpKind.STATE_WRITE: "state",
        OpKind.UPDATE_DEVICE: "device update",
        OpKind.UPDATE_HOST: "host update",
        OpKind.UPDATE_HOST_EARLY: "early update",
        OpKind.UPDATE_DEVICE_EARLY: "early update",
        OpKind.PARAMETER_CAST: "parameters",
        OpKind.PARAMETER_H2D: "parameters",
        OpKind.PARAMETER_D2H: "parameters",
        OpKind.PARAMETER_FETCH: "parameters",
        OpKind.ACTIVATION_D2H: "activations",
        OpKind.ACTIVATION_H2D: "activations",
        OpKind.PARAMETER_GATHER: "network",
        OpKind.GRADIENT_REDUCE: "network",
        OpKind.SNAPSHOT: "checkpoint",
        OpKind.PERSIST: "checkpoint",
        OpKind.ISSUE: "issue",
        OpKind.IDLE: "idle",
    }
)
# Colors of Okabe and Ito, which are safe for color-blind readers, and further ones. In the order of legends.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#0072b2",
        "backward": "#56b4e9",
        "gradients": "#e69f00",
        "norm": "#5f6b75",
        "state": "#009e73",
        "device update": "#cc79a7",
        "host update": "#d55e00",
        "early update": "#ff9da7",
        "parameters": "#f0e442",
        "activations": "#882255",
        "network": "#6b4fa0",
        "checkpoint": "#8c6d46",
        "issue": "#526170",
        "idle": "#c3cbd2",
    }
)
# Lighter or darker variants for a dark background, where the color itself has too little contrast.
_ON_DARK: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#2f93d1",
        "norm": "#8b98a3",
        "parameters": "#e8dc4a",
        "activations": "#d16a96",
        "network": "#9b83d6",
        "issue": "#9fb0be",
        "idle": "#44525e",
    }
)
# Groups on whose color a label is white.
DARK = frozenset({"forward", "norm", "state", "host update", "activations", "network", "checkpoint", "issue"})
# The phases of a training step, where a picture shows no ops. The step is mostly the CPU's update.
PHASES: Mapping[str, str] = MappingProxyType(
    {"forward": COLOURS["forward"], "backward": COLOURS["backward"], "step": COLOURS["host update"]}
)

# Lanes named after one kind of work: where they work, and the groups that their name stands for.
_NAMED_AFTER: Mapping[Lane, tuple[str, set[str]]] = {
    Lane.DEVICE_UPDATE: ("device", {"device update", "early update"}),
    Lane.H2D: ("H2D", {"state"}),
    Lane.H2D_PARAMETERS: ("H2D", {"parameters"}),
    Lane.D2H_GRADIENTS: ("D2H", {"gradients"}),
}
_MOMENTS = {OpKind.NORM: (0, (2, 2)), OpKind.STEP_END: (0, (6, 3))}
_BAR_HEIGHT = 0.72
_CHARACTER_IN = 0.075  # width of one character of a bar's label, in inches of the figure
_PADDING_IN = 0.05


def draw_spans(spans: Sequence[Span], title: str, ax: Axes | None = None) -> Axes:
    """Draw the ops of a timeline as bars, one row for each lane, and return the matplotlib axes.

    Bars are labelled with their subgroup or layer if the label fits. The time axis is in milliseconds below two
    seconds, otherwise in seconds.
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
    names = lane_names(s for s in spans if s.end_s > s.start_s)
    ax.set_yticks(range(len(lanes)), [names[lane] for lane in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.set_xlabel(f"time ({unit})")
    ax.set_title(title, loc="left", fontsize=11)
    _decorate(ax)
    _legend(ax, spans)
    return ax


def _group(kind: OpKind) -> str:
    return GROUPS.get(kind, "norm")


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
            facecolors=COLOURS[_group(kind)],
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
    return {"edgecolor": COLOURS[_group(bars[0].kind)], "linewidth": 0.5}


def _label(ax: Axes, row: int, span: Span, origin_s: float, scale: float) -> None:
    number, prefix = (span.subgroup, "s") if span.subgroup >= 0 else (span.layer, "l")
    if number < 0:
        return
    text = f"{prefix}{number}"
    if _inches(ax, span, scale) < len(text) * _CHARACTER_IN + _PADDING_IN:
        return
    middle = (0.5 * (span.start_s + span.end_s) - origin_s) * scale
    colour = "white" if _group(span.kind) in DARK else "black"
    ax.text(middle, row, text, ha="center", va="center", fontsize=7, color=colour, clip_on=True)


def _draw_moments(ax: Axes, spans: Iterable[Span], origin_s: float, scale: float) -> None:
    for span in spans:
        if span.kind in _MOMENTS:
            ax.axvline(
                (span.end_s - origin_s) * scale,
                color=COLOURS["norm"],
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
    groups = {_group(kind) for kind in bars if kind not in _MOMENTS}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[group], label=group) for group in COLOURS if group in groups
    ]
    for kind, dashes in _MOMENTS.items():
        if any(span.kind == kind for span in spans):
            handles.append(Line2D([], [], color=COLOURS["norm"], linestyle=dashes, linewidth=0.9, label=kind.value))
        if kind in bars:
            handles.append(Patch(facecolor=COLOURS["norm"], label=f"until {kind.value}"))
    if handles:
        ax.legend(
            handles=handles, loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=8, handlelength=1.4
        )


def lane_names(spans: Iterable[Span]) -> dict[Lane, str]:
    """Return the name to show for each lane. A lane that is named after one kind of work, but does another, is named
    after the other: in DeepSpeed alone, the lane of state copies carries gradients.
    """
    done: dict[Lane, set[str]] = {}
    for span in spans:
        done.setdefault(span.lane, set()).add(GROUPS.get(span.kind, "idle"))
    names = {lane: lane.value for lane in Lane}
    for lane, (place, usual) in _NAMED_AFTER.items():
        groups = done.get(lane, set())
        if not groups <= usual:
            names[lane] = f"{place} {groups.pop()}" if len(groups) == 1 else f"{place}, several"
    return names


def style_sheet() -> str:
    """Return a style sheet that defines the palette as CSS variables, such as ``--c-host-update``."""
    light, dark = _variables(COLOURS), _variables(_ON_DARK)
    return f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{ :root:not(.paper) {{{dark}}} }}\n"


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--c-{name.replace(' ', '-')}: {colour};" for name, colour in colours.items())
