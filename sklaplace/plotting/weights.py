"""WeightPosteriorDisplay: marginal posteriors of selected weights."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from sklaplace.curvature.layout import Layout
from sklaplace.metrics.checks import last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style

# half the width of a marginal in standard deviations, and its height in rows
_MAX_DEVIATIONS, _ROW_HEIGHT = 4.0, 0.85


class WeightPosteriorDisplay(Display):
    """Marginal posteriors of selected weights, one Gaussian per row.

    All marginals have the same height, so that both narrow and wide marginals are
    visible. Use `from_estimator` to create the display. Parameters are stored as
    attributes.

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
        Figure of `ax_`.
    densities_ : list of m matplotlib PolyCollection
        Marginals, from top to bottom.
    zero_ : matplotlib Line2D
        Vertical line at zero.

    See Also
    --------
    PriorPathDisplay : Criteria for choosing the prior precision.
    sklaplace.LaplaceClassifier : Classifier with a ``posterior_``.

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

    mean: np.ndarray
    std: np.ndarray
    names: Sequence[str]

    @classmethod
    def from_estimator(
        cls,
        estimator: BaseEstimator,
        *,
        weights: ArrayLike | None = None,
        **options: Any,
    ) -> Self:
        """Plot the marginals of ``posterior_``.

        Parameters
        ----------
        estimator : object
            Fitted Laplace or SWAG estimator, whose ``posterior_`` has means and
            variances of weights.
        weights : sequence of int, default=None
            Positions of the weights in the posterior. Defaults to eight evenly spaced
            positions, or to all positions if there are fewer.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `density_kw`: keyword
            arguments for matplotlib's ``fill_between``.

        Returns
        -------
        WeightPosteriorDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        IndexError
            If a position is out of range.
        AttributeError
            If the estimator has no posterior over weights.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.posterior.gaussian.GaussianPosterior.variance :
            Variances of all weights.

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
        check_is_fitted(estimator)
        posterior = last_step(estimator)[0].posterior_
        mean = posterior.mean.detach().numpy(force=True)
        std = np.sqrt(posterior.variance().detach().numpy(force=True))
        if weights is None:
            # fewer than eight weights would otherwise be repeated
            weights = np.unique(np.linspace(0, len(mean) - 1, 8).round().astype(int))
        # positions from zero, also for negative ones or a mask
        chosen = np.arange(len(mean))[np.ravel(weights)]
        names = [_name(posterior.layout, int(position)) for position in chosen]
        return cls(mean=mean[chosen], std=std[chosen], names=names).plot(**options)

    def _draw(self, *, density_kw: Style = None) -> None:
        """Draw the marginals and the line at zero."""
        self.zero_ = self.ax_.axvline(0, **axes.REFERENCE)
        z = np.linspace(-_MAX_DEVIATIONS, _MAX_DEVIATIONS, 101)
        height = _ROW_HEIGHT * norm.pdf(z) / norm.pdf(0)
        rows = range(len(self.mean))[::-1]  # the first weight is at the top
        style = axes.styled(density_kw, color=axes.BLUE, alpha=0.5)
        self.densities_ = [
            self.ax_.fill_between(m + s * z, row, row + height, **style)
            for m, s, row in zip(self.mean, self.std, rows, strict=True)
        ]
        self.ax_.set_yticks(list(rows), list(self.names))
        self.ax_.set(xlabel="weight", ylim=(-0.2, len(self.mean)))


def _name(layout: Layout, position: int) -> str:
    """Return the parameter and index of a weight, such as ``"weight[0, 3]"``.

    ``position`` is the weight's position in the vector of all weights. The blocks of
    ``layout`` are consecutive parts of this vector.
    """
    for block in layout.blocks:
        if position < block.size:
            break
        position -= block.size  # relative to the next block
    # a block can have only some entries of its parameter
    flat = position if block.indices is None else int(block.indices[position])
    index = ", ".join(str(i) for i in np.unravel_index(flat, block.shape))
    return f"{block.name}[{index}]"
