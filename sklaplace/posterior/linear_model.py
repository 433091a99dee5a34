"""LinearModel: training rows of which the outputs are affine in the weights.

``f(θ) = f* + J (θ - θ*)``, so that the most probable weights under a prior are the
minimum of a convex function,
``Σ w · loss(f(θ), y) + ½ (θ - μ₀)ᵀ diag(ρ) (θ - μ₀)`` with ``ρ = δ/scale``.
The evidence there can be trusted; that of weights which were trained under another
prior cannot (Antorán et al. 2022, "Adapting the linearised Laplace model evidence for
modern deep learning").
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sklaplace.core.newton import ROUNDING, minimum
from sklaplace.curvature import priors
from sklaplace.curvature.ggn import GGN, Curvature
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.full import FullAccumulator
from sklaplace.likelihoods import DataFit, Likelihood, output_weights
from sklaplace.posterior.gaussian import GaussianPosterior

Products = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class LinearModel(ABC):
    """Training rows of which the outputs are affine in the weights. All float64.

    Attributes
    ----------
    layout : Layout
        The selected weights.
    outputs : Tensor of shape (N, c)
        Outputs of the network with its own weights.
    targets : Tensor
        As `Likelihood.targets` gives them.
    sample_weight : Tensor of shape (N,)
        Weights of the rows.
    weights : Tensor of shape (P,)
        The network's own weights.
    likelihood : Likelihood
        Of targets given outputs.
    curvature : Curvature
        How curvature is measured at other outputs.
    accumulator : callable
        Makes the accumulator of the structure in use, from a layout.
    """

    layout: Layout
    outputs: Tensor
    targets: Tensor
    sample_weight: Tensor
    weights: Tensor
    likelihood: Likelihood
    curvature: Curvature
    accumulator: Callable[[Layout], Accumulator]
    dtype: torch.dtype

    @abstractmethod
    def products(self, dtype: torch.dtype) -> Products:
        """``v -> J v``, (P,) to (N, c), and ``u -> Jᵀ u`` back, in a dtype."""

    @abstractmethod
    def rows_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Rows ``Sᵀ J`` at outputs ``f``, in batches that the accumulator can take."""

    @abstractmethod
    def preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """``v -> (H + diag ρ)⁻¹ v``, roughly."""

    def at(self, weights: Tensor) -> Tensor:
        """Outputs (N, c) with other weights."""
        forward, _ = self.products(torch.float64)
        return self.outputs + forward(weights - self.weights)

    def target_variance(self) -> Tensor:
        """Weighted variance of real-valued targets, the mean over columns, ()."""
        shares = (self.sample_weight / self.sample_weight.sum()).unsqueeze(-1)
        mean = (shares * self.targets).sum(0)
        return (shares * (self.targets - mean) ** 2).sum(0).mean()

    def loss(self, f: Tensor) -> Tensor:
        """Weighted sum of the loss, ()."""
        return self._weigh(self.likelihood.loss(f, self.targets)).sum()

    def _weigh(self, per_row: Tensor) -> Tensor:
        weights = self.sample_weight.to(per_row)
        return per_row * weights.reshape(-1, *[1] * (per_row.ndim - 1))

    def accumulated(
        self, accumulator: Accumulator, f: Tensor, curvature: Curvature
    ) -> Structure:
        """Curvature at outputs ``f``, in as many passes as the accumulator needs."""
        is_first = True
        while is_first or accumulator.needs_another_pass():
            is_first = False
            for rows in self.rows_at(f, curvature, accumulator):
                accumulator.update(rows)
        return accumulator.decompose()

    def structure_at(self, f: Tensor) -> Structure:
        """The structure in use at outputs ``f``."""
        return self.accumulated(self.accumulator(self.layout), f, self.curvature)

    def posterior(
        self, template: GaussianPosterior, weights: Tensor
    ) -> GaussianPosterior:
        """Posterior around other weights: new curvature, new loss."""
        f = self.at(weights)
        structure = self.structure_at(f)
        data_fit = DataFit(self.loss(f), template.data_fit.n_targets)
        return replace(template, mean=weights, structure=structure, data_fit=data_fit)

    def dense_curvature_at(self, f: Tensor, rho: Tensor) -> Tensor:
        """``H + diag ρ`` at outputs ``f``, written out, (P, P), float64."""
        full = self.accumulated(FullAccumulator(self.layout), f, GGN).dense()
        return full + rho.diag()

    def refit(
        self,
        template: GaussianPosterior,
        start: Tensor | None = None,
        tolerance: float = ROUNDING,
    ) -> GaussianPosterior:
        """Posterior around the most probable weights under the template's prior.

        Parameters
        ----------
        template : GaussianPosterior
            Gives prior, noise and temperature.
        start : Tensor of shape (P,), optional
            Where the search starts; the template's mean if not given.
        tolerance : float
            Share of itself that the regularised loss may still lack.

        Notes
        -----
        Newton's method with preconditioned conjugate gradients; each inner iteration
        is two products with the Jacobian.
        """
        prior = template.prior_precision
        rho = priors.expand(prior, self.layout) / template.loss_scale
        mean = template.hyperparameters.prior_mean
        begin = template.mean if start is None else start
        found = minimum(self, rho, mean.expand_as(rho), begin, tolerance)
        return self.posterior(template, found)

    def objective(
        self, theta: Tensor, rho: Tensor, prior_mean: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Regularised loss, its gradient (P,), and the outputs (N, c)."""
        f = self.at(theta)
        offset = theta - prior_mean
        value = self.loss(f) + (rho * offset**2).sum() / 2
        slope = self._weigh(self.likelihood.gradient(f, self.targets))
        _, backward = self.products(torch.float64)
        return value, backward(slope) + rho * offset, f

    def curvature_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """``v -> (H + diag ρ) v`` at outputs ``f``."""
        forward, backward = self.products(dtype)
        ridge = rho.to(dtype)
        curvature = self.likelihood.hessian_operator(f.to(dtype))
        weights = output_weights(self.likelihood, self.targets, f.shape[1])
        roots = None if weights is None else weights.sqrt().to(dtype)

        def bent(u: Tensor) -> Tensor:
            return curvature(u) if roots is None else roots * curvature(roots * u)

        def product(v: Tensor) -> Tensor:
            return backward(self._weigh(bent(forward(v)))) + ridge * v

        return product
