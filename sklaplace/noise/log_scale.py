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
        """Return a function fitted to targets, and out-of-fold values (n,).

        The out-of-fold value of a sample is that of a function fitted to the targets of
        all other groups. All these functions follow from sums of products over the
        samples of each group, which are added up as needed.

        Parameters
        ----------
        inputs : ndarray of shape (n, k)
            Inputs of the function.
        target, weights : ndarray of shape (n,)
            Values to fit, and their weights.
        group : ndarray of shape (n,)
            Group of each sample, below `N_GROUPS`.

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
            # the coefficients are in the subspace that the samples span, so replace the
            # k inputs by n coordinates in a basis of it
            basis, triangle = np.linalg.qr(coordinates.T)
            coordinates = triangle.T
        ones = np.ones(len(inputs))
        # a row contains the number one, the coordinates and the standardised target
        rows = np.column_stack([ones, coordinates, (target - origin) / unit])
        products = np.zeros((N_GROUPS, rows.shape[1], rows.shape[1]))
        for g in range(N_GROUPS):
            group_rows = rows[group == g]
            products[g] = group_rows.T @ (weights[group == g, None] * group_rows)
        out_of_fold = np.empty(len(inputs))
        for g in range(N_GROUPS):
            others = np.delete(products, g, axis=0).sum(0)
            values = rows[group == g, :-1] @ _most_probable_coefficients(others)
            out_of_fold[group == g] = origin + unit * values
        # extrapolation must not exceed what was observed
        out_of_fold = out_of_fold.clip(target.min(), target.max())
        fitted = _most_probable_coefficients(products.sum(0))  # the intercept first
        of_all = cls(
            center=torch.from_numpy(center),
            scale=torch.from_numpy(scale),
            coefficients=torch.from_numpy(unit * (basis @ fitted[1:])),
            intercept=float(origin + unit * fitted[0]),
            bounds=(out_of_fold.min(), out_of_fold.max()),
        )
        return of_all, out_of_fold

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return values (n,)."""
        clipped = ((inputs - self.center) / self.scale).clamp(-CLIP, CLIP)
        return (clipped @ self.coefficients + self.intercept).clamp(*self.bounds)


def _most_probable_coefficients(products: Array) -> Array:
    """Return the intercept and the k coefficients of a ridge regression, (k + 1,).

    ``products`` (k + 2, k + 2) contains weighted sums over samples, of products of the
    number one, the k inputs and the target. The ridge maximises the evidence, which
    `most_probable` computes in the eigenbasis of the inputs. Centring removes the
    intercept, which has no prior.
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
