"""TuningProblem: a posterior, the data and the hyperparameters to choose."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel

# With more weights than this, a posterior precision takes longer to compute than a pass
# over the held-out data.
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
    """Score of held-out data.

    Attributes
    ----------
    log_proba : callable or None
        ``(mean (b, c), cov (b, c, c)) -> (b, K)`` log class probabilities; None
        for regression.
    log_density : callable or None
        ``(mean (b, c), variance (b, c), targets) -> (b,)`` for regression with a
        likelihood that has no noise level to choose.
    diagonal : bool
        Whether ``log_proba`` takes variances (b, c) instead of covariances.
    is_given : bool
        Whether the held-out data were passed by the user, not split off.
    is_cheap : bool
        Whether ``log_proba`` takes no longer than computing the variances.
    is_centred : bool
        Whether to subtract the mean of the outputs, which a softmax ignores.
    leverages : list of Tensor
        Leverages and weights of the scored samples; see `Novelty.inflated`. Each pass
        over the samples appends to the list.
    """

    log_proba: Callable[[Tensor, Tensor], Tensor] | None = None
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    diagonal: bool = True
    is_given: bool = False
    is_cheap: bool = False
    is_centred: bool = True
    leverages: list[Tensor] = field(default_factory=list)


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
        Held-out data, not used to train the network.
    score : HeldOutScore
        Score of the held-out data.
    free_prior, free_noise : bool
        Whether to choose the prior precision and the noise.
    refine : bool or "auto"
        Whether to refit the linear model under the prior; "auto" leaves the choice to
        the tuner.
    noise_on_held_out : bool
        Whether to choose the noise on held-out data, if there are any, even with a
        prior that maximises the evidence.
    learned : Tensor or None
        Prior precision learned while the network was trained, if any.
    seen_noise : Tensor or None
        Noise level () from the training data, if there are no held-out data.
    folds : tuple of TuningProblem
        One problem per network trained without a fold of the data, if there are no
        other held-out data. Hyperparameters are scored on all folds together.
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
        """Problems with held-out data: the folds, or this problem without folds."""
        return self.folds or (self,)

    @property
    def has_held_out(self) -> bool:
        """Whether all parts have held-out data."""
        return all(part.validation is not None for part in self.parts)

    def under(self, prior_precision: Tensor, *, refine: bool) -> "TuningProblem":
        """Return the problem with a fixed prior precision, to choose only the noise."""
        return replace(
            self,
            posterior=self.posterior.replace(prior_precision=prior_precision),
            free_prior=False,
            refine=refine,
            folds=tuple(f.under(prior_precision, refine=refine) for f in self.folds),
        )

    @property
    def model(self) -> LinearModel:
        """The linear model; raises ValueError if there is none."""
        assert self.linear_model is not None  # tuners refit only where there is one
        return self.linear_model

    def held_out(self) -> Iterable[LinearisedBatch]:
        """Return the held-out data; raise ValueError if there are none."""
        if self.validation is None:
            raise ValueError(
                "prior_precision='validation' needs rows that the network did not see, "
                "and there are none. Pass X_val and y_val to fit, give the network a "
                "train_split, or use prior_precision='marglik'."
            )
        return self.validation

    def batches(self) -> Iterator[tuple["TuningProblem", list[LinearisedBatch]]]:
        """Yield pairs of a part and a list of its held-out batches.

        A list has one batch, or all batches if there are many weights and the batches
        are in memory. The precision is then computed once.
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
