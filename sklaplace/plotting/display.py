"""Base class of displays, which plot data on matplotlib axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, dataclass_transform

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Style = Mapping[str, object] | None


@dataclass_transform(eq_default=False, kw_only_default=True)
class Display:
    """Base class of displays, as in scikit-learn.

    Subclasses become dataclasses. Their fields store the data to plot, and their class
    methods compute these data. `_draw` draws on `axes_` and stores the matplotlib
    artists as attributes. `ax_` is the first entry of `axes_`.
    """

    n_axes: ClassVar[int] = 1
    figure_: "Figure | SubFigure"
    ax_: "Axes"
    axes_: list["Axes"]
    _draw: Callable[..., None]

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False, kw_only=True)(cls)

    def plot(
        self, ax: "Axes | Sequence[Axes] | None" = None, **options: object
    ) -> Self:
        """Plot the stored data.

        Parameters
        ----------
        ax : matplotlib Axes or sequence of Axes, default=None
            Axes to plot on, one for each part of the display. By default, a new figure.
        **options : dict
            Drawing options of the display, described under `from_estimator`.

        Returns
        -------
        Display
            The display, with the plot in `ax_`, or in `axes_` if it has several axes.

        Raises
        ------
        ValueError
            If `ax` has the wrong number of axes, or an option is out of range.
        TypeError
            If the display does not support an option.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Compute the data and plot it.

        Examples
        --------
        >>> from sklaplace.plotting import RiskCoverageDisplay
        >>> display = RiskCoverageDisplay.from_predictions([0, 0, 1], [0.9, 0.8, 0.6])
        >>> display.plot(line_kw={"color": "red"}).line_.get_color()
        'red'
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                'Plots need matplotlib. Install it with: pip install "sklaplace[plot]"'
            ) from error
        n = self.n_axes
        if ax is None:
            # inches; a single plot has matplotlib's default size
            size = None if n == 1 else (3.2 * n, 3.2)
            _, ax = plt.subplots(1, n, figsize=size, layout="constrained")
        self.axes_ = np.ravel(np.asarray(ax)).tolist()
        if len(self.axes_) != n:
            raise ValueError(
                f"ax has {len(self.axes_)} axes, but this display needs {n}. Pass {n} "
                "axes, or None for a new figure."
            )
        self.ax_ = self.axes_[0]
        self.figure_ = self.ax_.figure
        self._draw(**options)
        return self
