"""WeightPosteriorDisplay: marginal posteriors of chosen weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.utils.validation import check_is_fitted

from sklaplace.plotting.axes import BLUE, Keywords, new_axes, require_matplotlib

# Half width of a marginal in standard deviations, and its height in rows.
_REACH, _HEIGHT = 4.0, 0.85


@dataclass(eq=False, repr=False, kw_only=True)
class WeightPosteriorDisplay:
    """Marginal posteriors of chosen weights: one Gaussian per row.

    All have the same height, so that narrow and wide ones are seen together. Use
    `from_estimator` to create it. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/theory>`.

    Parameters
    ----------
    mean : ndarray of shape (m,)
        Posterior means.
    std : ndarray of shape (m,)
        Posterior standard deviations.
    names : sequence of m str
        Names of the weights, such as ``"weight[0, 3]"``.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    densities_ : list of m matplotlib PolyCollection
        The marginals, from top to bottom.
    zero_ : matplotlib Line2D
        The vertical line at zero.

    See Also
    --------
    PriorPathDisplay : What the width of the prior is chosen by.
    sklaplace.LaplaceClassifier : Fits ``posterior_``.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import WeightPosteriorDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> display = WeightPosteriorDisplay.from_estimator(clf, weights=[0, 1, 2])
    >>> len(display.densities_)
    3
    """

    mean: Any
    std: Any
    names: Any

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        weights: Any = None,
        ax: Any = None,
        density_kw: Keywords = None,
    ) -> "WeightPosteriorDisplay":
        """Plot marginals of ``posterior_``.

        Parameters
        ----------
        estimator : object
            Fitted, with a ``posterior_`` that has means and variances of weights: a
            Laplace estimator or SWAG.
        weights : sequence of int, default=None
            Positions among the weights of the posterior. None takes eight, evenly
            spaced from the first to the last, or all if there are fewer.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        density_kw : dict, default=None
            Keywords for matplotlib's ``fill_between``.

        Returns
        -------
        WeightPosteriorDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If a position is not that of a weight.
        TypeError
            If the estimator has no such posterior.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.posterior.gaussian.GaussianPosterior.variance : Of all weights.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> from sklaplace.plotting import WeightPosteriorDisplay
        >>> display = WeightPosteriorDisplay.from_estimator(model, weights=[0, 1])
        >>> display.names
        ['head.weight[0, 0]', 'head.weight[0, 1]']
        """
        require_matplotlib()
        check_is_fitted(estimator)
        posterior: Any = getattr(estimator, "posterior_", None)
        if not all(hasattr(posterior, a) for a in ("mean", "variance", "layout")):
            raise TypeError(
                f"{type(estimator).__name__} has no posterior_ with mean and variance "
                "of weights. Pass a fitted Laplace or SWAG estimator; of a pipeline, "
                "its last step."
            )
        mean = posterior.mean.detach().numpy(force=True)
        std = np.sqrt(posterior.variance().detach().numpy(force=True))
        if weights is None:
            last = len(mean) - 1
            weights = np.unique(np.linspace(0, last, 8).round().astype(int))
        chosen = _check_positions(weights, len(mean))
        names = _names(posterior.layout, chosen)
        display = cls(mean=mean[chosen], std=std[chosen], names=names)
        return display.plot(ax, density_kw=density_kw)

    def plot(
        self, ax: Any = None, *, density_kw: Keywords = None
    ) -> "WeightPosteriorDisplay":
        """Plot the marginals.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        density_kw : dict, default=None
            Keywords for matplotlib's ``fill_between``.

        Returns
        -------
        WeightPosteriorDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Takes the weights from an estimator.

        Examples
        --------
        >>> from sklaplace.plotting import WeightPosteriorDisplay
        >>> display = WeightPosteriorDisplay(
        ...     mean=[0.0, 1.0], std=[1.0, 0.1], names=["a", "b"]
        ... )
        >>> len(display.plot().densities_)
        2
        """
        self.figure_, self.ax_ = new_axes(ax)
        self.zero_ = self.ax_.axvline(0, color="grey", linestyle=":")
        z = np.linspace(-_REACH, _REACH, 101)
        height = _HEIGHT * norm.pdf(z) / norm.pdf(0)
        rows = range(len(self.mean))[::-1]
        style = {"color": BLUE, "alpha": 0.5} | dict(density_kw or {})
        self.densities_ = [
            self.ax_.fill_between(m + s * z, row, row + height, **style)
            for m, s, row in zip(self.mean, self.std, rows, strict=True)
        ]
        self.ax_.set_yticks(list(rows), list(self.names))
        self.ax_.set(xlabel="weight", ylim=(-0.2, len(self.mean)))
        return self


def _check_positions(weights: Any, n: int) -> np.ndarray:
    """Positions as integers; raise unless each is that of a weight."""
    given = np.atleast_1d(np.asarray(weights))
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(
            f"weights={weights!r} are no positions. Pass integers from 0 to {n - 1}, "
            "such as [0, 1, 2]."
        )
    if given.min() < 0 or given.max() >= n:
        raise ValueError(
            f"weights has values between {given.min()} and {given.max()}, but the "
            f"posterior has {n} weights. Pass integers from 0 to {n - 1}."
        )
    return given


def _names(layout: Any, positions: np.ndarray) -> list[str]:
    """Parameter and index of each weight, such as ``"weight[0, 3]"``."""
    starts = np.cumsum([0, *layout.sizes])
    found = []
    for position in positions:
        number = int(np.searchsorted(starts, position, side="right")) - 1
        block = layout.blocks[number]
        flat = int(position - starts[number])
        if block.indices is not None:
            flat = int(block.indices[flat])
        index = ", ".join(str(i) for i in np.unravel_index(flat, block.shape))
        found.append(f"{block.name}[{index}]")
    return found
