"""Novelty: how unlike the training samples a sample is, by the last layer's features.

Some quantities are put on one scale: the leverage of the features among the training
samples of the class that the network predicts, under a small and a large ridge, and how
undecided the network is between the classes. The logarithm of each is compared with a
normal distribution with the moments of the training samples' logarithms; each training
sample is left out of its own leverage. The logarithms of the tail probabilities are
added up.

For regression there is one leverage, of all training samples, and for so many classes
that the mean features of each would take much memory.

References: Mukhoti, Kirsch, van Amersfoort, Torr and Gal (2023), "Deep deterministic
uncertainty: a new simple baseline" (a density of features next to the entropy of the
classes); Fisher (1932), "Statistical methods for research workers" (tail probabilities
combined by the sum of their logarithms); see `leverage` for others.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly
from sklaplace.core.trees import leaves
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
# share of the samples that are no farther away than is usual
USUAL = 0.99
# training samples whose leverages are compared with, at most
MAX_KEPT = 256
# standard deviation of logarithms, where all training samples agree
SMALLEST_STD = 1e-2
# Of inputs, whose columns may have different units; more than this are hashed.
INPUT_RIDGE, MAX_INPUTS = 1e-2, 256
# Numbers of the sums over features of each class, at most: 32 MiB, which are copied for
# each batch.
MAX_SUMS = 2**22
# of mean log-probabilities
_LARGEST = 1e6
_TINY = 1e-300


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> float:
    """Return the smallest value up to which there is a share of the weights."""
    values, order = values.sort()
    totals = weights[order].cumsum(0)
    index = torch.searchsorted(totals, share * totals[-1])
    return float(values[index.clamp(max=len(values) - 1)])


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
def _class_logits(
    likelihood: ClassificationLikelihood, f: Tensor, features: Tensor
) -> tuple[Tensor, int]:
    """Return logits (b, labels, K), and the number of groups.

    Features (b, i) are compared with the features of the predicted class alone, unless
    there are several labels or sums over each class take too much memory.
    """
    logits, _ = likelihood.class_logits(f, torch.zeros_like(f))
    logits = logits.reshape(len(f), -1, logits.shape[1])
    _, n_labels, n_classes = logits.shape
    n_numbers = n_classes * max(min(features.shape[1], MAX_FEATURES), MAX_INPUTS)
    return logits, n_classes if n_labels == 1 and n_numbers <= MAX_SUMS else 1


def _table(x: object) -> Tensor | None:
    """Return inputs that are rows of real numbers, None for others."""
    first, *others = leaves(x)
    is_table = isinstance(first, Tensor) and first.ndim == 2 and not others
    return first if is_table and first.is_floating_point() else None


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and what else their novelty depends on.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Features.
    groups : Tensor of shape (b,)
        The most probable class; zero where there is one group, see `_class_logits`.
    undecided : Tensor of shape (b, 1) or (b, 0)
        Mean log-probability of all classes, for classes.
    weights : Tensor of shape (b,)
        Weights, float64.
    keys : Tensor of shape (b,)
        Hashes of the samples' inputs.
    targets : Tensor of shape (b, c) or (b, 0)
        Targets, where they are numbers with a noise level.
    inputs : Tensor of shape (b, d) or (b, 0)
        Inputs of the network, where they are rows of real numbers.
    """

    features: Tensor
    groups: Tensor
    undecided: Tensor
    weights: Tensor
    keys: Tensor
    targets: Tensor
    inputs: Tensor

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        features: Tensor,
        f: Tensor,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
        x: object = None,
        targets: Tensor | None = None,
    ) -> "FeatureBatch":
        """Return a batch from features (b, i), outputs (b, c), inputs and targets."""
        groups = torch.zeros(len(f), dtype=torch.long, device=f.device)
        undecided = torch.zeros(len(f), 0, dtype=torch.float64, device=f.device)
        table = _table(x)
        inputs = features[:, :0] if table is None else sketched(table, MAX_INPUTS)
        if targets is None or not likelihood.has_noise:
            targets = undecided
        if isinstance(likelihood, ClassificationLikelihood):
            logits, n_groups = _class_logits(likelihood, f, features)
            if n_groups > 1:
                groups = logits[:, 0].argmax(1)
            log_proba = logits.mean(2) - logits.logsumexp(2)
            undecided = log_proba.mean(1, keepdim=True).double().clamp(min=-_LARGEST)
        weights = torch.ones_like(groups) if weights is None else weights
        keys = torch.zeros_like(groups) if keys is None else keys.to(groups)
        found = sketched(features), groups, undecided, weights.double(), keys
        return cls(*found, targets.double(), inputs)

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
class Distance:
    """Leverages of features or inputs, in units of what is usual.

    Attributes
    ----------
    name : {"features", "inputs"}
        Attribute of a `FeatureBatch`.
    leverage : Leverage
        Its leverages.
    usual : float
        Leverage that a share `USUAL` of the training samples do not exceed, each among
        the others. Samples alone in their group do not count.
    inflation : float
        See `Novelty`.
    """

    name: str
    leverage: Leverage
    usual: float
    inflation: float

    def compared(self, batch: FeatureBatch) -> Tensor:
        """Return leverages in units of ``usual``, (b,)."""
        return self.leverage(self._values(batch), batch.groups, 1)[:, 0] / self.usual

    def relative(self, batch: FeatureBatch) -> Tensor:
        """Return leverages in units of the larger one of held-out samples, (b,)."""
        return self.compared(batch) / self.inflation

    def whitened(self, batch: FeatureBatch) -> Tensor:
        """Return vectors whose squared norms are `relative`, (b, i + 1)."""
        found = self.leverage.whitened(self._values(batch), batch.groups)
        return found / (self.usual * self.inflation) ** 0.5

    def _values(self, batch: FeatureBatch) -> Tensor:
        """Return features or inputs; raises where they are not as in training."""
        values, n = getattr(batch, self.name), self.leverage.moments.sums.shape[1]
        if values.shape[1] != n:
            raise ValueError(
                f"X has other {self.name} than in fit, where they were {n} real "
                "numbers a row, so that their distance from the training samples is "
                "unknown. Give X as in fit, or use residual='none'."
            )
        return values


