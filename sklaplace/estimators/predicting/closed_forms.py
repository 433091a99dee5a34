"""Closed forms of predictions, as functions of the features of a last Linear layer.

If the weights of the layer are uncertain, output means are linear in the features, and
output covariances are linear in products of two features. All quantities that depend
only on the posterior are computed in advance.

Everything else uses the links, the residual and the noise model of other predictions.
Three things differ, because `torch.export` follows no branches that depend on values,
and ONNX has neither matrix factorisations nor the logarithm of the normal distribution
function: `Link.exported`, `ExportedLeverage` and `log_upper_tail`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sklaplace.core.budget import require_bytes
from sklaplace.curvature.jacobian import Centring, head_jacobian
from sklaplace.curvature.layout import Head
from sklaplace.curvature.structures.base import Diagonalised
from sklaplace.estimators.targets.classes import normalised
from sklaplace.estimators.targets.label_types import TargetType
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.noise.interpolation import Interpolation
from sklaplace.noise.model import NoiseModel
from sklaplace.noise.residuals import Predictions
from sklaplace.novelty.batch import FeatureBatch, check_input_shape
from sklaplace.novelty.leverage import LARGEST_DISTANCE, Leverage
from sklaplace.novelty.residual import Residual
from sklaplace.novelty.scale import Scale
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
        one = torch.ones_like(features[:, :1])  # for the constant term
        if self.rotation is not None:
            # (b, i + 1), in the order of the coefficients
            squares = torch.cat([(features @ self.rotation) ** 2, one], 1)
            return (squares @ self.coefficients).unflatten(1, self.shape)
        rows = torch.cat([features, one], 1)
        # sums over one feature of a product, (b, i + 1, m), and then over the other
        sums = (rows @ self.coefficients).unflatten(1, (rows.shape[1], -1))
        return (sums * rows.unsqueeze(2)).sum(1).unflatten(1, self.shape)

    @classmethod
    def of(
        cls, posterior: GaussianPosterior, centring: Centring | None, *, diagonal: bool
    ) -> "QuadraticForm":
        """Return variances or covariances of the outputs as a function of features.

        The Jacobian of a last layer is affine in the features. It is evaluated at unit
        vectors and at zero. Differences to zero are the coefficients of the features,
        and the value at zero is the constant term. If the structure keeps Kronecker
        factors, different eigenvectors of the features are uncorrelated. The unit
        vectors of this basis then yield the coefficients of the squares.
        """
        layout, structure = posterior.layout, posterior.structure
        head, precision = cast(Head, layout.head), posterior.precision
        # numbers of outputs and of features
        c, i = len(head.offset), layout.blocks[0].factor_shape[1]
        shape = (c,) if diagonal else (c, c)
        n_products = i + 1 if structure.keeps_factors else (i + 1) ** 2
        require_bytes(
            16 * n_products * c ** len(shape),  # float64, and a copy
            "cpu",
            f"to_module for {c:,} outputs and {i:,} features",
            "use hessian_structure='kron', or a link_approx without covariances, such "
            "as 'probit'",
        )
        f = head.offset.new_zeros(i + 1, c).double()
        # unit vectors; the last row is zero, so that only the bias counts
        inputs = torch.eye(i + 1, i).to(f)
        if not structure.keeps_factors:
            rows = precision.whiten(head_jacobian(layout, head, inputs, f, centring))
            # whitened coefficients (i + 1, c, P), whose products are covariances
            rows = torch.cat([rows[:i] - rows[i:], rows[i:]])
            # a and b are coefficients, k and l outputs, and p weights
            products = "akp,bkp->abk" if diagonal else "akp,blp->abkl"
            return cls(None, torch.einsum(products, rows, rows).flatten(1), shape)
        # rotated unit vectors are the rows of the rotation
        jacobian = head_jacobian(layout, head, inputs, f, None)
        rotated = cast(Diagonalised, structure).rotate(jacobian)
        rotation = rotated.layers[0].first.inputs[:i, 0]
        # features that become unit vectors in the basis, and zero
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

    For ``|z|`` up to `_FAR`, ``Φ(x) = 1/2 + φ(x) Σ x^{2n+1} / (2n+1)!!`` is used, with
    the normal density φ, and Laplace's continued fraction beyond. Negative ``z`` follow
    from ``Φ(-z) = 1 - Φ(z)``.
    """
    size = z.abs()
    # both formulas are evaluated everywhere, because an export has no branches
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
class ExportedLeverage:
    """Leverages of new samples, by matrices that were computed in advance.

    Attributes
    ----------
    whitenings : list of Tensor of shape (i, i)
        See `Leverage.whitenings`; one for each of R ridges.
    means : Tensor of shape (K, i)
        Mean of each group.
    inverse_counts : Tensor of shape (K,)
        See `Leverage.inverse_counts`.
    """

    whitenings: list[Tensor]
    means: Tensor
    inverse_counts: Tensor

    def __call__(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return leverages (b, R) of samples (b, i) in groups (b,)."""
        deviations = features.double() - self.means[groups]
        norms = [(deviations @ m).square().sum(1) for m in self.whitenings]
        distances = torch.stack(norms, 1).clamp(max=LARGEST_DISTANCE)
        return self.inverse_counts[groups].unsqueeze(1) + distances

    @classmethod
    def of(cls, leverage: Leverage) -> "ExportedLeverage":
        """Compute the matrices of a leverage."""
        return cls(
            whitenings=leverage.whitenings,
            means=leverage.means,
            inverse_counts=leverage.inverse_counts,
        )


class ExportedScale(Scale):
    """Scale whose tails use operators that ONNX has."""

    def tails(self, z: Tensor) -> Tensor:
        """Return ``t`` (b,) of z-scores (b, q)."""
        return -log_upper_tail((z - self.mean) / self.std).sum(1)


@dataclass(frozen=True)
class ExportedDistance:
    """Leverages of features or inputs; see `Distance`."""

    name: str
    leverage: ExportedLeverage

    def logs(self, batch: FeatureBatch) -> Tensor:
        """Return the logarithms of the leverages for r ridges, (b, r)."""
        return self.leverage(getattr(batch, self.name), batch.groups).log()


@dataclass(frozen=True)
class ExportedNovelty:
    """Novelty of new samples, without the training samples.

    Attributes
    ----------
    likelihood : Likelihood
        Likelihood of the network.
    distances : list of ExportedDistance
        Distances of features and, if they are an array, of inputs.
    mean, std : Tensor of shape (q,)
        Moments of the quantities that the residual uses; see `Novelty.z_scores`.
    scale : ExportedScale
        Scale of the z-scores.
    input_shape : tuple of int
        Shape of a sample's inputs; see `FeatureBatch`.
    """

    likelihood: Likelihood
    distances: list[ExportedDistance]
    mean: Tensor
    std: Tensor
    scale: Scale
    input_shape: tuple[int, ...]

    def batch(self, features: Tensor, f: Tensor, x: object) -> FeatureBatch:
        """Return new samples; raise ValueError for inputs of another shape."""
        check_input_shape(x, self.input_shape)
        return FeatureBatch.of(self.likelihood, features, f, x)

    def log_ratios(self, batch: FeatureBatch) -> Tensor:
        """Return ``log p₀/p`` (b,), as `Novelty.log_ratios` does.

        ``p`` is the probability that a new sample is less similar to the training data,
        and ``p₀`` the share of samples that count as unusual.
        """
        logs = [distance.logs(batch) for distance in self.distances]
        # the quantities of `Novelty.z_scores`, in the same order
        terms = torch.cat([*logs, batch.logit_terms], 1)[:, : len(self.mean)]
        return self.scale.log_ratios((terms - self.mean) / self.std)


def exported_residual(residual: Residual) -> Residual:
    """Return a residual that depends on tensors alone, as buffers must.

    Its novelty needs no training samples: the matrices of the leverages, the moments of
    the first ``n_terms`` quantities and the scale are computed in advance. The numbers
    of the scale and the steepness, a power in the residual's variance, become tensors.
    """
    novelty: Any = residual.novelty
    n_terms, (mean, std) = novelty.n_residual_terms, novelty.moments_of_logs
    one = mean.new_ones(())  # a product with it is a tensor, which a buffer requires
    scale = ExportedScale(
        mean=novelty.scale.mean,
        std=novelty.scale.std,
        usual=novelty.scale.usual * one,
        excess=novelty.scale.excess * one,
    )
    distances = [
        ExportedDistance(distance.name, ExportedLeverage.of(distance.leverage))
        for distance in novelty.distances
    ]
    exported: Any = ExportedNovelty(
        likelihood=novelty.likelihood,
        distances=distances,
        mean=mean[:n_terms],
        std=std[:n_terms],
        scale=scale,
        input_shape=novelty.samples.input_shape,
    )
    steepness: Any = residual.steepness * one
    return replace(residual, novelty=exported, steepness=steepness)


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

    def __call__(self, predictions: Predictions, cov: Tensor) -> tuple[Tensor, ...]:
        """Return means and variances of logits, (b, K), and class probabilities.

        The probabilities have the shape (b, K), or that of the outputs for several
        labels. ``cov`` contains the covariances or variances that the link takes.
        """
        latent = self.target_type.latent_moments(
            self.likelihood, predictions.mean, predictions.variance
        )
        mean, cov = self.likelihood.class_logits(predictions.mean, cov)
        proba = normalised(self.link(mean, cov, self.points), self.n_classes)
        # each of several labels has two classes, and its second class is positive
        if not self.target_type.is_single:
            proba = proba[:, 1].reshape(predictions.mean.shape)
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

    def __call__(self, predictions: Predictions) -> Tensor:
        """Return both ends (b, c, 2), in the network's units.

        An end is the mean plus a score times the standard deviation of the targets. The
        noise model replaces the normal scores by quantiles of the standardised targets.
        """
        noise, scores = self.noise, self.scores
        if self.model is not None:
            relative, quantiles = self.model.distributions(predictions)
            noise = noise * relative
            ends = []
            for k, column in enumerate(self.model.columns):
                _, std = column.at_nodes.moments(quantiles[:, k])
                # quantiles are in another unit, in which targets have this deviation
                ends.append(self.at_ends[k](quantiles[:, k]) / std.unsqueeze(1))
            scores = torch.stack(ends, 1)
        std = (predictions.variance + noise**2).sqrt() * self.scaling
        return predictions.mean.unsqueeze(2) + std.unsqueeze(2) * scores


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

    def __call__(self, predictions: Predictions, _: Tensor) -> tuple[Tensor, ...]:
        """Return means and variances (b, c) and any interval, in the units of ``y``.

        The interval has the shape (b, c, 2), or (b, 2) without an axis for outputs. The
        second argument, covariances, is not used.
        """
        mean = self.shift + self.factor * predictions.mean
        moments = mean, predictions.variance * self.factor**2
        if self.interval is None:
            return moments
        ends = self.factor.unsqueeze(1) * self.interval(predictions)
        ends = self.shift.unsqueeze(1) + ends
        return *moments, ends if self.has_axis else ends.squeeze(1)
