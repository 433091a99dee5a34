"""Novelty: how unlike the training samples a sample is, by the last layer's features.

Some quantities are put on one scale: the leverage of the features among the training
samples of the class that the network predicts, under a small and a large ridge, and how
undecided the network is between the classes. The logarithm of each is compared with a
normal distribution that has the moments of those of the training samples, each of which
is left out of its own leverage. The logarithms of the tail probabilities are added up.

For regression there is one leverage, of all training samples, and for so many classes
that the mean features of each would take much memory.

References: Mukhoti, Kirsch, van Amersfoort, Torr and Gal (2023), "Deep deterministic
uncertainty: a new simple baseline" (a density of features next to the entropy of the
classes); Fisher (1932), "Statistical methods for research workers" (tail probabilities
combined by the sum of their logarithms); see `leverage` for others.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sklaplace.core.lazy import cached_property
from sklaplace.core.persistence import FieldsOnly
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.posterior.leverage import (
    MAX_FEATURES,
    FeatureMoments,
    Leverage,
    sketched,
)

# ε as fractions of the mean eigenvalue of W. Under the first, directions in which
# features hardly vary count; under the second, the distance to the group's mean.
RIDGES = 1e-3, 1.0
# training samples whose leverages are compared with, at most
MAX_KEPT = 256
# standard deviation of logarithms, where all training samples agree
SMALLEST_STD = 1e-2
# Numbers of the sums over features of each class, at most: 32 MiB, which are copied for
# each batch.
MAX_SUMS = 2**22
# of mean log-probabilities
_LARGEST = 1e6
_TINY = 1e-300


# ---------------------------------------------------------------------------- tails
@dataclass(frozen=True)
class NormalTails:
    """Normal distributions of some quantities of the training samples.

    Attributes
    ----------
    mean, std : Tensor of shape (q,)
        Their moments.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> "NormalTails":
        """Return tails of values (b, q) with weights (b,), without infinite ones."""
        is_finite = values.isfinite()
        shares = torch.where(is_finite, weights.unsqueeze(1), 0.0)
        shares = shares / shares.sum(0).clamp(min=_TINY)
        values = torch.where(is_finite, values, 0.0)
        mean = (shares * values).sum(0)
        std = (shares * (values - mean) ** 2).sum(0).sqrt()
        return cls(mean, std.clamp(min=SMALLEST_STD))

    def log_survival(self, values: Tensor) -> Tensor:
        """Return logarithms of the probabilities of larger values, (b, q)."""
        return torch.special.log_ndtr((self.mean - values) / self.std)


