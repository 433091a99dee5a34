"""Axes of matplotlib, which is imported at the first plot, and colours."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Keywords = Mapping[str, Any] | None

# of Okabe and Ito (2008), distinct from one another for any colour vision
BLUE = "#0072B2"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PALETTE = BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", VERMILION, "black"


def require_matplotlib() -> Any:
    """``matplotlib.pyplot``; raise with a hint if it is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib. Install it with: pip install "sklaplace[plot]"'
        ) from error
    return plt


def new_axes(ax: Any) -> tuple[Any, Any]:
    """Figure and axes, new ones if none are given."""
    plt = require_matplotlib()
    if ax is None:
        _, ax = plt.subplots(layout="constrained")
    return ax.figure, ax


def several_axes(ax: Any, n: int) -> tuple[Any, list[Any]]:
    """Figure and ``n`` axes in a row, new ones if none are given."""
    plt = require_matplotlib()
    if ax is None:
        figure, found = plt.subplots(
            1, n, figsize=(3.2 * n, 3.2), layout="constrained", squeeze=False
        )
        return figure, list(found[0])
    given = list(np.ravel(ax))
    if len(given) != n:
        raise ValueError(
            f"ax has {len(given)} axes, but {n} are plotted on. Pass {n}, or None for "
            "a new figure."
        )
    return given[0].figure, given


def class_style(k: int) -> dict[str, Any]:
    """Colour and line style of class ``k``, distinct for 21 classes."""
    style = ("-", "--", ":")[k // len(PALETTE) % 3]
    return {"color": PALETTE[k % len(PALETTE)], "linestyle": style}


def draw_diagonal(ax: Any) -> Any:
    """Draw the line of perfect calibration; return it."""
    label = "perfectly calibrated"
    for line in ax.lines:  # another display has drawn it
        if line.get_label() == label:
            return line
    (line,) = ax.plot([0, 1], [0, 1], color="grey", linestyle=":", label=label)
    return line


def with_number(name: str | None, number: str, value: float) -> str:
    """Label of a curve: its name, if there is one, and a number of three digits."""
    shown = np.format_float_positional(value, precision=3, fractional=False, trim="-")
    return f"{number} {shown}" if name is None else f"{name} ({number} {shown})"


def draw_legend(ax: Any, handles: Any = None) -> None:
    """Draw a legend below the horizontal label: it hides no curve and no title."""
    from matplotlib.transforms import ScaledTranslation

    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    # ticks, their labels and the label: two lines of text and 15 points between them
    sizes = ax.xaxis.label.get_size(), *(t.get_size() for t in ax.get_xticklabels()[:1])
    below = ScaledTranslation(
        0, -(15 + 1.3 * sum(sizes)) / 72, ax.figure.dpi_scale_trans
    )
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=ax.transAxes + below,
        borderaxespad=0,
        ncols=min(len(handles), 3),
        columnspacing=1.0,
        fontsize="small",
        frameon=False,
    )


def require_proba(classifier: Any) -> None:
    """Raise unless a classifier predicts probabilities."""
    if not hasattr(classifier, "predict_proba"):
        raise TypeError(
            f"{type(classifier).__name__} has no predict_proba. Pass a fitted "
            "classifier that gives probabilities."
        )
