"""Novelty: dissimilarity of a sample to the training data, in tail probabilities.

Each sample has several quantities that are larger for unusual samples:

* the leverages of the last-layer features, for a small and for a large ridge, relative
  to the training samples of the predicted class;
* the leverage of the inputs and the distance from the nearest training input, if the
  inputs are an array of real numbers: a table or images, see `hashed_inputs`;
* in classification, the network's indecision between the classes and its energy.

A normal distribution is fitted to the logarithm of each quantity on the training
samples, leave-one-out. ``score_samples`` is the sum of the logarithms of the tail
probabilities, in regression without the leverage of the inputs. The residual uses the
leverages only, or, without arrays of inputs, the leverages and the indecision.

In regression, leverages are relative to all training samples, and features have a
single ridge. This is also the case in classification if the mean features of all
classes take up too much memory.

References: Mukhoti, Kirsch, van Amersfoort, Torr and Gal (2023), "Deep deterministic
uncertainty: a new simple baseline" (feature density and entropy of the classes); Liu,
Wang, Owens and Li (2020), "Energy-based out-of-distribution detection"; Sun, Ming, Zhu
and Li (2022), "Out-of-distribution detection with deep nearest neighbors"; Fisher
(1932), "Statistical methods for research workers" (sum of the logarithms of tail
probabilities). `leverage` lists more references.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly
from sklaplace.core.trees import leaves
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.novelty.leverage import (
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
# Minimum number of samples for a `Scale`. Training samples count for the samples that
# are missing from the held-out samples.
MIN_SAMPLES = 20
# Maximum number of training samples kept for comparison.
MAX_KEPT = 256
# Smallest standard deviation of the logarithms, for identical training samples.
SMALLEST_STD = 1e-2
# Ridges for rows of a table, whose columns are standardised, and for other inputs, such
# as images. The values of an image have the same unit, and a small ridge would make
# noise in rarely used pixels unusual.
ROW_RIDGE, IMAGE_RIDGE = 1e-2, 1.0
# Maximum number of input values. Inputs with more values are hashed.
MAX_INPUTS = 256
# Maximum number of feature sums of all classes. These 32 MiB are copied for each batch.
MAX_SUMS = 2**22
# Largest magnitude of `logit_terms`.
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


def logit_terms(logits: Tensor) -> Tensor:
    """Return indecision and energy, (b, 2), of logits (b, labels, K).

    The indecision is the mean log-probability over all classes. The energy is minus the
    logarithm of the sum of the exponentials of the logits.
    """
    energy = -logits.logsumexp(2)
    terms = torch.stack([logits.mean(2) + energy, energy], -1).mean(1)
    return terms.double().clamp(min=-_LARGEST, max=_LARGEST)


def hashed_inputs(x: object) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the inputs as hashed rows (b, d), and the shape of a sample's inputs.

    Return None and an empty shape if the inputs are not one array of real numbers, with
    two axes (a table) or with four or more (images). Arrays with three axes can be
    sequences, whose lengths may differ between batches.
    """
    first, *rest = leaves(x)
    if rest or not isinstance(first, Tensor) or first.ndim in (0, 1, 3):
        return None, ()
    if not first.is_floating_point():
        return None, ()
    return sketched(first.flatten(1), MAX_INPUTS), tuple(first.shape[1:])


