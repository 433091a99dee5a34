"""Leverage: how far features of the last layer are from those of training samples.

The leverage of features ``φ`` in a group k of n_k training samples with mean ``μ_k``,

    h(φ) = 1/n_k + (φ - μ_k)ᵀ (W + ε)⁻¹ (φ - μ_k),      W = Σ (φₙ - μ)(φₙ - μ)ᵀ,

is that of a linear regression on ``φ`` and an indicator of each group: the variance of
its prediction, in units of the noise. With one group it is the usual leverage with a
constant. ``W`` is a sum over samples and depends neither on weights, prior nor
likelihood. The leverage of a training sample among the others has a closed form.

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

from sklaplace.core.lazy import cached_property
from sklaplace.core.linalg import gram, symmetric_eigh
from sklaplace.core.persistence import FieldsOnly

# more features than this are hashed
MAX_FEATURES = 2048
# of distances, for features that float32 cannot square
_LARGEST = 1e30
_SMALLEST = 1e-30
# ridge as a fraction of the mean square of the features, where these are constant
_ROUNDING = 1e-12


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # else no gradients can be taken later
def _hashing(i: int) -> tuple[Tensor, Tensor]:
    """Return the place and the sign of each of ``i`` features; always the same."""
    generator = torch.Generator().manual_seed(i)
    places = torch.randint(MAX_FEATURES, (i,), generator=generator)
    signs = 2 * torch.randint(2, (i,), generator=generator) - 1
    return places, signs


def sketched(features: Tensor) -> Tensor:
    """Return features (b, i), or where there are too many, sums of some of them.

    Products of samples are unbiased estimates of those of all features.
    """
    i = features.shape[1]
    if i <= MAX_FEATURES:
        return features
    places, signs = (part.to(features.device) for part in _hashing(i))
    found = features.new_zeros(len(features), MAX_FEATURES)
    return found.index_add_(1, places, features * signs)


@dataclass(frozen=True)
class FeatureMoments:
    """Sums over samples, which are added up in any order; float64.

    Attributes
    ----------
    counts : Tensor of shape (K,)
        Weight of the samples in each group.
    sums : Tensor of shape (K, i)
        Features of each group.
    squares : Tensor of shape (i, i)
        ``Σ φ φᵀ``.
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, n_groups: int, like: Tensor) -> "FeatureMoments":
        """Return the moments of no samples, for features like some (b, i)."""
        i = like.shape[1]
        zeros = like.new_zeros(n_groups, i + 1, dtype=torch.float64)
        squares = zeros.new_zeros(i, i)
        return cls(zeros[:, 0].clone(), zeros[:, 1:].clone(), squares)

    def added(
        self, features: Tensor, groups: Tensor, weights: Tensor
    ) -> "FeatureMoments":
        """Return moments with samples (b, i) of groups and weights (b,)."""
        features, weights = features.double(), weights.double()
        if (weights == 1).all():  # a third of the time
            weighted, squares = features, gram(features)
        else:
            weighted = features * weights.unsqueeze(1)
            squares = features.T @ weighted
        return FeatureMoments(
            self.counts.index_add(0, groups, weights),
            self.sums.index_add(0, groups, weighted),
            self.squares + squares,
        )

    def merged(self, other: "FeatureMoments") -> "FeatureMoments":
        """Return moments of the samples of both."""
        return FeatureMoments(
            self.counts + other.counts,
            self.sums + other.sums,
            self.squares + other.squares,
        )


@dataclass(frozen=True)
class Leverage(FieldsOnly):
    """Leverages under each ridge, from sums over the training samples.

    Attributes
    ----------
    moments : FeatureMoments
        Sums over the training samples.
    ridges : tuple of float
        ε as fractions of the mean eigenvalue of ``W``.
    """

    moments: FeatureMoments
    ridges: tuple[float, ...]

    @cached_property
    def means(self) -> Tensor:
        """Mean features of each group, (K, i); of all where a group is empty."""
        counts, sums = self.moments.counts, self.moments.sums
        means = sums / counts.clamp(min=_SMALLEST).unsqueeze(1)
        overall = sums.sum(0) / counts.sum()
        return torch.where(counts.unsqueeze(1) > 0, means, overall)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors (i, i) of ``W``, and ``1/(λ + ε)`` for each ridge, (i, R)."""
        roots = self.moments.counts.sqrt().unsqueeze(1)
        scatter = self.moments.squares - gram(self.means * roots)
        values, vectors = symmetric_eigh(scatter)
        ridges = values.new_tensor(self.ridges) * values.mean()
        smallest = _ROUNDING * self.moments.squares.diagonal().mean() + _SMALLEST
        return vectors, 1 / (values.unsqueeze(1) + ridges.clamp(min=smallest))

    @cached_property
    def _rotations(self) -> dict[torch.dtype, list[Tensor]]:
        return {}

    def _rotated(self, dtype: torch.dtype) -> list[Tensor]:
        """Return eigenvectors, means in their basis, and scales, in a dtype."""
        if dtype not in self._rotations:
            vectors, scales = self._spectrum
            parts = vectors, self.means @ vectors, scales
            self._rotations[dtype] = [part.to(dtype) for part in parts]
        return self._rotations[dtype]

    def _distances(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return ``(φ - μ)ᵀ (W + ε)⁻¹ (φ - μ)`` under each ridge, (b, R), float64."""
        vectors, means, scales = self._rotated(features.dtype)
        distances = (features @ vectors - means[groups]).square() @ scales
        return distances.double().clamp(max=_LARGEST)

    def __call__(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return leverages (b, R) of new samples (b, i) in groups (b,), float64."""
        counts = self.moments.counts[groups].unsqueeze(1)
        inverse = torch.where(counts > 0, 1 / counts.clamp(min=_SMALLEST), 1.0)
        return inverse + self._distances(features, groups)

    def left_out(self, features: Tensor, groups: Tensor) -> Tensor:
        """Return leverages (b, R) of training samples, each among the others.

        By Sherman and Morrison's formula; ``h / (1 - h)`` without a ridge, and exact
        with one that stays the same. Of one count of a sample that counts more; of
        samples alone in their group infinite.
        """
        counts = self.moments.counts[groups].unsqueeze(1)
        factors = counts / (counts - 1).clamp(min=_SMALLEST)
        distances = self._distances(features.double(), groups)
        remaining = (1 - factors * distances).clamp(min=_ROUNDING)
        found = factors / counts + factors**2 * distances / remaining
        return torch.where(counts > 1, found, torch.inf)
