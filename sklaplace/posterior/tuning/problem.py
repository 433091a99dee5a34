"""TuningProblem: a posterior, the data and the hyperparameters to choose."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel

# With more weights than this, computing a posterior precision takes longer than a pass
# over the held-out samples.
MANY_WEIGHTS = 2**22
# Bounds of δ and σ that prevent overflow and underflow of their products.
SMALLEST, LARGEST = math.exp(-100), math.exp(100)


@dataclass(frozen=True)
class LinearisedBatch:
    """Linearised batch: outputs (b, c), Jacobian, targets, sample weights (b,).

    Training data also have ``keys`` (b,) from `row_hash`.
    """

    f: Tensor
    jacobian: Jacobian
    targets: Tensor
    weights: Tensor
    keys: Tensor | None = None


@dataclass(frozen=True)
class HeldOutScore:
    """Score on held-out samples.

    Attributes
    ----------
    log_proba : callable or None
        Log class probabilities, ``(mean (b, c), cov (b, c, c)) -> (b, K)``. None for
        regression.
    log_density : callable or None
        Log density, ``(mean (b, c), variance (b, c), targets) -> (b,)``, for regression
        likelihoods without a noise level.
    diagonal : bool
        Whether ``log_proba`` accepts variances (b, c) instead of covariances.
    is_given : bool
        Whether the user passed the held-out samples; False if ``fit`` split them off.
    is_cheap : bool
        Whether ``log_proba`` takes no longer than computing the variances.
    is_centred : bool
        Whether to subtract the mean of the outputs, which a softmax ignores.
    """

    log_proba: Callable[[Tensor, Tensor], Tensor] | None = None
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    diagonal: bool = True
    is_given: bool = False
    is_cheap: bool = False
    is_centred: bool = True

    def losses(
        self, posterior: GaussianPosterior, mean: Tensor, cov: Tensor, targets: Tensor
    ) -> Tensor:
        """Return negative log-likelihoods (b,) of Gaussian outputs, in nats.

        The outputs have means ``mean`` (b, c) and covariances ``cov`` (b, c, c), or
        variances (b, c) if ``diagonal`` is true. The noise is that of the posterior.
        """
        likelihood: Any = posterior.likelihood
        if self.log_proba is not None:
            return likelihood.log_loss(self.log_proba(mean, cov), targets)
        targets = targets.double()
        if self.log_density is not None:
            return -self.log_density(mean, cov, targets)
        sigma = posterior.hyperparameters.sigma_noise
        return -likelihood.log_density(mean, cov, targets, sigma)


@dataclass(frozen=True)
class TuningProblem:
    """Posterior, data and the hyperparameters to choose.

    Attributes
    ----------
    posterior : GaussianPosterior
        Posterior at the network's weights, with initial hyperparameters.
    linear_model : LinearModel or None
        Model of the training outputs that is affine in the selected weights, for the
        last layer or the linearised network.
    validation : iterable of LinearisedBatch or None
        Held-out samples, which were not used to train the network.
    score : HeldOutScore
        Score on the held-out samples.
    free_prior, free_noise : bool
        Whether to choose the prior precision and the noise.
    refine : bool or "auto"
        Whether to refit the linear model under the prior. If "auto", the tuner decides.
    noise_on_held_out : bool
        Whether to choose the noise on held-out samples, if there are any, even if the
        prior maximises the evidence.
    learned : Tensor or None
        Prior precision learned while training the network, if any.
    seen_noise : Tensor or None
        Noise level () on the training samples, if there are no held-out samples.
    folds : tuple of TuningProblem
        One problem per fold, with a network trained without the fold, if there are no
        other held-out samples. Hyperparameters are scored on all folds together.
    """

    posterior: GaussianPosterior
    linear_model: LinearModel | None
    validation: Iterable[LinearisedBatch] | None
    score: HeldOutScore
    free_prior: bool
    free_noise: bool
    refine: bool | Literal["auto"]
    noise_on_held_out: bool = False
    learned: Tensor | None = None
    seen_noise: Tensor | None = None
    folds: tuple["TuningProblem", ...] = ()

    @property
    def parts(self) -> tuple["TuningProblem", ...]:
        """The folds, or only this problem if there are no folds."""
        return self.folds or (self,)

    @property
    def has_held_out(self) -> bool:
        """Whether all parts have held-out samples."""
        return all(part.validation is not None for part in self.parts)

    def with_fixed_prior(
        self, prior_precision: Tensor, *, refine: bool | Literal["auto"]
    ) -> "TuningProblem":
        """Return the problem and its folds with a fixed prior precision.

        The noise remains as free as it was.
        """
        return replace(
            self,
            posterior=self.posterior.replace(prior_precision=prior_precision),
            free_prior=False,
            refine=refine,
            folds=tuple(
                f.with_fixed_prior(prior_precision, refine=refine) for f in self.folds
            ),
        )

    @property
    def model(self) -> LinearModel:
        """The linear model; callers must ensure that it exists."""
        assert self.linear_model is not None  # otherwise, tuners do not refit
        return self.linear_model

    def held_out(self) -> Iterable[LinearisedBatch]:
        """Return the held-out samples; raise ValueError if there are none."""
        if self.validation is None:
            raise ValueError(
                "prior_precision='validation' needs held-out samples, but there are "
                "none. Pass X_val and y_val to fit, set train_split of the net, or use "
                "prior_precision='marglik'."
            )
        return self.validation

    def batches(self) -> Iterator[tuple["TuningProblem", list[LinearisedBatch]]]:
        """Yield pairs of a part and a list of its held-out batches.

        A part is the problem, or one of its folds. Callers compute one posterior
        precision per list and prior. With few weights, each list contains one batch, so
        that only its projection is in memory. With many weights, precisions take longer
        than passes, so the list contains all batches of the part, unless they are not
        in memory.
        """
        for part in self.parts:
            held_out = part.held_out()
            n_weights = part.posterior.layout.n_parameters
            if isinstance(held_out, list) and n_weights > MANY_WEIGHTS:
                yield part, held_out
            else:
                yield from ((part, [batch]) for batch in held_out)


def clamped(value: Tensor) -> Tensor:
    """Clamp δ, σ or σ² to bounds that keep their products finite."""
    return value.clamp(SMALLEST, LARGEST)