def check_input_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ValueError if inputs have another shape than expected, if any."""
    if expected and shape != expected:
        raise ValueError(
            f"The inputs of X must be real numbers of shape {expected} per sample, as "
            f"in fit, but have {f'the shape {shape}' if shape else 'another type'}. "
            "Their distance from the training samples is unknown. Pass X in the same "
            "format as in fit. Only predictions with residual='none' accept others."
        )


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and other values that determine the samples' novelty.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Last-layer features.
    groups : Tensor of shape (b,)
        Most probable class, or zero if there is a single group; see `_class_logits`.
    logit_terms : Tensor of shape (b, 2) or (b, 0)
        Indecision and energy, for classification; see `logit_terms`.
    weights : Tensor of shape (b,)
        Sample weights, float64.
    keys : Tensor of shape (b,)
        Hashes of the samples' inputs.
    targets : Tensor of shape (b, c) or (b, 0)
        Targets, if the likelihood has a noise level.
    inputs : Tensor of shape (b, d) or (b, 0)
        Inputs of the network, hashed, if they are an array of real numbers.
    input_shape : tuple of int
        Shape of a sample's inputs, or an empty tuple without ``inputs``.
    """

    features: Tensor
    groups: Tensor
    logit_terms: Tensor
    weights: Tensor
    keys: Tensor
    targets: Tensor
    inputs: Tensor
    input_shape: tuple[int, ...] = ()

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
        none = torch.zeros(len(f), 0, dtype=torch.float64, device=f.device)
        terms, (inputs, shape) = none, hashed_inputs(x)
        if isinstance(likelihood, ClassificationLikelihood):
            logits, n_groups = _class_logits(likelihood, f, features)
            if n_groups > 1:
                groups = logits[:, 0].argmax(1)
            terms = logit_terms(logits)
        has_targets = targets is not None and likelihood.has_noise
        return cls(
            features=sketched(features),
            groups=groups,
            logit_terms=terms,
            weights=(torch.ones_like(groups) if weights is None else weights).double(),
            keys=torch.zeros_like(groups) if keys is None else keys.to(groups),
            targets=targets.double() if targets is not None and has_targets else none,
            inputs=features[:, :0] if inputs is None else inputs,
            input_shape=shape,
        )

    def joined(self, other: "FeatureBatch") -> "FeatureBatch":
        """Return the samples of both batches."""
        pairs = {k: [v, getattr(other, k)] for k, v in self._tensors.items()}
        tensors: Any = {k: torch.cat(pair) for k, pair in pairs.items()}
        return replace(self, **tensors)

    def kept(self) -> "FeatureBatch":
        """Keep the samples with the smallest hashes; merge those with equal hashes."""
        if len(self.keys) <= MAX_KEPT:
            return self
        keys, places = self.keys.unique(return_inverse=True)
        order = torch.arange(len(places), device=places.device)
        first = torch.full_like(keys, len(places))
        first = first.scatter_reduce(0, places, order, "amin")[:MAX_KEPT]
        totals = self.weights.new_zeros(len(keys)).index_add(0, places, self.weights)
        taken: Any = {k: v[first] for k, v in self._tensors.items()}
        return replace(self, **(taken | {"weights": totals[:MAX_KEPT]}))

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}


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
    """

    name: str
    leverage: Leverage

    def logs(self, batch: FeatureBatch) -> Tensor:
        """Return the logarithms of the leverages for r ridges, (b, r)."""
        return self.leverage(getattr(batch, self.name), batch.groups).log()

    def left_out(self, samples: FeatureBatch) -> Tensor:
        """Return `logs` of training samples, leave-one-out."""
        rows = getattr(samples, self.name)
        return self.leverage.left_out(rows, samples.groups, samples.weights).log()

    def whitened(self, batch: FeatureBatch) -> Tensor:
        """Return vectors (b, i + 1) whose squared norms are leverages."""
        return self.leverage.whitened(getattr(batch, self.name), batch.groups)


@dataclass(frozen=True)
class NearestInput:
    """Mahalanobis distance from the nearest of some training inputs.

    Attributes
    ----------
    leverage : Leverage
        Leverage of the inputs, which defines the distance.
    inputs : Tensor of shape (n, d)
        Training inputs.
    """

    leverage: Leverage
    inputs: Tensor

    @cached_property
    def _rows(self) -> Tensor:
        """Whitened training inputs, (n, d + 1)."""
        return self._whitened(self.inputs)

    def _whitened(self, inputs: Tensor) -> Tensor:
        """Return whitened inputs (b, d + 1) with the same origin for all groups."""
        groups = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        return self.leverage.whitened(inputs, groups)

    def logs(self, batch: FeatureBatch) -> Tensor:
        """Return the logarithms of the distances, (b, 1)."""
        distances = self._distances(self._whitened(batch.inputs))
        return distances.amin(1, keepdim=True).clamp(min=_TINY).log()

    def left_out(self) -> Tensor:
        """Return the logarithms of distances from the nearest other inputs, (n, 1)."""
        distances = self._distances(self._rows)
        positive = distances.masked_fill(distances == 0, torch.inf)
        return positive.amin(1, keepdim=True).log()

    def _distances(self, rows: Tensor) -> Tensor:
        # matrix products would not return zero for equal rows
        mode = "donot_use_mm_for_euclid_dist"
        return torch.cdist(rows, self._rows, compute_mode=mode)


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
        Moments of the standardised logarithms; see `Novelty.scores`.
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
        mean, std = finite_moments(scores, weights)
        scale = cls(mean, std)
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
        features, inputs = (
            FeatureMoments.of(rows, batch.groups, batch.weights, n_groups)
            for rows in (batch.features, batch.inputs)
        )
        return cls(likelihood, features, inputs, batch.kept())

    def batch(self, features: Tensor, f: Tensor, x: object) -> FeatureBatch:
        """Return new samples with features (b, i), outputs (b, c) and inputs ``x``.

        Raises
        ------
        ValueError
            If features or inputs have other shapes than in training.
        """
        batch = FeatureBatch.of(self.likelihood, features, f, x=x)
        check_input_shape(batch.input_shape, self.samples.input_shape)
        if batch.features.shape[1:] != self.samples.features.shape[1:]:
            raise ValueError(
                f"The last layer received {features.shape[1]} features per sample, "
                f"and {self.samples.features.shape[1]} in fit. Pass X in the same "
                "format as in fit, or use residual='none'."
            )
        return batch

    def without_inputs(self) -> "Novelty":
        """Return the novelty without inputs."""
        none = self.samples.inputs[:, :0]
        samples = replace(self.samples, inputs=none, input_shape=())
        n_groups = len(self.moments.counts)
        return replace(
            self,
            input_moments=FeatureMoments.of(
                none, samples.groups, samples.weights, n_groups
            ),
            samples=samples,
            held_out=None,
        )

    def merged(self, other: "Novelty") -> "Novelty":
        """Merge this novelty with the novelty of other training samples.

        Inputs with different shapes, such as rows padded per batch, are left out.
        """
        if self.samples.input_shape != other.samples.input_shape:
            self, other = self.without_inputs(), other.without_inputs()
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
    def _input_leverage(self) -> Leverage | None:
        """Leverage of the inputs, if they are an array."""
        shape = self.samples.input_shape
        if not shape:
            return None
        is_table = len(shape) == 1
        ridge = ROW_RIDGE if is_table else IMAGE_RIDGE
        return Leverage(self.input_moments, (ridge,), standardises=is_table)

    @cached_property
    def distances(self) -> list[Distance]:
        """Leverages of the features and, if there are any, of the inputs."""
        distances = [Distance("features", self.leverage)]
        if self._input_leverage is not None:
            distances.append(Distance("inputs", self._input_leverage))
        return [d for d in distances if d.left_out(self.samples).isfinite().any()]

    @cached_property
    def nearest(self) -> NearestInput | None:
        """Distance from the nearest training input, if the inputs are an array."""
        if self._input_leverage is None:
            return None
        nearest = NearestInput(self._input_leverage, self.samples.inputs)
        return nearest if nearest.left_out().isfinite().any() else None

    @cached_property
    def _training_logs(self) -> Tensor:
        """Values (n, q) of `_logs` for training samples, leave-one-out."""
        samples, nearest = self.samples, self.nearest
        logs = [distance.left_out(samples) for distance in self.distances]
        logs.append(samples.logit_terms)
        if nearest is not None:
            logs.append(nearest.left_out())
        return torch.cat(logs, 1)

    def _logs(self, batch: FeatureBatch, n_terms: int | None = None) -> Tensor:
        """Return the first ``n_terms`` quantities (b, q); see the module's docstring.

        By default, all are returned.
        """
        logs = [distance.logs(batch) for distance in self.distances]
        logs.append(batch.logit_terms)
        if n_terms is None and self.nearest is not None:
            logs.append(self.nearest.logs(batch))
        return torch.cat(logs, 1)[:, :n_terms]

    @cached_property
    def moments_of_logs(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of all quantities, (q,) each."""
        return finite_moments(self._training_logs, self.samples.weights)

    @cached_property
    def n_residual_terms(self) -> int:
        """Number of quantities that the residual uses, starting with the first.

        These are the leverages and, without arrays of inputs, the indecision.
        """
        n_leverages = sum(len(d.leverage.ridges) for d in self.distances)
        n_terms = self.samples.logit_terms.shape[1]
        return n_leverages + (0 if self.samples.input_shape else min(n_terms, 1))

    @property
    def _share(self) -> float:
        classes = self.likelihood.is_classification
        return USUAL_CLASSES if classes else USUAL_NUMBERS

    @cached_property
    def scale(self) -> Scale:
        """Scale of held-out samples, otherwise of training samples."""
        if self.held_out is not None:
            return self.held_out
        scores, weights = self._training_scores
        return Scale.of(scores, weights, self._share)

    @cached_property
    def _training_scores(self) -> tuple[Tensor, Tensor]:
        """`scores` (n, q) and weights (n,) of training samples, leave-one-out."""
        n_terms, (mean, std) = self.n_residual_terms, self.moments_of_logs
        scores = ((self._training_logs - mean) / std)[:, :n_terms]
        is_finite = scores.isfinite().all(1)
        return scores[is_finite], self.samples.weights[is_finite]

    def scores(self, batch: FeatureBatch) -> Tensor:
        """Return the standardised quantities for the residual, (b, q)."""
        n_terms, (mean, std) = self.n_residual_terms, self.moments_of_logs
        return (self._logs(batch, n_terms) - mean[:n_terms]) / std[:n_terms]

    def log_ratios(self, batch: FeatureBatch) -> Tensor:
        """Return ``log p₀/p`` (b,) for the tail probabilities p; see `Scale`."""
        return self.scale.log_ratios(self.scores(batch))

    def scaled(self, scores: list[Tensor]) -> "Novelty":
        """Return the novelty with the scale of held-out samples.

        Held-out samples can have larger leverages than training samples, because the
        network was fitted to the training samples. Each entry of ``scores`` has shape
        (b, q + 1): the values of `scores` for held-out samples, followed by the sample
        weights. The values may have been computed with other, similar networks.

        With fewer than `MIN_SAMPLES` held-out samples, the training samples count for
        the samples that are missing.
        """
        n_columns = self.n_residual_terms + 1 if scores else 0
        scores = [values for values in scores if values.shape[1] == n_columns]
        if not scores:
            return self
        values, held_out_weights = torch.cat(scores).split([n_columns - 1, 1], 1)
        training_values, training_weights = self._training_scores
        n_missing = (MIN_SAMPLES - held_out_weights.sum()).clamp(min=0)
        shares = training_weights / training_weights.sum()
        weights = torch.cat([n_missing * shares, held_out_weights.squeeze(1)])
        values = torch.cat([training_values, values])
        return replace(self, held_out=Scale.of(values, weights, self._share))

    def mean_leverage(self) -> Tensor:
        """Return the mean leverage of the training samples' features, ()."""
        samples = self.samples
        values = self.leverage(samples.features, samples.groups)[:, 0]
        return samples.weights @ values / samples.weights.sum()

    @cached_property
    def target_variances(self) -> Tensor:
        """Variances of the targets of the training samples, (c,)."""
        weights = self.samples.weights / self.samples.weights.sum()
        targets = self.samples.targets
        return weights @ (targets - weights @ targets) ** 2

    def log_tail_probability(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return scores (b,) of features (b, i), outputs (b, c) and inputs, float64.

        A score is a sum of logarithms of tail probabilities. A higher score means that
        the sample is more similar to the training data. Training samples define all
        scores, so that neither the prior nor held-out samples change them.
        """
        mean, std = self.moments_of_logs
        logs = self._logs(self.batch(features, f, x))
        tails = torch.special.log_ndtr((mean - logs) / std)
        if not self.likelihood.is_classification:
            # leave out the leverage of the inputs, which hides new categories
            tails = tails[:, [0, *range(self.n_residual_terms, tails.shape[1])]]
        return tails.sum(1)
