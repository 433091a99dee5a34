"""GaussianPosterior: the Laplace approximation, a Gaussian over weights.

``N(mean, (scale/T · H + diag δ)⁻¹)`` with prior precision δ, temperature T and
``scale`` = 1/σ² for Gaussian noise, else 1 (MacKay 1992, "A practical Bayesian
framework for backpropagation networks"). One class for all structures, subsets
and likelihoods; nothing in it changes when it is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sklaplace.core.budget import move
from sklaplace.curvature import priors
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Precision, Structure
from sklaplace.likelihoods import DataFit, Likelihood


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
class EarlierPosterior:
    """A prior that an earlier task has left, ``N(mean, (scale·H + diag δ)⁻¹)``.

    Attributes
    ----------
    mean : Tensor of shape (P,)
        Most probable weights after that task.
    structure : Structure
        Curvature ``H`` of all tasks until then.
    layout : Layout
        The selected parameters.
    prior_precision : Tensor of shape (), (L,) or (P,)
        ``δ``, of the first task.
    scale : Tensor of shape ()
        Factor of ``H``.
    """

    mean: Tensor
    structure: Structure
    layout: Layout
    prior_precision: Tensor
    scale: Tensor

    def logdet(self) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""
        return self.structure.precision(self.prior_precision, self.scale).logdet()

    def quadratic_form(self, theta: Tensor) -> Tensor:
        """Squared distance from the mean in units of the precision, ()."""
        return (theta - self.mean) @ self.gradient(theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """``(scale·H + diag δ) (θ - mean)``, (P,); no matrix is written out."""
        offset = theta - self.mean
        delta = priors.expand(self.prior_precision, self.layout)
        return self.scale * self.structure.product(offset) + delta * offset


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
    earlier : EarlierPosterior or None
        The prior, where it is what an earlier task has left; see `under`. ``structure``
        then has the curvature of all tasks, for these very hyperparameters.
    """

    mean: Tensor
    weights: Tensor
    structure: Structure
    layout: Layout
    likelihood: Likelihood
    data_fit: DataFit
    hyperparameters: Hyperparameters
    curvature_order: int = 1
    earlier: EarlierPosterior | None = None

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

    @cached_property
    def precision(self) -> Precision:
        """Posterior precision ``scale·H + diag δ``, as a linear operator."""
        return self.structure.precision(self.prior_precision, self.scale)

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
        self._require_free()
        return replace(
            self, hyperparameters=replace(self.hyperparameters, **hyperparameters)
        )

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Covariance of the outputs of each row, (b, c, c), float64."""
        return self.precision.functional_covariance(jacobian)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Variances of the outputs of each row, (b, c), float64."""
        return self.precision.functional_variance(jacobian)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """``n`` draws of the weights, (n, P)."""
        noise = torch.randn(
            n,
            self.layout.n_parameters,
            dtype=torch.float64,
            device=generator.device,
            generator=generator,
        ).to(self.mean.device)
        return self.mean + self.precision.sample(noise)

    def variance(self) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        return self.precision.variance()

    def precision_matrix(self) -> Tensor:
        """Posterior precision written out, (P, P); for small models."""
        return self.scale * self.structure.dense() + self.precision.delta.diag()

    def log_likelihood(self, hyperparameters: Hyperparameters | None = None) -> Tensor:
        """Log-likelihood of the training targets at ``mean``, in nats."""
        h = self._asked(hyperparameters)
        normalizer = self.likelihood.log_normalizer(h.sigma_noise)
        loss = self.data_fit.loss * self._scale_of_loss(h)
        return -loss - self.data_fit.n_targets * normalizer

    def scatter(self, hyperparameters: Hyperparameters | None = None) -> Tensor:
        """``(mean - prior_mean)ᵀ diag(δ) (mean - prior_mean)``, or the prior's."""
        return self._prior(self._asked(hyperparameters)).quadratic_form(self.mean)

    def log_marginal_likelihood(
        self, hyperparameters: Hyperparameters | None = None
    ) -> Tensor:
        """Laplace evidence ``log p(D)``, in nats; differentiable.

        ``log p(D|mean) - ½(log det P - log det diag δ + scatter)``
        (MacKay 1992, "Bayesian interpolation", eq. 4.2). Under an earlier posterior it
        is that of the new rows given the old ones, so that tasks add up.
        """
        h = self._asked(hyperparameters)
        precision = self.precision
        if h is not self.hyperparameters:
            scale = self._scale_of_curvature(h)
            precision = self.structure.precision(h.prior_precision, scale)
        complexity = precision.logdet() - self._prior(h).logdet() + self.scatter(h)
        return self.log_likelihood(h) - complexity / 2

    def _prior(self, h: Hyperparameters) -> priors.Prior:
        if self.earlier is not None:
            return self.earlier
        delta = priors.expand(h.prior_precision, self.layout)
        return priors.Independent(delta, h.prior_mean)

    def _asked(self, h: Hyperparameters | None) -> Hyperparameters:
        """Hyperparameters in question, if they may be asked for."""
        if h is None or h is self.hyperparameters:
            return self.hyperparameters
        self._require_free()
        return h

    def _require_free(self) -> None:
        if self.earlier is not None:
            raise ValueError(
                "The prior is the posterior of an earlier task, for which prior and "
                "noise cannot be changed any more. Leave them out, or fit anew."
            )

    # --------------------------------------------------------------- the next task
    def as_prior(self) -> EarlierPosterior:
        """What the next task takes for its prior."""
        h = self.hyperparameters
        return EarlierPosterior(
            self.mean, self.structure, self.layout, h.prior_precision, self.scale
        )

    def under(
        self, earlier: EarlierPosterior, accumulator: Callable[[Layout], Accumulator]
    ) -> "GaussianPosterior":
        """The same rows around the same weights, under what an earlier task has left.

        Parameters
        ----------
        earlier : EarlierPosterior
            Over the same weights, with a structure of the same kind.
        accumulator : callable
            Makes the accumulator of that structure, from a layout.

        Returns
        -------
        GaussianPosterior
            With precision ``scale·H + scale₀·H₀ + diag δ₀``. Kronecker factors are
            those of one fit on the rows of both, old ones with weight scale₀/scale.

        References
        ----------
        Ritter, Botev, Barber (2018), "Online structured Laplace approximations for
        overcoming catastrophic forgetting". Huszár (2018), "Note on the
        quadratic penalties in elastic weight consolidation": one penalty for all
        earlier tasks, around the last of them.
        """
        both, new = accumulator(self.layout), accumulator(self.layout)
        earlier.structure.scaled(earlier.scale / self.scale).resume(both)
        self.structure.resume(new)
        both.merge(new)
        h = replace(
            self.hyperparameters,
            prior_precision=earlier.prior_precision,
            prior_mean=earlier.mean,
        )
        structure = both.decompose()
        return replace(self, structure=structure, hyperparameters=h, earlier=earlier)

    def to(self, device: torch.device | str) -> "GaussianPosterior":
        """The same posterior with all tensors on a device."""
        moved: GaussianPosterior = move(self, device)
        return moved
