"""Gaussian priors over the selected parameters: ``N(prior_mean, diag(δ)⁻¹)``.

The prior precision ``δ`` is one number (``scalar``), one number per parameter tensor
(``layerwise``) or one number per parameter (``diag``). A `Prior` may also be another
Gaussian, such as the posterior of an earlier task.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sklaplace.curvature.layout import Layout

# prior structure -> shape of the prior precision
PRIOR_STRUCTURES: dict[str, Callable[[Layout], tuple[int, ...]]] = {
    "scalar": lambda layout: (),
    "layerwise": lambda layout: (len(layout.blocks),),
    "diag": lambda layout: (layout.n_parameters,),
}


def structure_of(prior_precision: Tensor, layout: Layout) -> str:
    """Return the prior structure with this shape; the coarsest one if several fit."""
    shape = tuple(prior_precision.shape)
    return next(k for k, size in PRIOR_STRUCTURES.items() if size(layout) == shape)


def expand(prior_precision: Tensor, layout: Layout) -> Tensor:
    """Expand a prior precision (), (L,) or (P,) to (P,); differentiable."""
    if structure_of(prior_precision, layout) == "layerwise":
        sizes = torch.tensor(layout.sizes, device=prior_precision.device)
        return prior_precision.repeat_interleave(sizes, output_size=layout.n_parameters)
    return prior_precision.expand(layout.n_parameters)


def of_tensors(precisions: Tensor, structure: str, layout: Layout) -> Tensor:
    """Convert prior precisions of parameter tensors, (L,), to a prior structure.

    A scalar prior precision becomes the geometric mean of the weights' precisions.
    """
    if structure == "layerwise":
        return precisions
    of_weights = expand(precisions, layout)
    return of_weights if structure == "diag" else of_weights.log().mean().exp()


class Prior(Protocol):
    """Gaussian prior ``N(μ₀, P₀⁻¹)`` over the selected parameters."""

    def logdet(self) -> Tensor:
        """Return ``log det P₀``, in nats."""

    def quadratic_form(self, theta: Tensor) -> Tensor:
        """Return ``(θ - μ₀)ᵀ P₀ (θ - μ₀)``, ()."""

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ``P₀ (θ - μ₀)``, (P,): the gradient of half the quadratic form."""


@dataclass(frozen=True)
class Independent:
    """Gaussian prior with a diagonal covariance; differentiable.

    Attributes
    ----------
    precision : Tensor of shape (P,)
        Inverse variances.
    mean : Tensor of shape () or (P,)
        Means of the weights.
    """

    precision: Tensor
    mean: Tensor

    def logdet(self) -> Tensor:
        """Return ``Σ log δ``, in nats."""
        return self.precision.log().sum()

    def quadratic_form(self, theta: Tensor) -> Tensor:
        """Return ``Σ δ (θ - μ₀)²``, ()."""
        return (self.precision * (theta - self.mean) ** 2).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ``δ (θ - μ₀)``, (P,)."""
        return self.precision * (theta - self.mean)
