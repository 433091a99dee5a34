"""Colours, labels, legends and reference lines on matplotlib axes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from sklaplace.plotting.display import Style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# The colours of Okabe and Ito (2008) are distinct for all types of colour vision.
BLUE = "#0072B2"
VERMILION = "#D55E00"
PALETTE = (BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", VERMILION, "black")

# styles of reference lines, and of lines with marked points
REFERENCE: dict[str, Any] = {"color": "grey", "linestyle": ":"}
MARKED: dict[str, Any] = {"marker": "o", "markersize": 4}


def styled(style: Style, **defaults: object) -> dict[str, Any]:
    """Return matplotlib keywords: the defaults, overridden by the user's style."""
    return defaults | dict(style or {})


def draw_line(
    ax: "Axes", x: ArrayLike, y: ArrayLike, style: Style, **defaults: object
) -> "Line2D":
    """Draw and return a line, blue by default."""
    (line,) = ax.plot(x, y, **styled(style, **{"color": BLUE} | defaults))
    return line


def draw_diagonal(ax: "Axes") -> "Line2D":
    """Return the line of perfect calibration, which is drawn unless already there.

    Several displays can share the axes.
    """
    label = "perfectly calibrated"
    for line in ax.lines:
        if line.get_label() == label:
            return line
    return draw_line(ax, [0, 1], [0, 1], None, label=label, **REFERENCE)


def curve_label(name: str | None, number: str) -> str:
    """Return the label of a curve: the name, if any, and a number."""
    return number if name is None else f"{name} ({number})"


def three_digits(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def draw_legend(ax: "Axes", handles: "Sequence[Artist] | None" = None) -> None:
    """Draw a legend outside the plot, below the label of the horizontal axis."""
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    # The padding leaves space for the ticks, tick labels and axis label.
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=5,
        ncols=2,
        fontsize="small",
        frameon=False,
    )