@dataclass(frozen=True)
class Novelty(FieldsOnly):
    """How unlike the training samples a sample is.

    Attributes
    ----------
    likelihood : Likelihood
        What outputs mean.
    moments : FeatureMoments
        Sums over the training samples.
    input_moments : FeatureMoments
        The same of inputs.
    samples : FeatureBatch
        Some of them, to compare with.
    inflation : tuple of float
        How many times larger the leverages of features and inputs are for samples that
        the network has not seen; one where there are none.
    """

    likelihood: Likelihood
    moments: FeatureMoments
    input_moments: FeatureMoments
    samples: FeatureBatch
    inflation: tuple[float, ...] = (1.0, 1.0)

    @classmethod
    def of(cls, likelihood: Likelihood, batch: FeatureBatch, c: int) -> "Novelty":
        """Return the novelty of a first batch, of a network with c outputs."""
        n_groups = 1
        if isinstance(likelihood, ClassificationLikelihood):
            zeros = batch.features.new_zeros(1, c)
            n_groups = _class_logits(likelihood, zeros, batch.features)[1]
        return cls.of_groups(likelihood, batch, n_groups)

    @classmethod
    def of_groups(
        cls, likelihood: Likelihood, batch: FeatureBatch, n_groups: int
    ) -> "Novelty":
        """Return the novelty of a batch of samples in groups."""
        of = batch.groups, batch.weights, n_groups
        parts = batch.features, batch.inputs
        features, inputs = (FeatureMoments.of(part, *of) for part in parts)
        return cls(likelihood, features, inputs, batch.kept())

    def added(self, batch: FeatureBatch) -> "Novelty":
        """Return the novelty after further training samples, whatever their order."""
        n_groups = len(self.moments.counts)
        return self.merged(self.of_groups(self.likelihood, batch, n_groups))

    def beside(self, inputs: Tensor) -> "Novelty":
        """Return the novelty, without inputs where others have another width.

        Such are no table, but sequences whose batches are padded.
        """
        if inputs.shape[1] == self.samples.inputs.shape[1]:
            return self
        samples = replace(self.samples, inputs=self.samples.inputs[:, :0])
        of = samples.groups, samples.weights, len(self.moments.counts)
        moments = FeatureMoments.of(samples.inputs, *of)
        return replace(self, input_moments=moments, samples=samples)

    def merged(self, other: "Novelty") -> "Novelty":
        """Return the novelty of the training samples of both."""
        own, others = self.samples.inputs, other.samples.inputs
        self, other = self.beside(others), other.beside(own)
        moments = self.moments.merged(other.moments)
        inputs = self.input_moments.merged(other.input_moments)
        samples = self.samples.joined(other.samples).kept()
        return replace(self, moments=moments, input_moments=inputs, samples=samples)

    @cached_property
    def leverage(self) -> Leverage:
        """Leverage of features among the training samples.

        The distance from the mean of all is no sign of novelty where there are classes
        around it: of one group there is only that with the small ridge.
        """
        n_groups = len(self.moments.counts)
        return Leverage(self.moments, RIDGES if n_groups > 1 else RIDGES[:1])

    @cached_property
    def distances(self) -> list["Distance"]:
        """Leverages of the features, and of the inputs where these are a table."""
        samples, groups = self.samples, self.samples.groups
        leverages = self.leverage, Leverage(self.input_moments, (INPUT_RIDGE,))
        found: list[Distance] = []
        for n, name in enumerate(("features", "inputs")):
            values = getattr(samples, name)
            if values.shape[1]:
                of = values, groups, 1, samples.weights
                left_out = leverages[n].left_out(*of)[:, 0]
                weights = samples.weights * left_out.isfinite()
                usual = weighted_quantile(left_out, weights, USUAL)
                if math.isfinite(usual):
                    inflation = self.inflation[len(found)]
                    found.append(Distance(name, leverages[n], usual, inflation))
        return found

    def inflated(self, compared: list[Tensor]) -> "Novelty":
        """Return the novelty after a look at samples that the network has not seen.

        A network has fitted its training samples, so that the leverages of others can
        be larger. ``compared`` are theirs, see `Distance.compared`, beside weights,
        (b, 2) or (b, 3); values of networks that are like this one will do.
        """
        n = len(self.distances) + 1 if compared else 0  # decompositions take time
        compared = [values for values in compared if values.shape[1] == n]
        if not compared:
            return self
        *columns, weights = torch.cat(compared).unbind(1)
        found = [max(1.0, weighted_quantile(v, weights, USUAL)) for v in columns]
        return replace(self, inflation=(*found, 1.0))

    def mean_leverage(self) -> Tensor:
        """Return the mean leverage of the features of training samples, ()."""
        samples = self.samples
        values = self.leverage(samples.features, samples.groups, 1)[:, 0]
        return samples.weights @ values / samples.weights.sum()

    @cached_property
    def target_variances(self) -> Tensor:
        """Variances of the targets of the training samples, (c,)."""
        weights = self.samples.weights / self.samples.weights.sum()
        targets = self.samples.targets
        return weights @ (targets - weights @ targets) ** 2

    @cached_property
    def tails(self) -> NormalTails:
        """Distributions of what is compared, for the training samples."""
        samples = self.samples
        of = samples.features, samples.groups, None, samples.weights
        left_out = self.leverage.left_out(*of)
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
