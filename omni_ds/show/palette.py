"""Colours of actions: distinct in colour, and in greyscale by luminance; encoder work is hatched as well."""

from __future__ import annotations

from typing import NamedTuple

from omni_ds.plan.actions import COLLECTIVES, SENDS, Action, Kind


class Style(NamedTuple):
    """face, edge: of the bar, "#rrggbb". text: of the number on it. label: in the legend. hatch: matplotlib
    pattern, in colour `ink`."""

    face: str
    edge: str
    text: str
    label: str
    hatch: str = ""
    ink: str = "#000000"


STYLES: dict[str, Style] = {
    "idle": Style("#f5f5f5", "#c8c8c8", "#000000", "idle"),
    "F": Style("#a6cbe8", "#33566f", "#000000", "F: LLM forward"),
    "B": Style("#3f74a8", "#173450", "#ffffff", "B: LLM backward"),
    "EF": Style("#ffd9a0", "#7a4a10", "#000000", "EF: encoder forward", "////", "#cf9448"),
    "EB": Style("#a8431a", "#3d1605", "#ffffff", "EB: encoder backward", "\\\\\\\\", "#d98b63"),
    "end": Style("#919191", "#5c5c5c", "#000000", "end of step: reduce, norm, update"),
    "activations": Style("#6b6b6b", "#6b6b6b", "#ffffff", "sends activations, gradients"),
    "features": Style("#000000", "#000000", "#ffffff", "sends features, their gradients"),
}


def style_of(action: Action) -> str | None:
    """Key of STYLES; None for a receive, which only waits for its send."""
    kind = action.kind
    if kind in (Kind.I, Kind.W):
        return "B"
    if kind in COLLECTIVES:
        return "end"
    if kind in SENDS:
        return "features" if kind in (Kind.SEND_X, Kind.SEND_G) else "activations"
    return kind.value if kind.value in STYLES else None


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb" as a greyscale print shows it: 0 black, 1 white (ITU-R BT.709, gamma
    kept)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