# -------------------------------------------------------------------------- samples
def _has_groups(n_classes: int, features: Tensor) -> bool:
    """Whether features (b, i) are compared with those of the predicted class alone."""
    return n_classes * min(features.shape[1], MAX_FEATURES) <= MAX_SUMS


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and what else their novelty depends on.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Features.
    groups : Tensor of shape (b,)
        The most probable class; zero where there is one group, see `_has_groups`.
    undecided : Tensor of shape (b, 1) or (b, 0)
        Mean log-probability of all classes, for classes.
    weights : Tensor of shape (b,)
        Weights, float64.
    keys : Tensor of shape (b,)
        Hashes of the samples' inputs.
    """

    features: Tensor
    groups: Tensor
    undecided: Tensor
    weights: Tensor
    keys: Tensor

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        features: Tensor,
        f: Tensor,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> "FeatureBatch":
        """Return a batch from features (b, i) and outputs (b, c)."""
        groups = torch.zeros(len(f), dtype=torch.long, device=f.device)
        undecided = torch.zeros(len(f), 0, dtype=torch.float64, device=f.device)
        if isinstance(likelihood, ClassificationLikelihood):
            logits, _ = likelihood.class_logits(f, torch.zeros_like(f))
            by_label = logits.reshape(len(f), -1, logits.shape[1])
            if by_label.shape[1] == 1 and _has_groups(logits.shape[1], features):
                groups = logits.argmax(1)
            log_proba = by_label.mean(2) - by_label.logsumexp(2)
            undecided = log_proba.mean(1, keepdim=True).double().clamp(min=-_LARGEST)
        weights = torch.ones_like(groups) if weights is None else weights
        keys = torch.zeros_like(groups) if keys is None else keys.to(groups)
        return cls(sketched(features), groups, undecided, weights.double(), keys)

    def joined(self, other: "FeatureBatch") -> "FeatureBatch":
        """Return the samples of both."""
        names = [field.name for field in fields(self)]
        parts = ([getattr(part, name) for part in (self, other)] for name in names)
        return FeatureBatch(*map(torch.cat, parts))

    def kept(self) -> "FeatureBatch":
        """Return the samples with the smallest hashes; equal ones are one, counted."""
        if len(self.keys) <= MAX_KEPT:
            return self
        found, places = self.keys.unique(return_inverse=True)
        order = torch.arange(len(places), device=places.device)
        first = torch.full_like(found, len(places))
        first = first.scatter_reduce(0, places, order, "amin")[:MAX_KEPT]
        totals = self.weights.new_zeros(len(found)).index_add(0, places, self.weights)
        taken = {f.name: getattr(self, f.name)[first] for f in fields(self)}
        return FeatureBatch(**(taken | {"weights": totals[:MAX_KEPT]}))


# -------------------------------------------------------------------------- novelty
@dataclass(frozen=True)
class Novelty(FieldsOnly):
    """How unlike the training samples a sample is.

    Attributes
    ----------
    likelihood : Likelihood
        What outputs mean.
    moments : FeatureMoments
        Sums over the training samples.
    samples : FeatureBatch
        Some of them, to compare with.
    """

    likelihood: Likelihood
    moments: FeatureMoments
    samples: FeatureBatch

    @classmethod
    def of(cls, likelihood: Likelihood, batch: FeatureBatch, c: int) -> "Novelty":
        """Return the novelty of a first batch, of a network with c outputs."""
        n_groups = 1
        if isinstance(likelihood, ClassificationLikelihood):
            zeros = batch.features.new_zeros(1, c)
            n_labels, n_classes = likelihood.class_logits(zeros, zeros)[0].shape
            if n_labels == 1 and _has_groups(n_classes, batch.features):
                n_groups = n_classes
        moments = FeatureMoments.empty(n_groups, batch.features)
        moments = moments.added(batch.features, batch.groups, batch.weights)
        return cls(likelihood, moments, batch.kept())

    def added(self, batch: FeatureBatch) -> "Novelty":
        """Return the novelty after further training samples, whatever their order."""
        moments = self.moments.added(batch.features, batch.groups, batch.weights)
        samples = self.samples.joined(batch).kept()
        return replace(self, moments=moments, samples=samples)

    def merged(self, other: "Novelty") -> "Novelty":
        """Return the novelty of the training samples of both."""
        moments = self.moments.merged(other.moments)
        samples = self.samples.joined(other.samples).kept()
        return replace(self, moments=moments, samples=samples)

    @cached_property
    def leverage(self) -> Leverage:
        """Leverage of features among the training samples.

        The distance from the mean of all is no sign of novelty where there are classes
        around it: of one group there is only that with the small ridge.
        """
        n_groups = len(self.moments.counts)
        return Leverage(self.moments, RIDGES if n_groups > 1 else RIDGES[:1])

    @cached_property
    def tails(self) -> NormalTails:
        """Distributions of what is compared, for the training samples."""
        samples = self.samples
        left_out = self.leverage.left_out(samples.features, samples.groups)
        values = torch.cat([left_out.log(), samples.undecided], 1)
        return NormalTails.of(values, samples.weights)

    def log_tail_probability(self, features: Tensor, f: Tensor) -> Tensor:
        """Return scores (b,) of features (b, i) and outputs (b, c), float64.

        Sums of logarithms of tail probabilities: the higher, the more like the training
        samples.
        """
        batch = FeatureBatch.of(self.likelihood, features, f)
        leverages = self.leverage(batch.features, batch.groups)
        values = torch.cat([leverages.log(), batch.undecided], 1)
        return self.tails.log_survival(values).sum(1)
