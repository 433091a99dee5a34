"""Closed forms of predictions, as functions of the features of a last Linear layer.

If the weights of the layer are uncertain, output means are linear in the features, and
output covariances are linear in products of two features. Because all quantities that
depend only on the posterior are computed in advance, the functions use only operators
that `torch.export` and ONNX support.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from sklaplace.core.budget import require_bytes
from sklaplace.curvature.jacobian import Centring, head_jacobian
from sklaplace.curvature.layout import Head
from sklaplace.curvature.structures.base import Diagonalised
from sklaplace.dirichlet.links import (
    mean_field,
    probit,
    probit_uncentred,
    sodpp,
    without_common_variance,
)
from sklaplace.dirichlet.logits import JITTER, MIN_VARIANCE, centre
from sklaplace.estimators.targets.label_types import TargetType
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.noise.interpolation import Interpolation
from sklaplace.noise.model import NoiseModel
from sklaplace.noise.residuals import Predictions
from sklaplace.novelty.amplitudes import Amplitudes
from sklaplace.novelty.batch import FeatureBatch, check_input_shape
from sklaplace.novelty.leverage import LARGEST_DISTANCE
from sklaplace.novelty.residual import (
    Residual,
    bounded_log_ratios,
    relative_variance,
)
from sklaplace.posterior.gaussian import GaussianPosterior

# Normal score beyond which a continued fraction replaces a series, and the number of
# terms of both, which then have an error below 1e-12.
_FAR, _N_TERMS = 3.0, 40


@dataclass(frozen=True)
class Affine:
    """Affine function of features (b, i) that returns values (b, c)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Return values (b, c)."""
        return features @ self.weight.mT + self.bias


@dataclass(frozen=True)
class QuadraticForm:
    """Function of features (b, i) that is linear in the products of two features.

    Attributes
    ----------
    rotation : Tensor of shape (i, i), or None
        Basis in which the function depends only on squares of features, or None if it
        depends on all products.
    coefficients : Tensor of shape (i + 1, m) or (i + 1, (i + 1) m)
        Coefficients of the squares, or of all products.
    shape : tuple of int
        Shape of the function's value for one sample, which contains m numbers.
    """

    rotation: Tensor | None
    coefficients: Tensor
    shape: tuple[int, ...]

    def __call__(self, features: Tensor) -> Tensor:
        """Return values (b, *shape)."""
        one = torch.ones_like(features[:, :1])
        if self.rotation is not None:
            squares = torch.cat([(features @ self.rotation) ** 2, one], 1)
            return (squares @ self.coefficients).unflatten(1, self.shape)
        rows = torch.cat([features, one], 1)
        sums = (rows @ self.coefficients).unflatten(1, (rows.shape[1], -1))
        return (sums * rows.unsqueeze(2)).sum(1).unflatten(1, self.shape)

    @classmethod
    def of(
        cls, posterior: GaussianPosterior, centring: Centring | None, *, diagonal: bool
    ) -> "QuadraticForm":
        """Return variances or covariances of the outputs as a function of features."""
        layout, structure = posterior.layout, posterior.structure
        head, precision = cast(Head, layout.head), posterior.precision
        c, i = len(head.offset), layout.blocks[0].factor_shape[1]
        shape = (c,) if diagonal else (c, c)
        n_products = i + 1 if structure.keeps_factors else (i + 1) ** 2
        require_bytes(
            16 * n_products * c ** len(shape),
            "cpu",
            f"to_module for {c:,} outputs and {i:,} features",
            "use hessian_structure='kron', or a link_approx without covariances, such "
            "as 'probit'",
        )
        f = head.offset.new_zeros(i + 1, c).double()
        # the last row of inputs is zero, so that only the bias counts
        inputs = torch.eye(i + 1, i).to(f)
        if not structure.keeps_factors:
            rows = precision.whiten(head_jacobian(layout, head, inputs, f, centring))
            rows = torch.cat([rows[:i] - rows[i:], rows[i:]])
            products = "akp,bkp->abk" if diagonal else "akp,blp->abkl"
            return cls(None, torch.einsum(products, rows, rows).flatten(1), shape)
        jacobian = head_jacobian(layout, head, inputs, f, None)
        rotated = cast(Diagonalised, structure).rotate(jacobian)
        rotation = rotated.layers[0].first.inputs[:i, 0]
        inputs = torch.cat([rotation.mT, inputs[i:]])
        jacobian = head_jacobian(layout, head, inputs, f, centring)
        covariances = precision.output_covariance(jacobian, diagonal=diagonal)
        covariances = covariances.flatten(1)
        return cls(
            rotation,
            torch.cat([covariances[:i] - covariances[i:], covariances[i:]]),
            shape,
        )


def log_upper_tail(z: Tensor) -> Tensor:
    """Return ``log Φ(-z)`` by operators that ONNX runtimes have in float64.

    Up to `_FAR`, the Taylor series of Φ is used, and then Laplace's continued fraction.
    """
    size = z.abs()
    near, far = size.clamp(max=_FAR), size.clamp(min=_FAR)
    series = term = near
    for n in range(1, _N_TERMS):
        term = term * near**2 / (2 * n + 1)
        series = series + term
    fraction = far
    for n in range(_N_TERMS, 0, -1):
        fraction = far + n / fraction
    log_near = (0.5 - series * _log_density(near).exp()).log()
    log_tail = torch.where(size > _FAR, _log_density(far) - fraction.log(), log_near)
    return torch.where(z < 0, (1 - log_tail.exp()).log(), log_tail)


def _log_density(z: Tensor) -> Tensor:
    """Return the logarithm of the standard normal density."""
    return -(z**2 + math.log(2 * math.pi)) / 2


@dataclass(frozen=True)
class LeverageForm:
    """Leverage for one ridge as a function.

    Attributes
    ----------
    whitening : Tensor of shape (i, i)
        See `Leverage.whitenings`.
    means : Tensor of shape (K, i)
        Mean of each group.
    inverse_counts : Tensor of shape (K,)
        See `Leverage.inverse_counts`.
    """

    whitening: Tensor
    means: Tensor
    inverse_counts: Tensor

    def __call__(self, values: Tensor, groups: Tensor) -> Tensor:
        """Return leverages (b,) of values (b, i) in groups (b,)."""
        whitened = (values.double() - self.means[groups]) @ self.whitening
        distances = whitened.square().sum(1).clamp(max=LARGEST_DISTANCE)
        return distances + self.inverse_counts[groups]


@dataclass(frozen=True)
class LogTail:
    """Minus the log tail probability of a leverage or of the indecision.

    Attributes
    ----------
    name : {"features", "inputs", "logit_terms"}
        Values whose leverage is computed, or ``"logit_terms"`` for the indecision.
    mean, std : Tensor of shape ()
        Moments of the logarithm of the leverage, or of the indecision.
    leverage : LeverageForm or None
        Leverage of these values; None for the indecision.
    """

    name: str
    mean: Tensor
    std: Tensor
    leverage: LeverageForm | None = None

    def __call__(self, batch: FeatureBatch) -> Tensor:
        """Return minus the logarithms (b,)."""
        values = getattr(batch, self.name)
        if self.leverage is None:
            logs = values[:, 0]
        else:
            logs = self.leverage(values, batch.groups).log()
        return -log_upper_tail((logs - self.mean) / self.std)


@dataclass(frozen=True)
class ResidualForm:
    """Residual of the outputs as a function of features and inputs.

    Attributes
    ----------
    tails : list of LogTail
        Terms of ``t``; see `Scale`.
    usual, excess, steepness : Tensor of shape ()
        ``t₀`` and β of `Scale`, and the steepness of the residual.
    amplitudes : Amplitudes
        Variances of the residual, for a relative variance of one.
    likelihood : Likelihood
        Likelihood of the network.
    input_shape : tuple of int
        Shape of a sample's inputs; see `FeatureBatch`.
    """

    tails: list[LogTail]
    usual: Tensor
    excess: Tensor
    steepness: Tensor
    amplitudes: Amplitudes
    likelihood: Likelihood
    input_shape: tuple[int, ...]

    def relative(self, features: Tensor, x: object, outputs: Tensor) -> Tensor:
        """Return the relative variances (b,).

        Raises ValueError if the inputs ``x`` have another shape than in training.
        """
        check_input_shape(x, self.input_shape)
        batch = FeatureBatch.of(self.likelihood, features, outputs, x)
        t = sum(tail(batch) for tail in self.tails)
        log_ratios = (t - self.usual) / self.excess
        return relative_variance(
            bounded_log_ratios(log_ratios, self.likelihood, outputs, self.steepness),
            self.steepness,
        )

    @classmethod
    def of(cls, residual: Residual) -> "ResidualForm":
        """Return the residual as a function."""
        novelty = residual.novelty
        tails: list[LogTail] = []
        scale = novelty.scale
        all_moments = zip(*novelty.moments_of_logs, scale.mean, scale.std, strict=False)
        moments = ((a + b * mean, b * std) for a, b, mean, std in all_moments)
        for distance in novelty.distances:
            leverage = distance.leverage
            for whitening in leverage.whitenings:
                form = LeverageForm(
                    whitening=whitening,
                    means=leverage.means,
                    inverse_counts=leverage.inverse_counts,
                )
                tails.append(LogTail(distance.name, *next(moments), form))
        tails += [LogTail("logit_terms", *rest) for rest in moments]
        one = scale.mean.new_ones(())
        return cls(
            tails=tails,
            usual=scale.usual * one,
            excess=scale.excess * one,
            steepness=residual.steepness * one,
            amplitudes=residual.amplitudes,
            likelihood=novelty.likelihood,
            input_shape=novelty.samples.input_shape,
        )


@dataclass(frozen=True)
class Classes:
    """Predictions of class labels.

    Attributes
    ----------
    likelihood : ClassificationLikelihood
        Likelihood of the classes.
    link : callable
        Function of the means and covariances of logits, and of standard-normal points;
        see `Link`.
    points : Tensor of shape (s, K)
        Standard-normal points for the link.
    target_type : TargetType
        Kind of targets.
    n_classes : int
        Number K of classes passed to ``fit``.
    """

    likelihood: ClassificationLikelihood
    link: Callable[[Tensor, Tensor, Tensor], Tensor]
    points: Tensor
    target_type: TargetType
    n_classes: int

    def __call__(self, given: Predictions, cov: Tensor) -> tuple[Tensor, ...]:
        """Return the moments of the logits, (b, K), and the class probabilities."""
        moments = given.mean, given.variance
        latent = self.target_type.latent_moments(self.likelihood, *moments)
        logits = self.likelihood.class_logits(given.mean, cov)
        proba = self.link(*logits, self.points)[:, : self.n_classes]
        proba = proba / proba.sum(1, keepdim=True)
        if not self.target_type.is_single:
            proba = proba[:, 1].reshape(given.mean.shape)
        return *latent, proba


@dataclass(frozen=True)
class Interval:
    """Prediction interval of normal targets, or of targets with a noise model.

    Attributes
    ----------
    noise : Tensor of shape (c,)
        Constant noise, in the network's units.
    scores : Tensor of shape (2,)
        Normal scores of both ends.
    scaling : Tensor of shape (c,)
        Factors for the standard deviations.
    model : NoiseModel or None
        Model of the noise, relative to the constant noise.
    at_ends : list of Interpolation
        Ends of the interval under the noise model, for each column.
    """

    noise: Tensor
    scores: Tensor
    scaling: Tensor
    model: NoiseModel | None
    at_ends: list[Interpolation]

    def __call__(self, given: Predictions) -> Tensor:
        """Return both ends (b, c, 2), in the network's units."""
        noise, scores = self.noise, self.scores
        if self.model is not None:
            relative, rows = self.model.distributions(given)
            noise = noise * relative
            columns = zip(self.at_ends, self.model.columns, rows.unbind(1), strict=True)
            ends = [
                at(own) / column.at_nodes.moments(own)[1].unsqueeze(1)
                for at, column, own in columns
            ]
            scores = torch.stack(ends, 1)
        std = (given.variance + noise**2).sqrt() * self.scaling
        return given.mean.unsqueeze(2) + std.unsqueeze(2) * scores


