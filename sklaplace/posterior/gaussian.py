"""GaussianPosterior: the Laplace approximation, a Gaussian over weights.

``N(mean, (scale·H + diag δ)⁻¹)`` with the curvature ``H`` of the loss, the prior
precision δ and, at temperature T, ``scale`` = 1/(σ²T) for Gaussian noise and 1/T else
(MacKay 1992, "A practical Bayesian framework for backpropagation networks"). One
immutable class for all structures, subsets of weights and likelihoods.
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
    MAX_ERROR,
    UNRESOLVED,
    variance_error,
)
from sklaplace.likelihoods import Gaussian, Likelihood
from sklaplace.likelihoods.base import DataFit

__all__ = ["GaussianPosterior", "Hyperparameters"]

# Relative difference of noise levels that rounding to float32 explains.
PROPORTIONAL = 1e-6
# Matrices of P × P numbers: the curvature, times its scale, and with the prior.
DENSE_COPIES = 3


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that the curvature does not depend on. All float64.

    Read more in the :doc:`User Guide </user_guide/prior>`.

    Parameters
    ----------
    prior_precision : Tensor of shape (), (L,) or (P,)
        Inverse prior variance of the weights; L parameter tensors.
    prior_mean : Tensor of shape () or (P,)
        Prior mean of the weights.
    sigma_noise : Tensor of shape ()
        Standard deviation of the observation noise; ignored by likelihoods without.
    temperature : Tensor of shape ()
        Divides the log-likelihood; values below one sharpen the posterior.

    See Also
    --------
    GaussianPosterior : Has them.

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


@dataclass(frozen=True)
class GaussianPosterior:
    """Gaussian over the selected weights.

    Read more in the :doc:`User Guide </user_guide/theory>`.

    Parameters
    ----------
    mean : Tensor of shape (P,)
        Most probable weights (MAP).
    weights : Tensor of shape (P,)
        Weights of the network, at which it is linearised. They differ from ``mean``
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
        Power of the likelihood's scale that multiplies ``structure``.
    earlier : GaussianPosterior or None
        The prior, if it is the posterior of an earlier task; see `under`. ``structure``
        then holds the curvature of all tasks under exactly these hyperparameters, of
        which ``prior_precision`` belongs to the first task.

    See Also
    --------
    sklaplace.LaplaceClassifier : Its ``posterior_``.
    sklaplace.posterior.swag.SWAGPosterior : From iterates of gradient descent.

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
        """Structure, number of weights and prior precision in one line."""
        blocks = self.layout.blocks
        n = sum(block.layer is None for block in blocks)
        remark = f", {n} of {len(blocks)} tensors without a layer form" if n else ""
        return (
            f"GaussianPosterior({type(self.structure).__name__} over "
            f"{self.layout.n_parameters:,} weights, "
            f"prior_precision={self.shown_precision()}{remark})"
        )

    def shown_precision(self) -> str:
        """Prior precision as text: a number, or the range of several.

        Returns
        -------
        str
            With three digits.

        See Also
        --------
        prior_precision : The numbers.

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
        """Prior precision, (), (L,) or (P,).

        See Also
        --------
        replace : The posterior under another one.

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
        """Factor of ``H`` in the posterior precision, ().

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
        >>> posterior.scale  # one over the temperature, as there is no noise
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
        precision_matrix : The same as a matrix.
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
        """Factor of the loss in the negative log-posterior, ().

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
        sklaplace.LaplaceClassifier : Its option ``refine`` says when they are.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(refine=True, prior_precision=1.0, random_state=0)
        >>> model.fit(X, y).posterior_.is_refitted
        True
        """
        is_same = self.mean is self.weights  # both are large
        return not (is_same or torch.equal(self.mean, self.weights))

    def check_resolved(self, dtype: torch.dtype) -> None:
        """Raise if variances would be rounding errors.

        Parameters
        ----------
        dtype : torch.dtype
            Dtype of the network.

        Raises
        ------
        ValueError
            If the prior precision is too small beside the curvature.

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
        if not variance_error(self.precision, eps) <= MAX_ERROR:  # also for NaN
            raise ValueError(UNRESOLVED)

    def replace(self, **hyperparameters: Tensor) -> "GaussianPosterior":
        """Posterior with the same mean and curvature under other hyperparameters.

        Parameters
        ----------
        **hyperparameters : Tensor
            Values in place of those in `Hyperparameters`, by their names.

        Returns
        -------
        GaussianPosterior
            A new one, differentiable in the values.

        Raises
        ------
        ValueError
            If the prior is the posterior of an earlier task.

        See Also
        --------
        with_noise_levels : Under noise levels of each output.
        sklaplace.posterior.tuning.evidence.marglik : Finds the highest evidence.

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
                "The prior is the posterior of an earlier task, for which prior and "
                "noise cannot be changed any more. Leave them out, or fit anew."
            )
        h = replace(self.hyperparameters, **hyperparameters)
        return replace(self, hyperparameters=h)

    @property
    def noise_proportions(self) -> Tensor:
        """``r`` of noise levels ``σ r``, (c,); (1,) if they are equal.

        See Also
        --------
        with_noise_levels : Changes them.

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
        """Posterior with the same mean under other noise levels of the outputs.

        Parameters
        ----------
        levels : Tensor of shape (c,)
            Standard deviations. Where each output has weights of its own, the result
            is differentiable in each, else in their common factor.

        Returns
        -------
        GaussianPosterior or None
            None where the proportions are others than those under which the curvature
            was summed, from which that under the new ones does not follow.

        See Also
        --------
        replace : Other hyperparameters.

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
        if len(levels) == 1:
            return self.replace(sigma_noise=levels[0])
        before = self.noise_proportions.to(levels).expand_as(levels)
        ratio = levels / before
        sigma = ratio.log().mean().exp()
        factors = sigma / ratio  # old over new proportions
        moved = self.replace(sigma_noise=sigma)
        is_same = bool((factors.detach() - 1).abs().max() < PROPORTIONAL)
        structure = None
        if self.layout.is_separable and not (is_same and not levels.requires_grad):
            power = self.curvature_order
            structure = self.structure.with_output_factors(factors**power)
        if structure is None:
            return moved if is_same else None
        relative = tuple((before / factors.detach()).tolist())
        return replace(
            moved,
            structure=structure,
            likelihood=replace(cast(Gaussian, self.likelihood), relative=relative),
            data_fit=self.data_fit.with_output_factors(factors**2),
        )

    def sample(
        self, n: int = 1, random_state: RandomState | torch.Generator = 0
    ) -> Tensor:
        """Draw weights.

        Parameters
        ----------
        n : int, default=1
            Number of draws.
        random_state : int, RandomState, torch.Generator or None, default=0
            Source of the noise. None gives other draws in each call.

        Returns
        -------
        Tensor of shape (n, P)
            Float64, on the device of the posterior.

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
        noise = torch.empty(size, dtype=torch.float64, device=generator.device)
        noise = noise.normal_(generator=generator).to(self.mean.device)
        return self.mean + self.precision.sample(noise)

    def variance(self) -> Tensor:
        """Marginal variances of the weights.

        Returns
        -------
        Tensor of shape (P,)
            The diagonal of the covariance.

        See Also
        --------
        precision_matrix : The inverse of the covariance.
        sklaplace.plotting.WeightPosteriorDisplay : A plot of marginals.

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
        """Posterior precision as a matrix; for small models.

        Returns
        -------
        Tensor of shape (P, P)
            ``scale·H + diag δ``.

        Raises
        ------
        ValueError
            If memory does not suffice.

        See Also
        --------
        precision : A linear operator, for models of any size.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> posterior = LaplaceClassifier(random_state=0).fit(X, y).posterior_
        >>> posterior.precision_matrix().shape
        torch.Size([111, 111])
        """
        require_bytes(
            DENSE_COPIES * 8 * self.layout.n_parameters**2,
            self.mean.device,
            f"the precision matrix of {self.layout.n_parameters:,} weights",
            "variance() has the marginal variances of the weights",
        )
        return self.scale * self.structure.dense() + self.precision.delta.diag()

    def log_likelihood(self) -> Tensor:
        """Log-likelihood of the training targets at ``mean``.

        Returns
        -------
        Tensor of shape ()
            In nats.

        See Also
        --------
        log_marginal_likelihood : Averaged over the prior.

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
        """Squared distance from the mean of the prior, ``(mean - μ₀)ᵀ P₀ (mean - μ₀)``.

        Returns
        -------
        Tensor of shape ()
            Under the prior ``N(μ₀, P₀⁻¹)``.

        See Also
        --------
        log_marginal_likelihood : Which half of it is a part of.

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
        """Laplace approximation of the log evidence ``log p(D)``.

        ``log p(D|mean) - ½(log det P - log det diag δ + scatter)``
        (MacKay 1992, "Bayesian interpolation", eq. 4.2); differentiable in the
        hyperparameters. Under an earlier posterior it is
        ``log p(new data | old data)``, so that values of successive tasks add up.

        Returns
        -------
        Tensor of shape ()
            In nats.

        See Also
        --------
        sklaplace.posterior.tuning.evidence.marglik : Maximises it.

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
    def _prior(self) -> priors.Prior:
        if self.earlier is not None:
            return self.earlier
        delta = priors.expand(self.prior_precision, self.layout)
        return priors.Independent(delta, self.hyperparameters.prior_mean)

    # --------------------------------------------- the prior of the next task
    def logdet(self) -> Tensor:
        """Log-determinant of the posterior precision, ``log det P``.

        Returns
        -------
        Tensor of shape ()
            In nats.

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
        """Squared distance of weights from the mean, ``(θ - mean)ᵀ P (θ - mean)``.

        Parameters
        ----------
        theta : Tensor of shape (P,)
            Weights.

        Returns
        -------
        Tensor of shape ()
            With the posterior precision ``P``.

        See Also
        --------
        gradient : Half of its gradient.

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
        """Gradient of minus the log-density, ``P (θ - mean)``.

        Without forming the posterior precision ``P``.

        Parameters
        ----------
        theta : Tensor of shape (P,)
            Weights.

        Returns
        -------
        Tensor of shape (P,)
            Zero at the mean.

        See Also
        --------
        quadratic_form : Minus twice the log-density, up to a constant.
        sklaplace.PriorTraining : Trains with it.

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
        """The posterior as a prior: without the prior of its own.

        Returns
        -------
        GaussianPosterior
            With ``earlier`` None.

        See Also
        --------
        under : The posterior of the next task.

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
        """Posterior with an earlier task's posterior as the prior, at the same mean.

        Parameters
        ----------
        earlier : GaussianPosterior
            Over the same weights, with a structure of the same class.
        accumulator : callable
            Returns an empty accumulator of that structure for a layout.

        Returns
        -------
        GaussianPosterior
            With precision ``scale·H + scale₀·H₀ + diag δ₀``. Kronecker factors
            equal one fit to the data of both tasks, where samples of the earlier ones
            have weight scale₀/scale.

        See Also
        --------
        sklaplace.LaplaceClassifier : Does this with its option ``prior``.

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
        both, new = accumulator(self.layout), accumulator(self.layout)
        earlier.structure.scaled(earlier.scale / self.scale).resume(both)
        self.structure.resume(new)
        both.merge(new)
        delta, h = earlier.prior_precision, self.hyperparameters
        h = replace(h, prior_precision=delta, prior_mean=earlier.mean)
        structure = both.decompose()
        return replace(self, structure=structure, hyperparameters=h, earlier=earlier)

    def to(self, device: torch.device | str) -> "GaussianPosterior":
        """Copy with all tensors on a device.

        Parameters
        ----------
        device : torch.device or str
            Such as ``"cpu"`` or ``"cuda"``.

        Returns
        -------
        GaussianPosterior
            Itself if the tensors are there already.

        See Also
        --------
        sklaplace.LaplaceClassifier : Computes where the net is.

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
