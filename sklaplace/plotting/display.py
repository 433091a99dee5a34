"""The base of displays, which plots their data on axes of matplotlib."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np


def require_matplotlib() -> Any:
    """Return ``matplotlib.pyplot``; raise ImportError with a hint if it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib. Install it with: pip install "sklaplace[plot]"'
        ) from error
    return plt


@dataclass_transform(eq_default=False, kw_only_default=True)
class Display:
    """Base class of displays, as in scikit-learn.

    Subclasses become dataclasses. Their fields are the data, their class methods
    compute the data, and `_draw` draws on `axes_`, of which `ax_` is the first, and
    sets the artists as attributes.
    """

    n_axes: ClassVar[int] = 1
    figure_: Any
    ax_: Any
    axes_: list[Any]
    _draw: Callable[..., None]

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False, kw_only=True)(cls)

    @classmethod
    def _require(cls, estimator: Any, method: str) -> None:
        """Raise an error if matplotlib or a method of the estimator is missing."""
        require_matplotlib()
        if not hasattr(estimator, method):
            other = f", or use {cls.__name__}.from_predictions"
            raise TypeError(
                f"{type(estimator).__name__} has no {method}. Pass a fitted estimator "
                f"that has it{other if hasattr(cls, 'from_predictions') else ''}. Of a "
                "pipeline, pass the last step."
            )

    def plot(self, ax: Any = None, **options: Any) -> Self:
        """Plot the stored data.

        Parameters
        ----------
        ax : matplotlib Axes or sequence of Axes, default=None
            Axes to plot on, as many as the display has. None creates a figure.
        **options : dict
            Drawing options of the display, described under `from_estimator`.

        Returns
        -------
        Display
            The display, with the plot in `ax_`, or in `axes_` if it has several axes.

        Raises
        ------
        ValueError
            If `ax` has another number of axes, or an option is out of range.
        TypeError
            If the display does not have an option.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Computes the data as well.

        Examples
        --------
        >>> from sklaplace.plotting import RiskCoverageDisplay
        >>> display = RiskCoverageDisplay.from_predictions([0, 0, 1], [0.9, 0.8, 0.6])
        >>> display.plot(line_kw={"color": "red"}).line_.get_color()
        'red'
        """
        plt, n = require_matplotlib(), self.n_axes
        figure = None
        if ax is None:
            size = None if n == 1 else (3.2 * n, 3.2)
            figure, ax = plt.subplots(1, n, figsize=size, layout="constrained")
        axes = list(np.ravel(ax))
        if len(axes) != n:
            raise ValueError(
                f"ax has {len(axes)} axes, but {n} are plotted on. Pass {n}, or None "
                "for a new figure."
            )
        self.figure_, self.ax_, self.axes_ = axes[0].figure, axes[0], axes
        try:
            self._draw(**options)
        except BaseException:
            if figure is not None:
                plt.close(figure)
            raise
        return self
