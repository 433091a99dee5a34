"""GaussianPosterior: the Laplace approximation, a Gaussian over weights.

``N(mean, (scale/T · H + diag δ)⁻¹)`` with prior precision δ, temperature T and
``scale`` = 1/σ² for Gaussian noise, else 1 (MacKay 1992, "A practical Bayesian
framework for backpropagation networks"). One class for all structures, subsets
and likelihoods; nothing in it changes when it is asked.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sklaplace import priors
from sklaplace.jacobians import Jacobian
from sklaplace.layouts import Layout
from sklaplace.likelihoods import DataFit, Likelihood
from sklaplace.memory import move
from sklaplace.structures import Structure


@dataclass(frozen=True)
class Hyperparameters:
    """What is chosen after the curvature is known. All float64.

    Attributes
    ----------
    prior_precision : Tensor of shape (), (L,) or (P,)
        One over the prior variance of a weight; L parameter tensors.
    prior_mean : Tensor of shape () or (P,)
        Prior mean of the weights.
    sigma_noise : Tensor of shape ()
        Standard deviation of the observation noise; ignored without noise.
    temperature : Tensor of shape ()
        Divides the log-likelihood; below one sharpens the posterior.
    """

    prior_precision: Tensor
    prior_mean: Tensor
    sigma_noise: Tensor
    temperature: Tensor


@dataclass(frozen=True)
class GaussianPosterior:
    """Gaussian over the selected weights.

    Attributes
    ----------
    mean : Tensor of shape (P,)
        Most probable weights.
    weights : Tensor of shape (P,)
        Weights of the network, where it is linearised. They differ from
        ``mean`` where the last layer was refitted.
    structure : Structure
        Curvature ``H`` at ``mean``.
    layout : Layout
        The selected parameters.
    likelihood : Likelihood
        Of the targets given the outputs.
    data_fit : DataFit
        Training loss at ``mean``.
    hyperparameters : Hyperparameters
        Prior, noise and temperature.
    curvature_order : int
        Power of the likelihood's scale that ``structure`` is multiplied by.
    """

    mean: Tensor
    weights: Tensor
    structure: Structure
    layout: Layout
    likelihood: Likelihood
    data_fit: DataFit
    hyperparameters: Hyperparameters
    curvature_order: int = 1

    def __repr__(self) -> str:
        """One line in place of all tensors."""
        return (
            f"GaussianPosterior({type(self.structure).__name__} over "
            f"{self.layout.n_parameters:,} weights, "
            f"prior_precision={self.shown_precision()}{self._shown_rows()})"
        )

    def _shown_rows(self) -> str:
        """How many parameter tensors are blocks of their own, for want of a form."""
        n = sum(block.layer is None for block in self.layout.blocks)
        total = len(self.layout.blocks)
        return f", {n} of {total} tensors without a layer form" if n else ""

    def shown_precision(self) -> str:
        """Prior precision for people: a number, or the range of several."""
        low, high = self.prior_precision.aminmax()
        several = self.prior_precision.numel() > 1
        return f"{low:.3g} to {high:.3g}" if several else f"{low:.3g}"

    @property
    def prior_precision(self) -> Tensor:
        """Prior precision, (), (L,) or (P,)."""
        return self.hyperparameters.prior_precision

    @cached_property
    def scale(self) -> Tensor:
        """Factor of ``H`` in the posterior precision, ()."""
        return self._scale_of_curvature(self.hyperparameters)

    @property
    def loss_scale(self) -> Tensor:
        """Factor of the loss in the posterior's negative logarithm, ()."""
        return self._scale_of_loss(self.hyperparameters)

    def _scale_of_loss(self, h: Hyperparameters) -> Tensor:
        return self.likelihood.scale(h.sigma_noise) / h.temperature

    def _scale_of_curvature(self, h: Hyperparameters) -> Tensor:
        scale = self.likelihood.scale(h.sigma_noise)
        return scale**self.curvature_order / h.temperature

    @property
    def is_refitted(self) -> bool:
        """Whether ``mean`` is not what the network has."""
        return not torch.equal(self.mean, self.weights)

    def replace(self, **hyperparameters: Tensor) -> "GaussianPosterior":
        """The same posterior under other hyperparameters."""
        return replace(
            self, hyperparameters=replace(self.hyperparameters, **hyperparameters)
        )

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Covariance of the outputs of each row, (b, c, c), float64."""
        return self.structure.covariance(jacobian, self.prior_precision, self.scale)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Variances of the outputs of each row, (b, c), float64."""
        return self.structure.functional_variance(
            jacobian, self.prior_precision, self.scale
        )

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """``n`` draws of the weights, (n, P)."""
        noise = torch.randn(
            n,
            self.layout.n_parameters,
            dtype=torch.float64,
            device=generator.device,
            generator=generator,
        ).to(self.mean.device)
        deviations = self.structure.sample(noise, self.prior_precision, self.scale)
        return self.mean + deviations

    def variance(self) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        return self.structure.variance(self.prior_precision, self.scale)

    def precision_matrix(self) -> Tensor:
        """Posterior precision written out, (P, P); for small models."""
        delta = priors.expand(self.prior_precision, self.layout)
        return self.scale * self.structure.dense() + delta.diag()

    def log_likelihood(self, hyperparameters: Hyperparameters | None = None) -> Tensor:
        """Log-likelihood of the training targets at ``mean``, in nats."""
        h = hyperparameters or self.hyperparameters
        normalizer = self.likelihood.log_normalizer(h.sigma_noise)
        loss = self.data_fit.loss * self._scale_of_loss(h)
        return -loss - self.data_fit.n_targets * normalizer

    def scatter(self, hyperparameters: Hyperparameters | None = None) -> Tensor:
        """``(mean - prior_mean)ᵀ diag(δ) (mean - prior_mean)``."""
        h = hyperparameters or self.hyperparameters
        delta = priors.expand(h.prior_precision, self.layout)
        return (delta * (self.mean - h.prior_mean) ** 2).sum()

    def log_marginal_likelihood(
        self, hyperparameters: Hyperparameters | None = None
    ) -> Tensor:
        """Laplace evidence ``log p(D)``, in nats; differentiable.

        ``log p(D|mean) - ½(log det P - log det diag δ + scatter)``
        (MacKay 1992, "Bayesian interpolation", eq. 4.2).
        """
        h = hyperparameters or self.hyperparameters
        scale = self._scale_of_curvature(h)
        logdet = self.structure.logdet(h.prior_precision, scale)
        log_prior = priors.expand(h.prior_precision, self.layout).log().sum()
        complexity = logdet - log_prior + self.scatter(h)
        return self.log_likelihood(h) - complexity / 2

    def to(self, device: torch.device | str) -> "GaussianPosterior":
        """The same posterior with all tensors on a device."""
        moved: GaussianPosterior = move(self, device)
        return moved
