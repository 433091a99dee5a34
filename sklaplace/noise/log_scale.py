"""LogScale: the logarithm of the noise as a linear function."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sklaplace.core.evidence import most_probable
from sklaplace.noise.residuals import N_GROUPS
from sklaplace.noise.standardisation import standardisation

Array = NDArray[np.float64]

# Standardised inputs are clipped to plus or minus this value, so that outliers have
# little influence.
CLIP = 4.0


@dataclass(frozen=True)
class LogScale:
    """Linear function of standardised, clipped inputs (n, k), within bounds."""

    center: Tensor
    scale: Tensor
    coefficients: Tensor
    intercept: float
    bounds: tuple[float, float]

    @classmethod
    def fit(
        cls, inputs: Array, target: Array, weights: Array, group: NDArray[np.integer]
    ) -> tuple["LogScale", Array]:
        """Fit the function to targets (n,).

        Return the function, and the values (n,) of functions that are fitted to the
        targets of all other groups. All these functions follow from sums of products
        over the samples of each group, which are added up as needed.

        Notes
        -----
        The coefficients are most probable under a normal prior. The prior precision and
        the variance of the targets maximise the evidence within bounds, without further
        priors; see `most_probable`.
        """
        center, scale = standardisation(inputs, weights)
        (origin,), (unit,) = standardisation(target[:, None], weights)
        coordinates = ((inputs - center) / scale).clip(-CLIP, CLIP)
        basis = np.eye(len(center))
        if len(inputs) < len(center):
            # the coefficients are in the subspace that the samples span, so that no
            # product of two of many inputs is needed
            basis, triangle = np.linalg.qr(coordinates.T)
            coordinates = triangle.T
        ones = np.ones(len(inputs))
        # a row contains the number one, the coordinates and the standardised target
        rows = np.column_stack([ones, coordinates, (target - origin) / unit])
        products = np.zeros((N_GROUPS, rows.shape[1], rows.shape[1]))
        for g in range(N_GROUPS):
            group_rows = rows[group == g]
            products[g] = group_rows.T @ (weights[group == g, None] * group_rows)
        logs = np.empty(len(inputs))
        for g in range(N_GROUPS):
            line = _most_probable_line(np.delete(products, g, axis=0).sum(0))
            logs[group == g] = origin + unit * (rows[group == g, :-1] @ line)
        # extrapolation must not exceed what was observed
        logs = logs.clip(target.min(), target.max())
        line = _most_probable_line(products.sum(0))
        of_all = cls(
            center=torch.from_numpy(center),
            scale=torch.from_numpy(scale),
            coefficients=torch.from_numpy(unit * (basis @ line[1:])),
            intercept=float(origin + unit * line[0]),
            bounds=(logs.min(), logs.max()),
        )
        return of_all, logs

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return values (n,)."""
        clipped = ((inputs - self.center) / self.scale).clamp(-CLIP, CLIP)
        return (clipped @ self.coefficients + self.intercept).clamp(*self.bounds)


def _most_probable_line(products: Array) -> Array:
    """Return the intercept and the coefficients (k + 1,) that maximise the evidence.

    ``products`` (k + 2, k + 2) contains weighted sums over samples, of products of the
    number one, the k inputs and the target. Centring removes the intercept, which has
    no prior. In the eigenbasis of the inputs, the coefficients are those of a ridge
    regression, whose ridge maximises the evidence.
    """
    n_samples, sums = products[0, 0], products[0, 1:]
    centred = products[1:, 1:] - np.outer(sums, sums) / n_samples
    eigenvalues, vectors = np.linalg.eigh(centred[:-1, :-1])
    eigenvalues = eigenvalues.clip(0)  # negative by rounding
    projections = vectors.T @ centred[:-1, -1:]
    # the ridge is the prior precision times the variance of the targets
    best = most_probable(eigenvalues, projections**2, centred[-1:, -1], n_samples)
    shrunk = projections / (eigenvalues[:, None] + best.ridge)
    coefficients = (vectors @ shrunk)[:, 0]
    intercept = (sums[-1] - sums[:-1] @ coefficients) / n_samples
    return np.append(intercept, coefficients)
