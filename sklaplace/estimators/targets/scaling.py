"""TargetScaling: regression targets in units of their mean and standard deviation."""

from dataclasses import dataclass

import numpy as np

from sklaplace.networks.default import center_and_scale

Array = np.ndarray


@dataclass(frozen=True)
class TargetScaling:
    """Map ``y = center + scale · z`` for each column of targets.

    ``z`` are the targets of the network, ``y`` the targets passed to fit.

    Attributes
    ----------
    center, scale : float or ndarray of shape (n_outputs,)
        Floats for a single column. The defaults leave targets unchanged.
    """

    center: float | np.ndarray = 0.0
    scale: float | np.ndarray = 1.0

    @classmethod
    def of(cls, y: Array, weights: Array | None) -> "TargetScaling":
        """Return mean and standard deviation of the columns of ``y``, (n, n_outputs).

        The scale of a constant column is one. ``weights`` must be positive.
        """
        given = np.ones(len(y)) if weights is None else weights
        center, scale = center_and_scale(y.astype(np.float64), given)
        return cls(center, scale) if len(scale) > 1 else cls(center[0], scale[0])

    def normalized(self, y: Array) -> Array:
        """Return ``z`` for targets ``y``, (n, n_outputs)."""
        return np.asarray((y - self.center) / self.scale)

    def restored(self, z: Array) -> Array:
        """Return ``y`` for targets ``z``, (n, n_outputs) or (n, n_outputs, m)."""
        shape = (-1, *(1,) * (z.ndim - 2))
        center, scale = (np.reshape(v, shape) for v in (self.center, self.scale))
        return np.asarray(center + scale * z)

    def restored_variance(self, variance: Array) -> Array:
        """Return variances or covariances in units of ``y``, (..., n_outputs)."""
        return np.asarray(variance * self.scale**2)
