"""TuningProblem: what there is to tune, and with what."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.structures import Projection
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel

Found = TypeVar("Found")

# Bounds of δ and σ: their products stay numbers.
SMALLEST, LARGEST = math.exp(-100), math.exp(100)


@dataclass(frozen=True)
class LinearisedBatch:
    """One batch of rows: outputs, their Jacobian, targets, weights, perhaps keys."""

    f: Tensor
    jacobian: Jacobian
    targets: Tensor
    weights: Tensor
    keys: Tensor | None = None


@dataclass(frozen=True)
class TuningProblem:
    """What there is to tune, and with what.

    Attributes
    ----------
    posterior : GaussianPosterior
        At the network's own weights, with initial hyperparameters.
    head : LinearModel or None
        Training rows as the selected weights see them, where these enter linearly or
        the network is taken as linear in them.
    validation : iterable of LinearisedBatch or None
        Rows that the network did not see.
    log_proba : callable or None
        ``(mean (b, c), cov (b, c, c)) -> (b, K)`` log class probabilities; None
        for regression.
    diagonal : bool
        Whether ``log_proba`` takes variances (b, c) in place of covariances.
    free_prior, free_noise : bool
        Whether prior precision and noise are to be chosen.
    refine : bool or "auto"
        Whether the head is refitted under the prior; "auto" lets the tuner say.
    log_density : callable or None
        ``(mean (b, c), variance (b, c), targets) -> (b,)`` for numbers whose likelihood
        has no noise level to choose.
    """

    posterior: GaussianPosterior
    head: LinearModel | None
    validation: Iterable[LinearisedBatch] | None
    log_proba: Callable[[Tensor, Tensor], Tensor] | None
    free_prior: bool
    free_noise: bool
    refine: bool | Literal["auto"]
    diagonal: bool = False
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def spread(self, projection: Projection, ratio: Tensor) -> Tensor:
        """Covariance of held-out outputs under ``H + ratio``, or its diagonal."""
        one = torch.ones_like(self.posterior.scale)
        precision = self.posterior.structure.precision(ratio, one)
        diagonal = self.diagonal or self.log_proba is None
        return projection.covariance(precision, diagonal=diagonal)


def require_head(head: Found | None) -> Found:
    """The head, or an error that says what ``refine`` needs."""
    if head is None:
        raise ValueError(
            "refine=True needs outputs that are linear in the selected weights. Use "
            "subset_of_weights='last_layer' with a network that ends in a Linear "
            "layer, or refine=False."
        )
    return head


def clamped(value: Tensor) -> Tensor:
    """δ or σ within bounds between which their products stay numbers."""
    return value.clamp(SMALLEST, LARGEST)
