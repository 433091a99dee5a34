"""TuningProblem: a posterior, the data and the hyperparameters to choose."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel

# More weights than this take longer than the held-out data, for each precision.
MANY_WEIGHTS = 2**22
# Bounds of δ and σ within which their products neither overflow nor underflow.
SMALLEST, LARGEST = math.exp(-100), math.exp(100)


@dataclass(frozen=True)
class LinearisedBatch:
    """One batch linearised: outputs (b, c), Jacobian, targets, sample weights (b,).

    ``keys`` (b,), of `row_hash`, are there for training data.
    """

    f: Tensor
    jacobian: Jacobian
    targets: Tensor
    weights: Tensor
    keys: Tensor | None = None


@dataclass(frozen=True)
class TuningProblem:
    """A posterior, the data and the hyperparameters to choose.

    Attributes
    ----------
    posterior : GaussianPosterior
        At the network's weights, with initial hyperparameters.
    linear_model : LinearModel or None
        Outputs on the training data as an affine function of the selected weights: of
        the last layer, or of the linearised network.
    validation : iterable of LinearisedBatch or None
        Held-out data, which the network was not trained on.
    log_proba : callable or None
        ``(mean (b, c), cov (b, c, c)) -> (b, K)`` log class probabilities; None
        for regression.
    free_prior, free_noise : bool
        Whether prior precision and noise are to be chosen.
    refine : bool or "auto"
        Whether the linear model is refitted under the prior; "auto" leaves this to
        the tuner.
    noise_on_held_out : bool
        Whether noise is chosen by held-out data where there are any, also with a prior
        that maximises the evidence.
    is_given : bool
        Whether the held-out data were given, rather than split off.
    diagonal : bool
        Whether ``log_proba`` takes variances (b, c) in place of covariances.
    is_cheap : bool
        Whether ``log_proba`` takes no longer than the variances.
    log_density : callable or None
        ``(mean (b, c), variance (b, c), targets) -> (b,)`` for regression with a
        likelihood that has no noise level to choose.
    learned : Tensor or None
        Prior precision that the network was trained under, where it was learned.
    seen_noise : Tensor or None
        Noise level () by the training data, where there are no other data.
    folds : tuple of TuningProblem
        Problems of networks that hold out a fold of the data each, where there is no
        other held-out data: hyperparameters are scored on all folds together.
    """

    posterior: GaussianPosterior
    linear_model: LinearModel | None
    validation: Iterable[LinearisedBatch] | None
    log_proba: Callable[[Tensor, Tensor], Tensor] | None
    free_prior: bool
    free_noise: bool
    refine: bool | Literal["auto"]
    noise_on_held_out: bool = False
    is_given: bool = False
    diagonal: bool = False
    is_cheap: bool = False
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    learned: Tensor | None = None
    seen_noise: Tensor | None = None
    folds: tuple["TuningProblem", ...] = ()

    @property
    def parts(self) -> tuple["TuningProblem", ...]:
        """Networks with the data that they hold out: the folds, or this one."""
        return self.folds or (self,)

    @property
    def has_held_out(self) -> bool:
        """Whether there are data that the networks were not trained on."""
        return all(part.validation is not None for part in self.parts)

    def under(self, prior_precision: Tensor, *, refine: bool) -> "TuningProblem":
        """The problem of the noise alone, under a prior precision."""
        return replace(
            self,
            posterior=self.posterior.replace(prior_precision=prior_precision),
            free_prior=False,
            refine=refine,
            folds=tuple(f.under(prior_precision, refine=refine) for f in self.folds),
        )

    @property
    def model(self) -> LinearModel:
        """The linear model, or an error that says what ``refine`` needs."""
        return require_linear_model(self.linear_model)

    def held_out(self) -> Iterable[LinearisedBatch]:
        """Held-out data, or an error that says how to provide some."""
        if self.validation is None:
            raise ValueError(
                "prior_precision='validation' needs rows that the network did not see, "
                "and there are none. Pass X_val and y_val to fit, give the network a "
                "train_split, or use prior_precision='marglik'."
            )
        return self.validation

    def batches(self) -> Iterator[tuple["TuningProblem", list[LinearisedBatch]]]:
        """Iterate over the held-out data of all parts, each list with its part.

        A list is one batch, or all batches of many weights that are in memory: their
        precision is computed once then.
        """
        for part in self.parts:
            held_out = part.held_out()
            n_weights = part.posterior.layout.n_parameters
            if isinstance(held_out, list) and n_weights > MANY_WEIGHTS:
                yield part, held_out
            else:
                yield from ((part, [batch]) for batch in held_out)


def require_linear_model(linear_model: LinearModel | None) -> LinearModel:
    """Return the linear model, or raise an error that says what ``refine`` needs."""
    if linear_model is None:
        raise ValueError(
            "refine=True needs outputs that are linear in the selected weights. Use "
            "subset_of_weights='last_layer' with a network that ends in a Linear "
            "layer, or refine=False."
        )
    return linear_model


def clamped(value: Tensor) -> Tensor:
    """δ, σ or σ², clamped to bounds within which their products stay finite."""
    return value.clamp(SMALLEST, LARGEST)
