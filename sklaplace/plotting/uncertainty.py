"""UncertaintyDisplay: total, aleatoric and epistemic uncertainty over a plane."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sklaplace.plotting.axes import Keywords, require_matplotlib, several_axes
from sklaplace.plotting.grid import as_frame_like, axes_of_grid, check_columns

KINDS = "total", "aleatoric", "epistemic"


@dataclass(eq=False, repr=False, kw_only=True)
class UncertaintyDisplay:
    """Uncertainty of a classifier over the plane of its two features.

    Three maps on one scale: total uncertainty is the sum of the aleatoric part, which
    more samples do not reduce, and the epistemic one, which they do. Use
    `from_estimator` to create it. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    xx0, xx1 : ndarray of shape (grid_resolution, grid_resolution)
        First and second feature on the grid.
    uncertainty : ndarray of shape (grid_resolution, grid_resolution, 3)
        Total, aleatoric and epistemic uncertainty in nats.
    feature_names : tuple of two str, default=(None, None)
        Labels of the axes.

    Attributes
    ----------
    axes_ : list of three matplotlib Axes
        Axes of total, aleatoric and epistemic uncertainty.
    figure_ : matplotlib Figure
        Their figure.
    surfaces_ : list of three matplotlib QuadContourSet
        The filled contours.
    colorbar_ : matplotlib Colorbar or None
        The scale of all three, in nats; None with ``colorbar=False``.

    See Also
    --------
    ConfidenceDisplay : The largest class probability.
    DirichletDisplay : The distribution behind one prediction.
    sklearn.inspection.DecisionBoundaryDisplay : Predicted classes.

    References
    ----------
    Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018), "Decomposition of
    uncertainty in Bayesian deep learning for efficient and risk-sensitive learning",
    ICML.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import UncertaintyDisplay
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> display = UncertaintyDisplay.from_estimator(clf, X, grid_resolution=20)
    >>> display.uncertainty.shape
    (20, 20, 3)
    """

    xx0: Any
    xx1: Any
    uncertainty: Any
    feature_names: tuple[str | None, str | None] = (None, None)

    @classmethod
    def from_estimator(
        cls,
        classifier: Any,
        X: Any,
        *,
        method: str | None = None,
        grid_resolution: int = 100,
        eps: float = 1.0,
        ax: Any = None,
        colorbar: bool = True,
        surface_kw: Keywords = None,
    ) -> "UncertaintyDisplay":
        """Predict over a plane and plot the uncertainty.

        Parameters
        ----------
        classifier : object
            Fitted, with ``predict_uncertainty``: `LaplaceClassifier` or another
            classifier of this package, with one label per sample.
        X : array-like of shape (m, 2)
            Samples whose range is plotted. The grid has their dtype.
        method : str, default=None
            As for ``predict_uncertainty``.
        grid_resolution : int, default=100
            Number of values per feature.
        eps : float, default=1.0
            Extension of the range of `X` on each side, in its units.
        ax : sequence of three matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        colorbar : bool, default=True
            Whether to draw the scale.
        surface_kw : dict, default=None
            Keywords for matplotlib's ``contourf``.

        Returns
        -------
        UncertaintyDisplay
            The display, with the plot in `axes_`.

        Raises
        ------
        ValueError
            If `X` does not have two features, samples have several labels, or an option
            is out of range.
        TypeError
            If the classifier has no ``predict_uncertainty``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.LaplaceClassifier.predict_uncertainty : What is plotted.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklaplace import LaplaceClassifier
        >>> from sklaplace.plotting import UncertaintyDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
        >>> display = UncertaintyDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> display.uncertainty.shape
        (5, 5, 3)
        """
        require_matplotlib()
        if not hasattr(classifier, "predict_uncertainty"):
            raise TypeError(
                f"{type(classifier).__name__} has no predict_uncertainty. Pass a "
                "fitted classifier of sklaplace."
            )
        axes = axes_of_grid(check_columns(X, 2), grid_resolution, eps)
        xx0, xx1 = np.meshgrid(*axes)
        grid = as_frame_like(np.stack([xx0.ravel(), xx1.ravel()], axis=1), X)
        found = np.asarray(classifier.predict_uncertainty(grid, method=method))
        if found.ndim != 2:
            raise ValueError(
                f"The uncertainty of a sample has shape {found.shape[1:]}, but that of "
                "one label is plotted. Fit one label per sample."
            )
        display = cls(
            xx0=xx0,
            xx1=xx1,
            uncertainty=found.reshape(*xx0.shape, 3),
            feature_names=tuple(getattr(X, "columns", [None, None])),
        )
        return display.plot(ax, colorbar=colorbar, surface_kw=surface_kw)

    def plot(
        self, ax: Any = None, *, colorbar: bool = True, surface_kw: Keywords = None
    ) -> "UncertaintyDisplay":
        """Plot the three maps.

        Parameters
        ----------
        ax : sequence of three matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        colorbar : bool, default=True
            Whether to draw the scale.
        surface_kw : dict, default=None
            Keywords for matplotlib's ``contourf``.

        Returns
        -------
        UncertaintyDisplay
            The display.

        Raises
        ------
        ValueError
            If ``ax`` has not three axes.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predicts as well.

        Notes
        -----
        The colours span zero to the largest total uncertainty on the grid.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklaplace import LaplaceClassifier
        >>> from sklaplace.plotting import UncertaintyDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
        >>> display = UncertaintyDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> len(display.plot(colorbar=False).axes_)
        3
        """
        self.figure_, self.axes_ = several_axes(ax, 3)
        # zero everywhere would leave no levels; rounding can make parts negative
        top = max(float(np.max(self.uncertainty)), np.finfo(np.float64).tiny)
        values = np.clip(self.uncertainty, 0, top)
        style = {"cmap": "cividis", "levels": np.linspace(0, top, 11)}
        style |= dict(surface_kw or {})
        self.surfaces_ = [
            axes.contourf(self.xx0, self.xx1, values[..., k], **style)
            for k, axes in enumerate(self.axes_)
        ]
        for axes, kind in zip(self.axes_, KINDS, strict=True):
            axes.set_title(kind)
            axes.set_xlabel(self.feature_names[0] or "")
        self.axes_[0].set_ylabel(self.feature_names[1] or "")
        self.colorbar_ = None
        if colorbar:
            label = {"label": "uncertainty (nats)", "format": "%.2f"}
            self.colorbar_ = self.figure_.colorbar(
                self.surfaces_[0], ax=self.axes_, **label
            )
        return self
