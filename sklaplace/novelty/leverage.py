"""Leverage: a distance of last-layer features from the training samples.

Relative to a group k of n_k training samples with mean ``μ_k``, features ``φ`` have the
leverage

    h(φ) = 1/n_k + (φ - μ_k)ᵀ (W + ε)⁻¹ (φ - μ_k),      W = Σ (φₙ - μ)(φₙ - μ)ᵀ.

Consider a linear regression on ``φ`` and an indicator for each group. The leverage is
the variance of the regression's prediction, in units of the noise variance. With one
group, this is the usual leverage in a regression with an intercept. ``W`` is a sum over
samples and does not depend on the weights, the prior or the likelihood. The
leave-one-out leverage of a training sample has a closed form.

References: Zhdanov, Dereka and Kolesnikov (2023), "Identity curvature Laplace
approximation for improved out-of-distribution detection" (leverage as a score); Lee et
al. (2018), "A simple unified framework for detecting out-of-distribution samples and
adversarial attacks" (one Gaussian per class, with a common covariance); Weinberger et
al. (2009), "Feature hashing for large scale multitask learning" (`sketched`).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from sklaplace.core.linalg import gram
from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly

# Maximum number of features; more features are hashed.
MAX_FEATURES = 2048
# Largest squared distance, which is finite even if squares overflow in float32.
LARGEST_DISTANCE = 1e30
_SMALLEST = 1e-30
# Smallest ridge, as a fraction of the mean squared feature, for constant features.
_ROUNDING = 1e-12


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # otherwise, later gradients fail
def _hashing(i: int, most: int) -> tuple[Tensor, Tensor]:
    """Return a random but fixed order of ``i`` features, and random signs.

    Feature hashing writes the signed features in this order into rows of ``most``
    entries, and sums each column. Both results are therefore padded to a multiple of
    ``most`` entries. The padding repeats features with a sign of zero.
    """
    generator = torch.Generator().manual_seed(i)
    order = torch.randperm(i, generator=generator)
    signs = 2.0 * torch.randint(2, (i,), generator=generator) - 1
    n_padding = -i % most
    return torch.cat([order, order[:n_padding]]), pad(signs, (0, n_padding))


def sketched(features: Tensor, most: int = MAX_FEATURES) -> Tensor:
    """Return features (b, i), hashed to ``most`` columns if i exceeds ``most``.

    Inner products of hashed features are unbiased estimates of the original inner
    products.
    """
    i = features.shape[1]
    if i <= most:
        return features
    order, signs = (part.to(features.device) for part in _hashing(i, most))
    # the sum over rows of `most` entries; see `_hashing`
    signed = features[:, order].mul_(signs.to(features.dtype))
    return signed.unflatten(1, (-1, most)).sum(1)


@dataclass(frozen=True)
class FeatureMoments:
    """Order-independent sums over samples, float64.

    Attributes
    ----------
    counts : Tensor of shape (K,)
        Total weight of the samples in each group.
    sums : Tensor of shape (K, i)
        Weighted sum of the features in each group.
    squares : Tensor of shape (i, i)
        ``Σ φ φᵀ``.
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor

    @classmethod
    def of(
        cls, features: Tensor, groups: Tensor, weights: Tensor, n_groups: int
    ) -> "FeatureMoments":
        """Return the moments of samples (b, i) in groups (b,) with weights (b,)."""
        features, weights = features.double(), weights.double()
        if (weights == 1).all():  # three times as fast
            weighted, squares = features, gram(features)
        else:
            weighted = features * weights.unsqueeze(1)
            squares = features.T @ weighted
        sums = features.new_zeros(n_groups, features.shape[1])
        return cls(
            counts=weights.new_zeros(n_groups).index_add(0, groups, weights),
            sums=sums.index_add(0, groups, weighted),
            squares=squares,
        )

    def merged(self, other: "FeatureMoments") -> "FeatureMoments":
        """Return the moments of both sets of samples."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return FeatureMoments(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Leverage(FieldsOnly):
    """Leverages for several ridges, from sums over the training samples.

    Attributes
    ----------
    moments : FeatureMoments
        Sums over the training samples.
    ridges : tuple of float
        Values of ε, as fractions of the mean eigenvalue of ``W``.
    standardises : bool
        Whether to divide each feature by its standard deviation over all samples, so
        that its unit has no effect.
    """

    moments: FeatureMoments
    ridges: tuple[float, ...]
    standardises: bool = False

    @cached_property
    def means(self) -> Tensor:
        """Mean features (K, i) of the groups, or the overall mean for empty groups."""
        counts, sums = self.moments.counts, self.moments.sums
        means = sums / counts.clamp(min=_SMALLEST).unsqueeze(1)
        overall = sums.sum(0) / counts.sum()
        return torch.where(counts.unsqueeze(1) > 0, means, overall)

    @cached_property
    def whitenings(self) -> list[Tensor]:
        """``M`` (i, i) with ``M Mᵀ = (W + ε)⁻¹`` for each ridge, float64.

        Features are divided by `_scales` before the ridge is added. ``W`` is the
        scatter within groups.
        """
        roots = self.moments.counts.sqrt().unsqueeze(1)
        # Σ φ φᵀ - Σ n_k μ_k μ_kᵀ
        scatter = self.moments.squares - gram(self.means * roots)
        scales = self._scales()
        scatter = scatter / scales / scales.unsqueeze(1)
        # the ridge must exceed rounding errors, which are relative to the raw squares
        squares = self.moments.squares.diagonal() / scales**2
        smallest = _ROUNDING * squares.mean() + _SMALLEST
        identity, whitenings = torch.eye(len(scatter)).to(scatter), []
        for ridge in self.ridges:
            epsilon = (ridge * scatter.diagonal().mean()).maximum(smallest)
            root = torch.linalg.cholesky(scatter + epsilon * identity)
            inverse = torch.linalg.solve_triangular(root, identity, upper=False)
            # with the factor L and the scales S, M is S⁻¹ L⁻ᵀ
            whitenings.append((inverse / scales).mT)
        return whitenings

    @cached_property
    def _whitenings_by_dtype(self) -> dict[torch.dtype, list[Tensor]]:
        """Copies of `whitenings`, which `_distances` adds when it needs a dtype."""
        return {torch.float64: self.whitenings}

    def _scales(self) -> Tensor:
        """Return the standard deviation of each feature, (i,), or one.

        The value is one for constant features, and if features are not standardised.
        """
        squares, n = self.moments.squares.diagonal(), self.moments.counts.sum()
        variances = (squares - self.moments.sums.sum(0) ** 2 / n) / n
        is_divided = (variances > _ROUNDING * squares / n) & self.standardises
        return torch.where(is_divided, variances, 1.0).sqrt()

    def _distances(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return ``(φ - μ)ᵀ (W + ε)⁻¹ (φ - μ)`` for each ridge, (b, R), float64."""
        # products are computed in the dtype of the features, with cached matrices
        dtype, copies = features.dtype, self._whitenings_by_dtype
        if dtype not in copies:
            copies[dtype] = [whitening.to(dtype) for whitening in self.whitenings]
        deviations = features - self.means.to(dtype)[groups]
        norms = [(deviations @ m).square().sum(1).double() for m in copies[dtype]]
        return torch.stack(norms, 1).clamp(max=LARGEST_DISTANCE)

    def __call__(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return leverages (b, R) of new samples (b, i) in groups (b,), float64."""
        distances = self._distances(features, groups)
        return self.inverse_counts[groups].unsqueeze(1) + distances

    def whitened(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return ``ψ`` (b, i + 1), whose squared norm is the first ridge's leverage.

        The result is float64 and differentiable with respect to the features.
        """
        deviations = features.double() - self.means[groups]
        constant = self.inverse_counts[groups].sqrt()
        return torch.cat([deviations @ self.whitenings[0], constant.unsqueeze(1)], 1)

    @property
    def inverse_counts(self) -> Tensor:
        """``1/n_k`` (K,), or one for empty groups."""
        counts = self.moments.counts
        return torch.where(counts > 0, 1 / counts.clamp(min=_SMALLEST), 1.0)

    def leave_one_out(
        self, features: Tensor, groups: Tensor, weights: Tensor
    ) -> Tensor:
        """Return leave-one-out leverages (b, R) of training samples, for R ridges.

        The features (b, i) and weights (b,) are among the sums in ``moments``. If a
        weight exceeds one, only one unit of it is left out. The leverage of a sample
        that is alone in its group is infinite.

        Leaving a weight r out of a group of n multiplies the deviation d from the
        group's mean by ``f = n / (n - r)``, and subtracts ``r f d dᵀ`` from the scatter
        W within groups. By the Sherman-Morrison formula, the distance ``D = dᵀ W⁻¹ d``
        becomes ``f² D / (1 - r f D)``. The ridge is kept. Without a ridge, the result
        for r = 1 is ``h / (1 - h)``, with the leverage h of linear regression.
        """
        counts = self.moments.counts[groups].unsqueeze(1)  # n
        removed = weights.to(counts).clamp(max=1).unsqueeze(1)  # r
        factors = counts / (counts - removed).clamp(min=_SMALLEST)  # f
        distances = self._distances(features.double(), groups)  # D
        # positive, except for rounding errors
        remaining = (1 - removed * factors * distances).clamp(min=_ROUNDING)
        # 1/n becomes 1/(n - r), which is f/n
        leverages = factors / counts + factors**2 * distances / remaining
        is_alone = counts <= removed * (1 + _ROUNDING)
        return torch.where(is_alone, torch.inf, leverages)
