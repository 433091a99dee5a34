"""LinearModel: outputs on the training data that are affine in the weights.

With ``f(θ) = f* + J (θ - θ*)``, the most probable weights under a prior minimise the
convex function ``Σ w · loss(f(θ), y) + ½ (θ - μ₀)ᵀ diag(ρ) (θ - μ₀)`` with
``ρ = δ/scale``. The evidence is reliable at these weights, but not at weights trained
under a different prior (Antorán et al. 2022, "Adapting the linearised Laplace model
evidence for modern deep learning").
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sklaplace.core.newton import ROUNDING, minimum
from sklaplace.curvature import priors
from sklaplace.curvature.ggn import GGN, Curvature
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.full import FullAccumulator
from sklaplace.likelihoods.base import DataFit, Likelihood, output_weights
from sklaplace.posterior.gaussian import GaussianPosterior

Operator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LabelledOutputs:
    """Outputs of a batch of samples, with the targets to which they are fitted.

    Attributes
    ----------
    f : Tensor of shape (b, c)
        Outputs at the network's weights.
    targets : Tensor
        Targets from `Likelihood.targets`.
    weights, keys : Tensor of shape (b,)
        Weights and hashes of the samples.
    """

    f: Tensor
    targets: Tensor
    weights: Tensor
    keys: Tensor


@dataclass(frozen=True)
class LinearModel(ABC):
    """Model whose outputs on the training data are affine in the weights, float64.

    Attributes
    ----------
    layout : Layout
        The selected weights.
    outputs : Tensor of shape (N, c)
        Outputs ``f*`` at the network's weights.
    targets : Tensor
        Targets from `Likelihood.targets`.
    sample_weight : Tensor of shape (N,)
        Sample weights.
    weights : Tensor of shape (P,)
        The network's weights ``θ*``.
    likelihood : Likelihood
        Likelihood of the targets given the outputs.
    curvature : Curvature
        Entry of ``CURVATURES``.
    accumulator : callable
        Function that returns an empty accumulator of the posterior's structure for a
        layout.
    keys : Tensor of shape (N,)
        Keys of the samples for random draws; see `row_hash`.
    dtype : torch.dtype
        Dtype of the network. Products within a Newton step use this dtype, because the
        next gradient corrects their errors. Low-precision refits also use this dtype
        for losses and gradients. All other computations use float64.
    """

    layout: Layout
    outputs: Tensor
    targets: Tensor
    sample_weight: Tensor
    weights: Tensor
    likelihood: Likelihood
    curvature: Curvature
    accumulator: Callable[[Layout], Accumulator]
    keys: Tensor
    dtype: torch.dtype

    @classmethod
    def of_batches(
        cls,
        template: GaussianPosterior,
        batches: Sequence[LabelledOutputs],
        curvature: Curvature,
        accumulator: Callable[[Layout], Accumulator],
        **fields: object,
    ) -> Self:
        """Build a model from all batches; ``fields`` are the fields of a subclass.

        Layout, weights and likelihood are those of the template. Outputs, weights and
        targets become float64, except for class indices.
        """
        f = torch.cat([batch.f for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        return cls(
            layout=template.layout,
            outputs=f.double(),
            targets=targets.double() if targets.is_floating_point() else targets,
            sample_weight=torch.cat([batch.weights for batch in batches]).double(),
            weights=template.weights,
            likelihood=template.likelihood,
            curvature=curvature,
            accumulator=accumulator,
            keys=torch.cat([batch.keys for batch in batches]),
            dtype=f.dtype,
            **fields,
        )

    @abstractmethod
    def products(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """Return ``v -> J v``, (P,) to (N, c), and ``u -> Jᵀ u``, in ``dtype``."""

    @abstractmethod
    def jacobians_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Yield Jacobian rows ``Sᵀ J`` at outputs ``f``, batched for an accumulator."""

    @abstractmethod
    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return ``v -> M⁻¹ v`` with ``M ≈ H + diag ρ`` at outputs ``f``."""

    def quick_preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Operator | None:
        """Return a cheaper and less precise preconditioner, or None."""
        return None

    def at(self, weights: Tensor) -> Tensor:
        """Return the outputs (N, c) at other weights."""
        return self.outputs + self.products(torch.float64)[0](weights - self.weights)

    def target_variance(self) -> Tensor:
        """Return the weighted variance of numeric targets, averaged over columns."""
        fractions = (self.sample_weight / self.sample_weight.sum()).unsqueeze(-1)
        mean = (fractions * self.targets).sum(0)
        return (fractions * (self.targets - mean) ** 2).sum(0).mean()

    def loss(self, f: Tensor) -> Tensor:
        """Return the weighted sum of the samples' losses."""
        return self._weighted(self.likelihood.loss(f, self.targets)).sum()

    def _weighted(self, values: Tensor) -> Tensor:
        weights = self.sample_weight.to(values)
        return values * weights.reshape(-1, *[1] * (values.ndim - 1))

    def accumulated(
        self, accumulator: Accumulator, f: Tensor, curvature: Curvature
    ) -> Structure:
        """Return the curvature at outputs ``f``, summed by the accumulator.

        Some accumulators need several passes over all samples, such as one to choose
        points and one to sum products with them.
        """
        while True:
            for jacobian in self.jacobians_at(f, curvature, accumulator):
                accumulator.update(jacobian)
            if not accumulator.needs_another_pass():
                return accumulator.decompose()

    def structure_at(self, f: Tensor) -> Structure:
        """Return the curvature at outputs ``f`` in the posterior's structure."""
        return self.accumulated(self.accumulator(self.layout), f, self.curvature)

    def posterior(self, template: GaussianPosterior, mean: Tensor) -> GaussianPosterior:
        """Return the posterior at another mean (P,), with new curvature and loss.

        All other fields are those of the template.
        """
        f = self.at(mean)
        w, n_targets = self.sample_weight, template.data_fit.n_targets
        data_fit = DataFit.of(self.likelihood, f, self.targets, w, n_targets)
        structure = self.structure_at(f)
        return replace(template, mean=mean, structure=structure, data_fit=data_fit)

    def refit(
        self,
        template: GaussianPosterior,
        start: Tensor | None = None,
        tolerance: float = ROUNDING,
    ) -> GaussianPosterior:
        """Return the posterior at the most probable weights under the template's prior.

        Parameters
        ----------
        template : GaussianPosterior
            Posterior whose prior, noise and temperature are used.
        start : Tensor of shape (P,), optional
            Initial weights. By default, the template's mean.
        tolerance : float
            Relative decrease of the regularised loss below which the search ends.

        Notes
        -----
        The refit uses Newton's method with preconditioned conjugate gradients. Each
        inner iteration computes two products with the Jacobian.
        """
        # prior precisions in units of the loss, whose factor is then one
        rho = priors.expand(template.prior_precision, self.layout) / template.loss_scale
        prior_mean = template.hyperparameters.prior_mean.expand_as(rho)
        start = template.mean if start is None else start
        mean = minimum(self, rho, prior_mean, start, tolerance)
        return self.posterior(template, mean)

    # -------------------------------------------- the objective of Newton's method
    def objective(
        self,
        theta: Tensor,
        rho: Tensor,
        prior_mean: Tensor,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the regularised loss, its gradient (P,) and the outputs (N, c).

        At weights ``θ``, this is ``Σ w · loss(f, y) + ½ (θ - μ₀)ᵀ diag(ρ) (θ - μ₀)``
        with the prior mean ``μ₀`` and outputs ``f``. Products and losses use ``dtype``.
        The results are float64.
        """
        forward, backward = self.products(dtype)
        f = self.outputs.to(dtype) + forward((theta - self.weights).to(dtype))
        offset = theta - prior_mean
        value = self.loss(f).double() + (rho * offset**2).sum() / 2
        gradient = self._weighted(self.likelihood.gradient(f, self.targets)).to(dtype)
        return value, backward(gradient).double() + rho * offset, f.double()

    def dense_curvature_at(self, f: Tensor, rho: Tensor) -> Tensor:
        """Return ``H + diag ρ`` at outputs ``f`` as a float64 matrix (P, P)."""
        full = self.accumulated(FullAccumulator(self.layout), f, GGN).dense()
        return full + rho.diag()

    def curvature_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return ``v -> (H + diag ρ) v`` at outputs ``f``, for ``H = Jᵀ Λ J``.

        ``H`` is the generalised Gauss-Newton matrix, here equal to the Hessian. ``Λ``
        is the Hessian of the weighted losses in the outputs. If outputs have weights,
        ``Λ`` is multiplied by their square roots from both sides, because the
        likelihood's Hessian is that of the losses without weights.
        """
        (forward, backward), ridge = self.products(dtype), rho.to(dtype)
        hessian = self.likelihood.hessian_operator(f.to(dtype))
        weights = output_weights(self.likelihood, self.targets, f.shape[1])
        roots = None if weights is None else weights.sqrt().to(dtype)

        def product(v: Tensor) -> Tensor:
            jv = forward(v)
            curved = hessian(jv) if roots is None else roots * hessian(roots * jv)
            return backward(self._weighted(curved)) + ridge * v

        return product
