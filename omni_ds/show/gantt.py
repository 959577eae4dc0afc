"""Rows of bars over time: one row a rank, compute in the upper part, messages sent as ticks below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from omni_ds.plan.actions import ENCODER_COMPUTE, LLM_COMPUTE, SENDS, Action
from omni_ds.show.palette import STYLES, style_of

DPI = 130
WIDTH = 17.0  # inches
ROW = 0.42  # inches a rank
FONT = 8.0  # points
_LEFT, _RIGHT = 0.9, 0.15  # inches left and right of the axes
_BAR, _STRIP = 0.72, 0.16  # of a row's height: compute, messages below it
_TICK = 0.0012  # of the axis: width of a message that takes no time

Span = tuple[Action, float, float]


@dataclass(frozen=True)
class Rows:
    """What one panel shows. spans[i]: (action, start, end) of row labels[i], in the unit of the time axis."""

    title: str
    labels: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        return max((end for row in self.spans for _, _, end in row), default=0)


def number_of(action: Action) -> str:
    """What is written on a bar: the micro-batch, or w and the window."""
    if action.kind in ENCODER_COMPUTE:
        return f"w{action.index}"
    return str(action.index) if action.kind in LLM_COMPUTE else ""


def draw_figure(panels: Sequence[Rows], title: str, unit: str) -> Figure:
    """Panels below each other on one time scale from 0 to the longest, with one legend.

    Args:
        title: of the figure, one line or two.
        unit: label of the time axis.
    """
    above, below, gap = 1.0, 0.55, 0.5
    heights = [ROW * len(panel.labels) for panel in panels]
    total = above + below + sum(heights) + gap * (len(panels) - 1)
    figure = Figure(figsize=(WIDTH, total), dpi=DPI)
    FigureCanvasAgg(figure)
    length = max((panel.length for panel in panels), default=0) or 1.0
    figure.text(_LEFT / WIDTH, 1 - 0.12 / total, title, va="top", fontsize=FONT + 4, weight="bold")
    bottom = total - above
    for panel, height in zip(panels, heights, strict=True):
        bottom -= height
        axes = figure.add_axes(
            (_LEFT / WIDTH, bottom / total, (WIDTH - _LEFT - _RIGHT) / WIDTH, height / total)
        )
        _draw_rows(axes, panel, length)
        bottom -= gap
    axes.set_xlabel(unit, fontsize=FONT + 1)
    used = {style_of(a) for panel in panels for row in panel.spans for a, _, _ in row}
    figure.legend(
        handles=[_patch(name) for name in STYLES if name in used or name == "idle"],
        loc="upper left",
        bbox_to_anchor=(_LEFT / WIDTH, 1 - 0.42 / total),
        bbox_transform=figure.transFigure,
        borderaxespad=0,
        ncols=len(STYLES),
        fontsize=FONT,
        frameon=False,
        handlelength=2.4,
        handleheight=1.2,
        columnspacing=1.4,
    )
    return figure


def _patch(name: str) -> Patch:
    style = STYLES[name]
    return Patch(facecolor=style.face, edgecolor=style.ink, hatch=style.hatch, linewidth=0, label=style.label)


def _draw_rows(axes: Axes, panel: Rows, length: float) -> None:
    axes.set_xlim(0, length * 1.005)
    axes.set_ylim(len(panel.labels), 0)
    axes.set_yticks([i + _BAR / 2 + 0.06 for i in range(len(panel.labels))], panel.labels, fontsize=FONT)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=FONT + 1.5, pad=4)
    points = (WIDTH - _LEFT - _RIGHT) * 72 / (length * 1.005)
    end = panel.length
    for i, row in enumerate(panel.spans):
        _bars(axes, "idle", [(0, end)], i + 0.06, _BAR)
        by_style: dict[str, list[tuple[float, float]]] = {}
        for action, start, stop in row:
            name = style_of(action)
            if name is not None:
                by_style.setdefault(name, []).append((start, stop - start))
        for name, bars in by_style.items():
            if name in ("features", "activations"):
                bars = [(start, max(width, _TICK * length)) for start, width in bars]
                offset = 0.0 if name == "features" else _STRIP / 2
                _bars(axes, name, bars, i + 0.06 + _BAR + 0.02 + offset, _STRIP / 2)
            else:
                _bars(axes, name, [bar for bar in bars if bar[1] > 0], i + 0.06, _BAR)
        _numbers(axes, row, i + 0.06 + _BAR / 2, points)


def _bars(axes: Axes, name: str, bars: Iterable[tuple[float, float]], top: float, height: float) -> None:
    style, bars = STYLES[name], list(bars)
    # A collection has one colour for hatches and edges, and edges between windows must be seen.
    if style.hatch:
        axes.broken_barh(
            bars, (top, height), facecolors=style.face, edgecolor=style.ink, hatch=style.hatch, linewidth=0
        )
    face = "none" if style.hatch else style.face
    axes.broken_barh(bars, (top, height), facecolors=face, edgecolor=style.edge, linewidth=0.6)


def _numbers(axes: Axes, row: Sequence[Span], middle: float, points: float) -> None:
    """Numbers on the bars that are wide enough. points: points per unit of time."""
    for action, start, end in row:
        text = number_of(action)
        if action.kind in SENDS or not text or (end - start) * points < 0.66 * FONT * len(text) + 2:
            continue
        style = STYLES[style_of(action)]
        box = {"facecolor": style.face, "edgecolor": "none", "pad": 0.6} if style.hatch else None
        axes.text(
            (start + end) / 2,
            middle,
            text,
            ha="center",
            va="center",
            fontsize=FONT - 0.5,
            color=style.text,
            bbox=box,
        )
