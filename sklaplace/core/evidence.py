"""Evidence of Bayesian linear regression, maximised over precision and noise.

For features F (n, p) and each column y (n,) of targets, the model is

    y = F w + noise,    w ~ N(0, I / precision),    noise ~ N(0, I * variance).

Once ``F'F = Q diag(e) Q'`` is decomposed, no other matrix depends on the precision and
the variance. The most probable weights are
``Q (Q'F'y / (e + precision * variance))``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# After so many iterations, changes are negligible, unless the features hardly explain
# the targets.
N_ITERATIONS = 50
# The bounds matter if targets are constant or parameters outnumber samples. Targets
# have a variance of about one, so the noise has no larger variance.
PRECISION_BOUNDS = 1e-6, 1e6
VARIANCE_BOUNDS = 1e-6, 1.0
# avoids division by zero; the bounds above then apply
_SMALLEST_DIVISOR = 1e-12


@dataclass(frozen=True)
class MostProbable:
    """Hyperparameters that maximise the evidence of each column of targets.

    Attributes
    ----------
    precision, variance : ndarray of shape (c,)
        Precision of the prior of the weights, and variance of the noise.
    """

    precision: Array
    variance: Array

    @property
    def ridge(self) -> Array:
        """Penalty (c,) of ridge regression with the same most probable weights."""
        return self.precision * self.variance


def most_probable(
    eigenvalues: Array, projections: Array, total: Array, n_samples: float
) -> MostProbable:
    """Return the most probable precision and variance, by MacKay's fixed point.

    Each iteration computes the most probable weights for the current precision and
    variance, and then new values from these weights. Columns of targets are independent
    of each other.

    Parameters
    ----------
    eigenvalues : ndarray of shape (p,)
        Eigenvalues e of F'F = Q diag(e) Q', for features F (n, p). Eigenvalues of zero
        may be missing.
    projections : ndarray of shape (p, c)
        Squares of Q'F'Y.
    total : ndarray of shape (c,)
        Sums of squares of the targets Y, which have a variance of about one.
    n_samples : float
        Number of samples, or the sum of their weights.

    References
    ----------
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4, section 4.
    """
    # of n degrees of freedom, the gamma effective parameters explain ||w||^2, and the
    # other n - gamma explain the residuals
    e = eigenvalues[:, None]  # (p, 1)
    # at first, precisions of one, and half of the targets' variance as noise
    best = MostProbable(np.ones(len(total)), np.full(len(total), 0.5))
    for _ in range(N_ITERATIONS):
        ridge = best.ridge
        gamma = (e / (e + ridge)).sum(axis=0)
        norm = (projections / (e + ridge) ** 2).sum(axis=0)  # ||w||^2
        # ||y||^2 minus the sum of squared residuals: 2 w'F'y - w'F'F w, where the terms
        # are projections / (e + ridge) and e * projections / (e + ridge)^2
        explained = (projections * (e + 2 * ridge) / (e + ridge) ** 2).sum(axis=0)
        residual = (total - explained).clip(0)
        precision = gamma / norm.clip(_SMALLEST_DIVISOR)
        variance = residual / (n_samples - gamma).clip(_SMALLEST_DIVISOR)
        best = MostProbable(
            precision.clip(*PRECISION_BOUNDS), variance.clip(*VARIANCE_BOUNDS)
        )
    return best
