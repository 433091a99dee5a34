"""GaussianPosterior: the Laplace approximation, a Gaussian over weights.

The posterior is ``N(mean, (scale·H + diag δ)⁻¹)`` (MacKay 1992, "A practical Bayesian
framework for backpropagation networks"). ``H`` is the curvature of the loss, and δ is
the prior precision. At temperature T, ``scale`` is 1/(σ²T) for Gaussian noise and 1/T
otherwise. `GaussianPosterior` is immutable and supports all structures, subsets of
weights and likelihoods.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from sklaplace.core.budget import move, require_bytes
from sklaplace.core.checks import as_generator
from sklaplace.core.parallel import cached_property
from sklaplace.core.random import RandomState
from sklaplace.curvature import priors
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Precision, Structure
from sklaplace.curvature.structures.rounding import (
    MAX_VARIANCE_ERROR,
    UNRESOLVED,
    variance_error,
)
from sklaplace.likelihoods import Gaussian, Likelihood
from sklaplace.likelihoods.base import DataFit

__all__ = ["GaussianPosterior", "Hyperparameters"]

# Largest relative difference between noise levels that float32 rounding can cause.
MAX_ROUNDING_OF_LEVELS = 1e-6
# Number of P × P matrices in memory: curvature, scaled curvature and precision.
DENSE_COPIES = 3


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that do not affect the curvature, as float64 tensors.

    Read more in the :doc:`User Guide </user_guide/prior>`.

    Parameters
    ----------
    prior_precision : Tensor of shape (), (L,) or (P,)
        Inverse prior variance: a scalar, one value per parameter tensor (L), or one
        value per weight (P).
    prior_mean : Tensor of shape () or (P,)
        Prior mean of the weights.
    sigma_noise : Tensor of shape ()
        Standard deviation of the observation noise. Ignored by likelihoods without
        noise.
    temperature : Tensor of shape ()
        Divisor of the log-likelihood. Values below one sharpen the posterior.
    groups : Tensor of shape (L,) or None
        Group index of each parameter tensor. Tensors in the same group share one prior
        precision.

    See Also
    --------
    GaussianPosterior : Posterior with these hyperparameters.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
    >>> posterior.hyperparameters.temperature
    tensor(1., dtype=torch.float64)
    """

    prior_precision: Tensor
    prior_mean: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    groups: Tensor | None = None


