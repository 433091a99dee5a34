"""Novelty: dissimilarity of a sample to the training data, from last-layer features.

The score combines three quantities: the leverages of the features for a small and for a
large ridge, and the network's indecision between the classes. The leverages are
relative to the training samples of the predicted class. A normal distribution is fitted
to the logarithm of each quantity on the training samples, with leave-one-out leverages.
The score is the sum of the logarithms of the tail probabilities.

In regression, there is a single leverage, relative to all training samples.
Classification also uses a single leverage if the mean features of all classes take up
too much memory.

References: Mukhoti, Kirsch, van Amersfoort, Torr and Gal (2023), "Deep deterministic
uncertainty: a new simple baseline" (feature density and entropy of the classes); Fisher
(1932), "Statistical methods for research workers" (sum of the logarithms of tail
probabilities). `leverage` lists more references.
"""

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

# Ridges ε as fractions of the mean eigenvalue of W. The small ridge detects deviations
# in directions where features hardly vary; the large ridge measures the distance to the
# group's mean.
RIDGES = 1e-3, 1.0
# Fraction of the samples whose leverages count as usual, for classes and for numbers.
# In regression, a residual near the data would widen all intervals.
USUAL_CLASSES, USUAL_NUMBERS = 0.95, 0.99
# Number of samples that the expected mean excess of `Scale` counts for.
PRIOR_COUNT = 30
# Maximum number of training samples kept for comparison.
MAX_KEPT = 256
# Smallest standard deviation of the logarithms, for identical training samples.
SMALLEST_STD = 1e-2
# Ridge for inputs, whose columns may have different units, and the maximum number of
# columns. Inputs with more columns are hashed.
INPUT_RIDGE, MAX_INPUTS = 1e-2, 256
# Maximum number of feature sums of all classes. These 32 MiB are copied for each batch.
MAX_SUMS = 2**22
# Largest magnitude of mean log-probabilities.
_LARGEST = 1e6
_TINY = 1e-300


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> float:
    """Return the weighted quantile of the values at the level ``share``."""
    values, order = values.sort()
    totals = weights[order].cumsum(0)
    index = torch.searchsorted(totals, share * totals[-1])
    return float(values[index.clamp(max=len(values) - 1)])