@dataclass(frozen=True)
class Numbers:
    """Predictions of numbers.

    Attributes
    ----------
    shift, factor : Tensor of shape (c,)
        Origin and unit of the network's outputs.
    interval : Interval or None
        Interval to predict.
    has_axis : bool
        Whether intervals have an axis for the outputs.
    """

    shift: Tensor
    factor: Tensor
    interval: Interval | None
    has_axis: bool

    def __call__(self, given: Predictions, _: Tensor) -> tuple[Tensor, ...]:
        """Return moments of outputs (b, c) and the interval, in the units of ``y``."""
        mean = self.shift + self.factor * given.mean
        moments = mean, given.variance * self.factor**2
        if self.interval is None:
            return moments
        ends = self.shift.unsqueeze(1) + self.factor.unsqueeze(1) * self.interval(given)
        return *moments, ends if self.has_axis else ends.squeeze(1)


def _sampled(mean: Tensor, cov: Tensor, points: Tensor) -> Tensor:
    """Return the probabilities of `links.mc`, by an unrolled Cholesky factorisation."""
    mean, cov = without_common_variance(mean, cov, len(points))
    mean, cov = centre(mean, cov)
    k = cov.shape[-1] - 1
    jitter = JITTER * cov.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=MIN_VARIANCE)
    rest = cov[:, :k, :k] + jitter.view(-1, 1, 1) * torch.eye(k).to(cov)
    columns: list[Tensor] = []
    for j in range(k):
        column = rest[:, j:, j] / rest[:, j : j + 1, j].clamp(min=MIN_VARIANCE).sqrt()
        columns.append(functional.pad(column, (j, 0)))
        rest = rest - columns[-1].unsqueeze(2) * columns[-1].unsqueeze(1)
    factor = torch.stack(columns, -1)
    factor = torch.cat([factor, -factor.sum(1, keepdim=True)], 1)
    draws = factor @ points[:, :k].mT + mean.unsqueeze(-1)
    return draws.softmax(1).mean(-1)


# link -> closed form, a function of means, covariances and points
CLOSED_LINKS: dict[str, Any] = {
    "probit": probit,
    "mean_field": mean_field,
    "mc": _sampled,
    "probit_uncentred": probit_uncentred,
    "sodpp": sodpp,
}