@dataclass(frozen=True)
class GaussianPosterior:
    """Gaussian posterior over the selected weights.

    Read more in the :doc:`User Guide </user_guide/theory>`.

    Parameters
    ----------
    mean : Tensor of shape (P,)
        Most probable weights (MAP).
    weights : Tensor of shape (P,)
        Weights at which the network is linearised. These weights differ from ``mean``
        if the linear model was refitted.
    structure : Structure
        Curvature ``H`` at ``mean``.
    layout : Layout
        The selected parameters.
    likelihood : Likelihood
        Likelihood of the targets given the outputs.
    data_fit : DataFit
        Training loss at ``mean``.
    hyperparameters : Hyperparameters
        Prior, noise and temperature.
    curvature_order : int
        Exponent of the likelihood's scale in the factor that multiplies ``structure``.
    earlier : GaussianPosterior or None
        Prior that is the posterior of an earlier task or has a precision matrix; see
        `under`. With such a prior, ``structure`` contains the curvature of all tasks
        and is valid only for the given ``hyperparameters``. ``prior_precision`` is the
        prior precision of the first task.

    See Also
    --------
    sklaplace.LaplaceClassifier : Stores this posterior as ``posterior_``.
    sklaplace.posterior.swag.SWAGPosterior : Gaussian fitted to iterates of SGD.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
    >>> posterior.mean.shape, posterior.variance().shape
    (torch.Size([111]), torch.Size([111]))
    """

    mean: Tensor
    weights: Tensor
    structure: Structure
    layout: Layout
    likelihood: Likelihood
    data_fit: DataFit
    hyperparameters: Hyperparameters
    curvature_order: int = 1
    earlier: "GaussianPosterior | None" = None

    def __repr__(self) -> str:
        """Return a one-line summary without tensors.

        Parameters without a layer form belong to no known type of layer, so their
        curvature has no Kronecker factors.
        """
        blocks = self.layout.blocks
        n = sum(block.layer is None for block in blocks)
        remark = f", {n} of {len(blocks)} tensors without a layer form" if n else ""
        return (
            f"GaussianPosterior({type(self.structure).__name__} over "
            f"{self.layout.n_parameters:,} weights, "
            f"prior_precision={self.shown_precision()}{remark})"
        )

    def shown_precision(self) -> str:
        """Format the prior precision as one number or as a range.

        Returns
        -------
        str
            One or two numbers with three significant digits.

        See Also
        --------
        prior_precision : Prior precision as a tensor.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> isinstance(posterior.shown_precision(), str)
        True
        """
        low, high = self.prior_precision.aminmax()
        several = self.prior_precision.numel() > 1
        return f"{low:.3g} to {high:.3g}" if several else f"{low:.3g}"

    @property
    def prior_precision(self) -> Tensor:
        """Prior precision of shape (), (L,) or (P,).

        See Also
        --------
        replace : Change the prior precision.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool(posterior.prior_precision > 0)
        True
        """
        return self.hyperparameters.prior_precision

    @cached_property
    def scale(self) -> Tensor:
        """Factor of ``H`` in the posterior precision, a scalar tensor.

        See Also
        --------
        loss_scale : Factor of the loss.
        precision : The posterior precision.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.scale  # 1 / temperature, because there is no noise
        tensor(1., dtype=torch.float64)
        """
        h = self.hyperparameters
        noise_scale = self.likelihood.scale(h.sigma_noise)
        return noise_scale**self.curvature_order / h.temperature

    @cached_property
    def precision(self) -> Precision:
        """Posterior precision ``scale·H + diag δ``, as a linear operator.

        See Also
        --------
        precision_matrix : Posterior precision as a matrix.
        variance : Variances of the weights.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool(posterior.precision.logdet() == posterior.logdet())
        True
        """
        return self.structure.precision(self.prior_precision, self.scale)

    @property
    def loss_scale(self) -> Tensor:
        """Factor of the loss in the negative log-posterior, a scalar tensor.

        See Also
        --------
        scale : Factor of the curvature.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.loss_scale
        tensor(1., dtype=torch.float64)
        """
        h = self.hyperparameters
        return self.likelihood.scale(h.sigma_noise) / h.temperature

    @property
    def is_refitted(self) -> bool:
        """Whether ``mean`` differs from the weights of the network.

        See Also
        --------
        sklaplace.LaplaceClassifier : Its ``refine`` parameter controls refitting.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(refine=True, prior_precision=1.0, random_state=0)
        >>> model.fit(X, y).posterior_.is_refitted
        True
        """
        is_same = self.mean is self.weights  # avoids comparing large tensors
        return not (is_same or torch.equal(self.mean, self.weights))

    def check_resolved(self, dtype: torch.dtype) -> None:
        """Raise ValueError if rounding errors would dominate the variances.

        Parameters
        ----------
        dtype : torch.dtype
            Dtype of the network.

        Raises
        ------
        ValueError
            If the prior precision is too small relative to the curvature.

        See Also
        --------
        variance : The variances.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.check_resolved(torch.float32)
        """
        eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        # unlike ">", "not <=" is true for NaN
        if not variance_error(self.precision, eps) <= MAX_VARIANCE_ERROR:
            raise ValueError(UNRESOLVED)

    def replace(self, **hyperparameters: Tensor) -> "GaussianPosterior":
        """Return a copy with new hyperparameters and the same mean and curvature.

        Parameters
        ----------
        **hyperparameters : Tensor
            New values for fields of `Hyperparameters`.

        Returns
        -------
        GaussianPosterior
            New posterior, differentiable with respect to the new values.

        Raises
        ------
        ValueError
            If ``earlier`` is not None.

        See Also
        --------
        with_noise_levels : Change the noise level of each output.
        sklaplace.posterior.tuning.evidence.marglik : Maximise the evidence.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> wide = posterior.replace(prior_precision=posterior.prior_precision / 100)
        >>> bool((wide.variance() > posterior.variance()).all())
        True
        """
        if self.earlier is not None:
            raise ValueError(
                "prior_precision and sigma_noise cannot be changed, because the prior "
                "has a precision matrix or is the posterior of an earlier task. Omit "
                "them, or fit again."
            )
        h = replace(self.hyperparameters, **hyperparameters)
        return replace(self, hyperparameters=h)

    @property
    def noise_proportions(self) -> Tensor:
        """Ratios ``r`` of the noise levels ``σ r``, (c,), or (1,) if all are equal.

        See Also
        --------
        with_noise_levels : Change the noise levels.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.noise_proportions.tolist()
        [1.0]
        """
        relative = getattr(self.likelihood, "relative", None)
        return self.mean.new_tensor(relative or (1.0,))

    def with_noise_levels(self, levels: Tensor) -> "GaussianPosterior | None":
        """Return a copy with new noise levels and the same mean.

        Parameters
        ----------
        levels : Tensor of shape (c,) or (1,)
            Standard deviation of each output's noise, or of all outputs' noise. The
            result is differentiable with respect to the levels, or only with respect to
            their common factor if the outputs share weights.

        Returns
        -------
        GaussianPosterior or None
            Copy, or None if the ratios of the levels change and the curvature cannot be
            converted.

        See Also
        --------
        replace : Change other hyperparameters.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> posterior = LaplaceRegressor(random_state=0).fit(X, y).posterior_
        >>> sigma = posterior.hyperparameters.sigma_noise
        >>> louder = posterior.with_noise_levels(2 * sigma.reshape(1))
        >>> bool(louder.scale < posterior.scale)
        True
        """
        if len(levels) == 1:  # a common level leaves all proportions unchanged
            return self.replace(sigma_noise=levels[0])
        proportions = self.noise_proportions.to(levels).expand_as(levels)
        # levels = σ · new proportions, with a σ that keeps the mean of their logarithms
        sigmas = levels / proportions
        sigma = sigmas.log().mean().exp()
        factors = sigma / sigmas  # old proportions divided by new proportions
        rescaled = self.replace(sigma_noise=sigma)
        is_same = bool((factors.detach() - 1).abs().max() < MAX_ROUNDING_OF_LEVELS)
        structure = None  # unless it is converted to the new proportions
        # with equal proportions, a new structure is needed only for gradients
        if self.layout.is_separable and not (is_same and not levels.requires_grad):
            # the curvature is proportional to 1/σ² to this power, and is multiplied
            # by the factors from both sides
            power = self.curvature_order
            structure = self.structure.with_output_factors(factors**power)
        if structure is None:
            return rescaled if is_same else None
        # new proportions of the noise, as the likelihood stores them
        relative = tuple((proportions / factors.detach()).tolist())
        return replace(
            rescaled,
            structure=structure,
            likelihood=replace(cast(Gaussian, self.likelihood), relative=relative),
            data_fit=self.data_fit.with_output_factors(factors**2),
        )

    def sample(
        self, n: int = 1, random_state: RandomState | torch.Generator = 0
    ) -> Tensor:
        """Draw weights from the posterior.

        Parameters
        ----------
        n : int, default=1
            Number of draws.
        random_state : int, RandomState, torch.Generator or None, default=0
            Source of randomness. If None, each call returns different draws.

        Returns
        -------
        Tensor of shape (n, P)
            Float64 draws on the posterior's device.

        See Also
        --------
        variance : Variances of the draws.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.sample(5, random_state=0).shape
        torch.Size([5, 111])
        """
        generator = as_generator(random_state)
        size = n, self.layout.n_parameters
        # the generator's device may differ from the posterior's
        noise = torch.empty(size, dtype=torch.float64, device=generator.device)
        noise = noise.normal_(generator=generator).to(self.mean.device)
        return self.mean + self.precision.sample(noise)

    def variance(self) -> Tensor:
        """Return the marginal variances of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Diagonal of the covariance matrix.

        See Also
        --------
        precision_matrix : Inverse of the covariance matrix.
        sklaplace.plotting.WeightPosteriorDisplay : Plot of the marginals.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool((posterior.variance() > 0).all())
        True
        """
        return self.precision.variance()

    def precision_matrix(self) -> Tensor:
        """Return the posterior precision as a dense matrix, for small models.

        Returns
        -------
        Tensor of shape (P, P)
            ``scale·H + diag δ``.

        Raises
        ------
        ValueError
            If there is not enough memory.

        See Also
        --------
        precision : Linear operator for models of any size.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.precision_matrix().shape
        torch.Size([111, 111])
        """
        # raises ValueError if too little memory is free for float64 matrices
        require_bytes(
            DENSE_COPIES * 8 * self.layout.n_parameters**2,
            self.mean.device,
            f"the precision matrix of {self.layout.n_parameters:,} weights",
            "use variance() for the marginal variances of the weights",
        )
        return self.scale * self.structure.dense() + self.precision.delta.diag()

    def log_likelihood(self) -> Tensor:
        """Return the log-likelihood of the training targets at ``mean``.

        Returns
        -------
        Tensor of shape ()
            Value in nats.

        See Also
        --------
        log_marginal_likelihood : Log evidence.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool(posterior.log_likelihood() < 0)
        True
        """
        loss, n_targets = self.data_fit.loss, self.data_fit.n_targets
        normalizer = self.likelihood.log_normalizer(self.hyperparameters.sigma_noise)
        return -loss * self.loss_scale - n_targets * normalizer

    def scatter(self) -> Tensor:
        """Return the squared distance to the prior, ``(mean - μ₀)ᵀ P₀ (mean - μ₀)``.

        Returns
        -------
        Tensor of shape ()
            Squared Mahalanobis distance under the prior ``N(μ₀, P₀⁻¹)``.

        See Also
        --------
        log_marginal_likelihood : Log evidence, which subtracts half of this distance.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool(posterior.scatter() > 0)
        True
        """
        return self._prior.quadratic_form(self.mean)

    def log_marginal_likelihood(self) -> Tensor:
        """Return the Laplace approximation of the log evidence ``log p(D)``.

        The value is ``log p(D|mean) - ½(log det P - log det diag δ + scatter)`` (MacKay
        1992, "Bayesian interpolation", eq. 4.2). It is differentiable with respect to
        the hyperparameters. If the prior is an earlier posterior, the value is
        ``log p(new data | old data)``. The log evidence of all tasks is then the sum of
        the values of the tasks.

        Returns
        -------
        Tensor of shape ()
            Value in nats.

        See Also
        --------
        sklaplace.posterior.tuning.evidence.marglik : Maximise the evidence.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool(posterior.log_marginal_likelihood() < posterior.log_likelihood())
        True
        """
        complexity = self.logdet() - self._prior.logdet() + self.scatter()
        return self.log_likelihood() - complexity / 2

    @property
    def _prior(self) -> "GaussianPosterior | priors.Independent":
        """The posterior of an earlier task, if any, else the prior of the weights."""
        if self.earlier is not None:
            return self.earlier
        delta = priors.expand(self.prior_precision, self.layout)
        return priors.Independent(delta, self.hyperparameters.prior_mean)

    # --------------------------------------------- the prior of the next task
    def logdet(self) -> Tensor:
        """Return the log-determinant of the posterior precision, ``log det P``.

        Returns
        -------
        Tensor of shape ()
            Value in nats.

        See Also
        --------
        precision : The posterior precision.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.logdet().shape
        torch.Size([])
        """
        return self.precision.logdet()

    def quadratic_form(self, theta: Tensor) -> Tensor:
        """Return the squared distance to the mean, ``(θ - mean)ᵀ P (θ - mean)``.

        Parameters
        ----------
        theta : Tensor of shape (P,)
            Weights.

        Returns
        -------
        Tensor of shape ()
            Squared Mahalanobis distance under the posterior.

        See Also
        --------
        gradient : Half of the gradient of this distance.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> float(posterior.quadratic_form(posterior.mean))
        0.0
        """
        return (theta - self.mean) @ self.gradient(theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient of the negative log-density, ``P (θ - mean)``.

        ``P`` is never formed as a matrix.

        Parameters
        ----------
        theta : Tensor of shape (P,)
            Weights.

        Returns
        -------
        Tensor of shape (P,)
            Gradient, zero at the mean.

        See Also
        --------
        quadratic_form : -2 times the log-density, up to a constant.
        sklaplace.PriorTraining : Uses this gradient in training.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> bool((posterior.gradient(posterior.mean) == 0).all())
        True
        """
        offset = theta - self.mean
        delta = priors.expand(self.prior_precision, self.layout)
        return self.scale * self.structure.product(offset) + delta * offset

    def as_prior(self) -> "GaussianPosterior":
        """Return a copy without the earlier posterior, for use as a prior.

        Returns
        -------
        GaussianPosterior
            Copy with ``earlier=None``.

        See Also
        --------
        under : Posterior of the next task.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.as_prior().earlier is None
        True
        """
        return replace(self, earlier=None)

    def under(
        self, earlier: "GaussianPosterior", accumulator: Callable[[Layout], Accumulator]
    ) -> "GaussianPosterior":
        """Return a posterior with the same mean and an earlier posterior as its prior.

        Parameters
        ----------
        earlier : GaussianPosterior
            Posterior over the same weights, with a structure of the same class.
        accumulator : callable
            Function that returns an empty accumulator of this structure for a layout.

        Returns
        -------
        GaussianPosterior
            Posterior with precision ``scale·H + scale₀·H₀ + diag δ₀``. A single fit to
            the data of both tasks, with sample weights scale₀/scale for the earlier
            task, would have the same Kronecker factors.

        See Also
        --------
        sklaplace.LaplaceClassifier : Calls this method if ``prior`` is a posterior.

        References
        ----------
        Ritter, Botev, Barber (2018), "Online structured Laplace approximations for
        overcoming catastrophic forgetting". Huszár (2018), "Note on the
        quadratic penalties in elastic weight consolidation": one penalty for all
        earlier tasks, centred at the latest posterior mean.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> first = LaplaceClassifier(prior_precision=1.0).fit(X[::2], y[::2])
        >>> second = LaplaceClassifier(
        ...     first.estimator_, prior=first.posterior_, random_state=0
        ... ).fit(X[1::2], y[1::2])
        >>> second.posterior_.earlier is not None
        True
        """
        # structures are added as sums, in accumulators filled with each of them
        total, new = accumulator(self.layout), accumulator(self.layout)
        # the sum is later multiplied by self.scale
        earlier.structure.scaled(earlier.scale / self.scale).add_to(total)
        self.structure.add_to(new)
        total.merge(new)
        delta, mean = earlier.prior_precision, earlier.mean
        h = replace(self.hyperparameters, prior_precision=delta, prior_mean=mean)
        structure = total.decompose()
        return replace(self, structure=structure, hyperparameters=h, earlier=earlier)

    def to(self, device: torch.device | str) -> "GaussianPosterior":
        """Return a copy with all tensors on a device.

        Parameters
        ----------
        device : torch.device or str
            Target device, such as ``"cpu"`` or ``"cuda"``.

        Returns
        -------
        GaussianPosterior
            Copy, or the posterior itself if its tensors are already on the device.

        See Also
        --------
        sklaplace.LaplaceClassifier : Computes on the device of the skorch net.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.to("cpu").mean.device
        device(type='cpu')
        """
        return move(self, device)