def finite_moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations (q,) of the finite values (b, q).

    The weights have shape (b,).
    """
    is_finite = values.isfinite()
    shares = torch.where(is_finite, weights.unsqueeze(1), 0.0)
    shares = shares / shares.sum(0).clamp(min=_TINY)
    values = torch.where(is_finite, values, 0.0)
    mean = (shares * values).sum(0)
    std = (shares * (values - mean) ** 2).sum(0).sqrt()
    return mean, std.clamp(min=SMALLEST_STD)


# -------------------------------------------------------------------------- samples
def _class_logits(
    likelihood: ClassificationLikelihood, f: Tensor, features: Tensor
) -> tuple[Tensor, int]:
    """Return the logits (b, labels, K) and the number of groups.

    Each class is a group, and features (b, i) are compared with the predicted class.
    There is a single group if there are several labels or if the feature sums of all
    classes take up too much memory.
    """
    logits, _ = likelihood.class_logits(f, torch.zeros_like(f))
    logits = logits.reshape(len(f), -1, logits.shape[1])
    _, n_labels, n_classes = logits.shape
    n_numbers = n_classes * max(min(features.shape[1], MAX_FEATURES), MAX_INPUTS)
    return logits, n_classes if n_labels == 1 and n_numbers <= MAX_SUMS else 1


def indecision(logits: Tensor) -> Tensor:
    """Return mean log-probabilities over all classes, (b, 1), for (b, labels, K)."""
    log_proba = logits.mean(2) - logits.logsumexp(2)
    return log_proba.mean(1, keepdim=True).double().clamp(min=-_LARGEST)


def _table(x: object) -> Tensor | None:
    """Return the inputs if they are rows of real numbers, otherwise None."""
    first, *others = leaves(x)
    is_table = isinstance(first, Tensor) and first.ndim == 2 and not others
    return first if is_table and first.is_floating_point() else None


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and other values that determine the samples' novelty.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Last-layer features.
    groups : Tensor of shape (b,)
        Most probable class, or zero if there is a single group; see `_class_logits`.
    undecided : Tensor of shape (b, 1) or (b, 0)
        Mean log-probability over all classes, for classification.
    weights : Tensor of shape (b,)
        Sample weights, float64.
    keys : Tensor of shape (b,)
        Hashes of the samples' inputs.
    targets : Tensor of shape (b, c) or (b, 0)
        Targets, if the likelihood has a noise level.
    inputs : Tensor of shape (b, d) or (b, 0)
        Inputs of the network, if they are rows of real numbers.
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
        """Build a batch from features (b, i), outputs (b, c), inputs and targets."""
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
            undecided = indecision(logits)
        weights = torch.ones_like(groups) if weights is None else weights
        keys = torch.zeros_like(groups) if keys is None else keys.to(groups)
        found = sketched(features), groups, undecided, weights.double(), keys
        return cls(*found, targets.double(), inputs)

    def joined(self, other: "FeatureBatch") -> "FeatureBatch":
        """Return the samples of both batches."""
        names = [field.name for field in fields(self)]
        parts = ([getattr(part, name) for part in (self, other)] for name in names)
        return FeatureBatch(*map(torch.cat, parts))

    def kept(self) -> "FeatureBatch":
        """Keep the samples with the smallest hashes; merge those with equal hashes."""
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
    """Leverages of features or inputs, for one or several ridges.

    Attributes
    ----------
    name : {"features", "inputs"}
        Attribute of a `FeatureBatch`.
    leverage : Leverage
        Leverage of this attribute.
    mean, std : Tensor of shape (r,)
        Moments of the logarithms of the training samples' leave-one-out leverages, for
        r ridges. Groups with a single sample are ignored.
    """

    name: str
    leverage: Leverage
    mean: Tensor
    std: Tensor

    def scores(self, batch: FeatureBatch) -> Tensor:
        """Return standardised logarithms of leverages, (b, r)."""
        logs = self.leverage(self._values(batch), batch.groups).log()
        return (logs - self.mean) / self.std

    def whitened(self, batch: FeatureBatch, ridge: int = 0) -> Tensor:
        """Return vectors (b, i + 1) whose squared norms are leverages."""
        return self.leverage.whitened(self._values(batch), batch.groups, ridge)

    def _values(self, batch: FeatureBatch) -> Tensor:
        """Return features or inputs; raise ValueError if their width has changed."""
        values, n = getattr(batch, self.name), self.leverage.moments.sums.shape[1]
        if values.shape[1] != n:
            raise ValueError(
                f"The {self.name} of X must be {n} real numbers per row, as in fit. "
                "Otherwise, their distance from the training samples is unknown. Pass "
                "X in the same format as in fit, or use residual='none'."
            )
        return values


@dataclass(frozen=True)
class Scale:
    """Distribution of the leverages of new samples from the data's distribution.

    The logarithms of q leverages are normal. ``t`` is minus the sum of the logarithms
    of their tail probabilities. The leverages are dependent, so ``t`` has a
    distribution of its own. Its tail is exponential:

        p(x) = P(t > t(x)) = p₀ exp(-(t(x) - t₀) / β),

    where a share p₀ of the samples exceeds ``t₀``, and β is the mean excess over ``t₀``
    (the "peaks over threshold" of Davison and Smith 1990, with a shape of zero). Few
    samples exceed ``t₀``, so the mean excess is shrunk towards q. This is the value for
    q equal leverages, for which ``t/q`` has an exponential distribution.

    Attributes
    ----------
    mean, std : Tensor of shape (q,)
        Moments of the standardised logarithms; see `Distance.scores`.
    usual, excess : float
        ``t₀`` and β.
    """

    mean: Tensor
    std: Tensor
    usual: float = 0.0
    excess: float = 1.0

    @classmethod
    def of(cls, scores: Tensor, weights: Tensor, share: float) -> "Scale":
        """Estimate the scale from samples (b, q) with weights (b,).

        ``share`` of the samples do not exceed ``t₀``.
        """
        scale = cls(*finite_moments(scores, weights))
        t = scale.tails(scores)
        weights = weights * t.isfinite()
        usual, q = weighted_quantile(t, weights, share), scores.shape[1]
        above = weights * (t > usual)
        total = above @ (t.nan_to_num() - usual).clamp(min=0) + PRIOR_COUNT * q
        excess = float(total / (above.sum() + PRIOR_COUNT))
        return replace(scale, usual=usual, excess=excess)

    def tails(self, scores: Tensor) -> Tensor:
        """Return ``t`` (b,)."""
        return -torch.special.log_ndtr((self.mean - scores) / self.std).sum(1)

    def log_ratios(self, scores: Tensor) -> Tensor:
        """Return ``log p₀/p`` (b,), which is positive beyond ``t₀``."""
        return (self.tails(scores) - self.usual) / self.excess


@dataclass(frozen=True)
class Novelty(FieldsOnly):
    """Dissimilarity of a sample to the training data.

    Attributes
    ----------
    likelihood : Likelihood
        Likelihood of the targets given the outputs.
    moments : FeatureMoments
        Feature sums over the training samples.
    input_moments : FeatureMoments
        Input sums over the training samples.
    samples : FeatureBatch
        Some training samples, for comparison.
    held_out : Scale or None
        Scale of the leverages of held-out samples, if there are any.
    """

    likelihood: Likelihood
    moments: FeatureMoments
    input_moments: FeatureMoments
    samples: FeatureBatch
    held_out: Scale | None = None

    @classmethod
    def of(cls, likelihood: Likelihood, batch: FeatureBatch, c: int) -> "Novelty":
        """Build the novelty from a first batch, for a network with c outputs."""
        n_groups = 1
        if isinstance(likelihood, ClassificationLikelihood):
            zeros = batch.features.new_zeros(1, c)
            n_groups = _class_logits(likelihood, zeros, batch.features)[1]
        of = batch.groups, batch.weights, n_groups
        parts = batch.features, batch.inputs
        features, inputs = (FeatureMoments.of(part, *of) for part in parts)
        return cls(likelihood, features, inputs, batch.kept())

    def beside(self, inputs: Tensor) -> "Novelty":
        """Return the novelty, without inputs if ``inputs`` have a different width.

        Inputs whose widths differ are not a table, but sequences padded per batch.
        """
        if inputs.shape[1] == self.samples.inputs.shape[1]:
            return self
        samples = replace(self.samples, inputs=self.samples.inputs[:, :0])
        of = samples.groups, samples.weights, len(self.moments.counts)
        moments = FeatureMoments.of(samples.inputs, *of)
        return replace(self, input_moments=moments, samples=samples)

    def merged(self, other: "Novelty") -> "Novelty":
        """Merge this novelty with the novelty of other training samples."""
        own, others = self.samples.inputs, other.samples.inputs
        self, other = self.beside(others), other.beside(own)
        moments = self.moments.merged(other.moments)
        inputs = self.input_moments.merged(other.input_moments)
        samples = self.samples.joined(other.samples).kept()
        return replace(self, moments=moments, input_moments=inputs, samples=samples)

    @cached_property
    def leverage(self) -> Leverage:
        """Leverage of features relative to the training samples.

        With a single group, only the small ridge is used, because the distance from the
        overall mean does not indicate novelty if the classes surround this mean.
        """
        n_groups = len(self.moments.counts)
        return Leverage(self.moments, RIDGES if n_groups > 1 else RIDGES[:1])

    @cached_property
    def _left_out(self) -> dict[str, tuple[Leverage, Tensor]]:
        """Logarithms of the training samples' leave-one-out leverages, (n, r)."""
        samples, found = self.samples, {}
        inputs = Leverage(self.input_moments, (INPUT_RIDGE,))
        for name, leverage in (("features", self.leverage), ("inputs", inputs)):
            values = getattr(samples, name)
            if values.shape[1]:
                of = values, samples.groups, None, samples.weights
                logs = leverage.left_out(*of).log()
                if logs.isfinite().any():
                    found[name] = leverage, logs
        return found

    @cached_property
    def distances(self) -> list["Distance"]:
        """Leverages of the features and, if the inputs are a table, of the inputs."""
        weights = self.samples.weights
        return [
            Distance(name, leverage, *finite_moments(logs, weights))
            for name, (leverage, logs) in self._left_out.items()
        ]

    @property
    def _share(self) -> float:
        classes = self.likelihood.is_classification
        return USUAL_CLASSES if classes else USUAL_NUMBERS

    @property
    def indecision_moments(self) -> tuple[Tensor, Tensor]:
        """Moments of `indecision` over the training samples, (1,) or (0,) each.

        They are empty in regression, and if the inputs are a table, because the inputs
        detect unusual samples more reliably.
        """
        is_table = any(part.name == "inputs" for part in self.distances)
        n_columns = 0 if is_table else self.samples.undecided.shape[1]
        mean, std = self.usual
        return mean[len(mean) - n_columns :], std[len(std) - n_columns :]

    @cached_property
    def scale(self) -> Scale:
        """Scale of the leverages of held-out samples, otherwise of training samples."""
        if self.held_out is not None:
            return self.held_out
        pairs = zip(self.distances, self._left_out.values(), strict=True)
        leverages = [(logs - d.mean) / d.std for d, (_, logs) in pairs]
        scores = torch.cat([*leverages, self._indecision(self.samples)], 1)
        is_finite = scores.isfinite().all(1)
        return Scale.of(scores[is_finite], self.samples.weights[is_finite], self._share)

    def scores(self, batch: FeatureBatch) -> Tensor:
        """Return the standardised logarithms of all leverages, (b, q).

        The last column is the standardised indecision; see `indecision_moments`.
        """
        leverages = [part.scores(batch) for part in self.distances]
        return torch.cat([*leverages, self._indecision(batch)], 1)

    def _indecision(self, batch: FeatureBatch) -> Tensor:
        """Return the standardised indecision, (b, 1) or (b, 0)."""
        mean, std = self.indecision_moments
        return (batch.undecided[:, : len(mean)] - mean) / std

    def log_ratios(self, batch: FeatureBatch) -> Tensor:
        """Return ``log p₀/p`` (b,) for the tail probabilities p; see `Scale`."""
        return self.scale.log_ratios(self.scores(batch))

    def scaled(self, scores: list[Tensor]) -> "Novelty":
        """Return the novelty with the scale of held-out samples.

        Held-out samples can have larger leverages than training samples, because the
        network was fitted to the training samples. Each entry of ``scores`` has shape
        (b, q + 1): the values of `scores` for held-out samples, followed by the sample
        weights. The values may have been computed with other, similar networks.
        """
        q = self.scores(self.samples).shape[1] if scores else 0
        scores = [values for values in scores if values.shape[1] == q + 1]
        if not scores:
            return self
        values = torch.cat(scores)
        return replace(
            self, held_out=Scale.of(values[:, :-1], values[:, -1], self._share)
        )

    def mean_leverage(self) -> Tensor:
        """Return the mean leverage of the training samples' features, ()."""
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
    def usual(self) -> tuple[Tensor, Tensor]:
        """Moments of the compared quantities over the training samples, (q,) each."""
        samples = self.samples
        of = samples.features, samples.groups, None, samples.weights
        left_out = self.leverage.left_out(*of)
        values = torch.cat([left_out.log(), samples.undecided], 1)
        return finite_moments(values, samples.weights)

    def log_tail_probability(self, features: Tensor, f: Tensor) -> Tensor:
        """Return scores (b,) of features (b, i) and outputs (b, c), float64.

        A score is a sum of logarithms of tail probabilities. A higher score means that
        the sample is more similar to the training data.
        """
        batch = FeatureBatch.of(self.likelihood, features, f)
        leverages = self.leverage(batch.features, batch.groups)
        values = torch.cat([leverages.log(), batch.undecided], 1)
        mean, std = self.usual
        return torch.special.log_ndtr((mean - values) / std).sum(1)
