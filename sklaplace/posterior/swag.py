"""SWAG: a Gaussian over weights from the iterates of stochastic gradient descent.

The posterior is ``N(m, ½ diag(v) + ½ D Dᵀ / (K - 1))``. The iterates have mean ``m``
and variances ``v``. The columns of ``D`` are the deviations of K iterates (Maddox et
al. 2019, "A simple baseline for Bayesian uncertainty in deep learning", section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.core.checks import as_generator
from sklaplace.core.random import RandomState
from sklaplace.curvature.layout import Layout

__all__ = ["SWAGPosterior"]


@dataclass(frozen=True)
class SWAGPosterior:
    """Gaussian posterior over the weights of a network.

    Read more in the :ref:`User Guide <swag>`.

    Parameters
    ----------
    mean : Tensor of shape (P,)
        Mean of the iterates (stochastic weight averaging), float64.
    diagonal : Tensor of shape (P,)
        Variances of the iterates.
    deviations : Tensor of shape (K, P)
        Differences of the last K iterates from the running mean at each iterate.
    layout : Layout
        Names and shapes of the weights.

    See Also
    --------
    sklaplace.SWAGClassifier : Stores this posterior as ``posterior_``.
    sklaplace.posterior.gaussian.GaussianPosterior : The Laplace approximation.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import SWAGClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = SWAGClassifier(n_snapshots=5, random_state=0).fit(X, y)
    >>> posterior = model.posterior_
    >>> len(posterior.deviations)
    5
    """

    mean: Tensor
    diagonal: Tensor
    deviations: Tensor
    layout: Layout

    def __repr__(self) -> str:
        """Return a one-line summary without tensors."""
        rank = len(self.deviations)
        return f"SWAGPosterior({self.layout.n_parameters:,} weights, rank {rank})"

    def sample(
        self, n: int = 1, random_state: RandomState | torch.Generator = 0
    ) -> Tensor:
        """Draw weights from the posterior.

        Parameters
        ----------
        n : int, default=1
            Number of draws.
        random_state : int, RandomState, torch.Generator or None, default=0
            Source of randomness. A generator must be on the CPU. If None, each call
            returns different draws.

        Returns
        -------
        Tensor of shape (n, P)
            Draws, float64.

        See Also
        --------
        variance : Variances of the draws.

        Notes
        -----
        Sampling takes O(n K P) time. The noise terms of the diagonal and of the
        deviations are independent (Maddox et al. 2019, eq. (1)).

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import SWAGClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SWAGClassifier(n_snapshots=5, random_state=0).fit(X, y)
        >>> posterior = model.posterior_
        >>> draws = posterior.sample(4, random_state=0)
        >>> draws.shape == (4, len(posterior.mean))
        True
        """
        generator = as_generator(random_state)
        k, p = self.deviations.shape
        # noise of each weight (n, p), and noise shared by all weights (n, k)
        draws, shared = (
            torch.randn(n, size, generator=generator, dtype=torch.float64).to(self.mean)
            for size in (p, k)
        )
        # each kind of noise contributes one half of its estimate of the covariance
        draws *= (self.diagonal / 2).sqrt()
        draws += shared @ self.deviations / (2 * (k - 1)) ** 0.5
        return draws.add_(self.mean)

    def variance(self) -> Tensor:
        """Return the variances of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Variances, float64.

        See Also
        --------
        sample : Draw weights.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import SWAGClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SWAGClassifier(n_snapshots=5, random_state=0).fit(X, y)
        >>> posterior = model.posterior_
        >>> bool((posterior.variance() >= 0).all())
        True
        """
        k = len(self.deviations)
        return (self.diagonal + self.deviations.square().sum(0) / (k - 1)) / 2
