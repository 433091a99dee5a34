"""Colours, labels, legends and reference lines on axes of matplotlib."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Style = Mapping[str, Any] | None

# The palette of Okabe and Ito (2008) is distinct for all types of colour vision.
BLUE = "#0072B2"
VERMILION = "#D55E00"
PALETTE = (BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", VERMILION, "black")

# styles of lines to compare with, and of lines through few points
REFERENCE = {"color": "grey", "linestyle": ":"}
MARKED = {"marker": "o", "markersize": 4}


def styled(style: Style, **defaults: Any) -> dict[str, Any]:
    """Return keywords for matplotlib: the defaults, overridden by the user's style."""
    return defaults | dict(style or {})


def class_style(k: int) -> dict[str, Any]:
    """Return the colour and line style of class ``k``, distinct for 21 classes."""
    style = ("-", "--", ":")[k // len(PALETTE) % 3]
    return {"color": PALETTE[k % len(PALETTE)], "linestyle": style}


def draw_line(ax: Any, x: Any, y: Any, style: Style, **defaults: Any) -> Any:
    """Draw one line, in blue by default; return it."""
    (line,) = ax.plot(x, y, **styled(style, **{"color": BLUE} | defaults))
    return line


def draw_diagonal(ax: Any) -> Any:
    """Draw the line of perfect calibration once; return it."""
    label = "perfectly calibrated"
    for line in ax.lines:
        if line.get_label() == label:
            return line
    return draw_line(ax, [0, 1], [0, 1], None, label=label, **REFERENCE)


def label_axes(ax: Any, x: str | None, y: str | None = None) -> None:
    """Label both axes; None leaves a label as it is."""
    for axis, label in ((ax.xaxis, x), (ax.yaxis, y)):
        if label is not None:
            axis.set_label_text(label)


def curve_label(name: str | None, number: str) -> str:
    """Return the label of a curve: its name, if there is one, and a number."""
    return number if name is None else f"{name} ({number})"


def three_digits(value: float) -> str:
    """Write a number with three significant digits, and without an exponent."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def draw_legend(ax: Any, handles: Any = None) -> None:
    """Draw a legend below the label of the horizontal axis, where it hides nothing."""
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    longest = max(len(handle.get_label()) for handle in handles)
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=5,  # lines of text: ticks, their labels, the label
        ncols=min(len(handles), 3, max(1, 72 // longest)),
        columnspacing=1.0,
        fontsize="small",
        frameon=False,
    )
